"""Models with their own synchronization of ranks, trained with and without ``optimize``."""

from __future__ import annotations

import pytest

from tests.distributed import wrapped_checks as checks


@pytest.mark.parametrize("kind", ["ddp", "fully_shard", "hooks"])
def test_a_synchronized_model_trains_as_without_flatout(pair, kind):
    pair(checks.trains_as_without_flatout, kind)
