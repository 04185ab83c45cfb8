"""Shared by all benchmarks: a private cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured peaks, but no plans: each contender is tuned from the start.

    A file lies in the place of the folder of plans. Processes that a benchmark starts inherit the setting.
    """
    cache = tmp_path_factory.mktemp("cache")
    (cache / "plans").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(cache))
        yield
