"""Data-parallel training of two ranks that share a GPU, over gloo."""

from __future__ import annotations

import pytest

from tests.gpu import rank_checks
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RankPool(2, tmp_path_factory.mktemp("ranks"), method="spawn") as pool:
        yield pool


@pytest.mark.parametrize("name", rank_checks.CASES)
def test_two_ranks(pool, name):
    pool(rank_checks.case, name)
