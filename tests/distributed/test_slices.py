"""Sliced loaders on two processes: the order of rank 0 reaches the others."""

from __future__ import annotations

import pytest

from tests.distributed import slices_checks as checks


@pytest.mark.parametrize("kind", ["shuffled", "lazy", "replacement"])
@pytest.mark.parametrize("wrapper", ["prefetcher", "in memory", "cached"])
def test_ranks_train_on_the_batches_of_one_process(pair, kind, wrapper):
    pair(checks.ranks_train_on_the_batches_of_one_process, kind, wrapper)
