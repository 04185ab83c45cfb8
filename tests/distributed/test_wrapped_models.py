"""Models that come with their own synchronization of ranks train through ``optimize`` as without it."""

from __future__ import annotations

import pytest

from tests.distributed import wrapped_checks as checks


@pytest.mark.parametrize("kind", ["ddp", "fully_shard", "hooks"])
def test_a_synchronized_model_trains_as_without_flatout(pair, kind):
    pair(checks.trains_as_without_flatout, kind)
