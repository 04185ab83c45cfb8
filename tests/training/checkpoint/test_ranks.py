"""Processes that train together. Each resumes from its own file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import RankPool

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs a torch with torch.distributed and gloo", allow_module_level=True)

from tests.training.checkpoint import rank_checks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(rank_checks.WORLD, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


def test_each_rank_resumes_from_its_own_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks(rank_checks.each_rank_goes_on_from_its_own_file, str(tmp_path))


def test_no_folder_is_written_to_by_several(ranks: RankPool, tmp_path: Path) -> None:
    ranks(rank_checks.no_folder_is_written_to_by_several, str(tmp_path))
