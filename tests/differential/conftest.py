"""Choice of jobs: by ``--jobs`` and ``--seed``, or a set that covers every kind of part."""

from __future__ import annotations

import pytest

from tests.differential.grammar import covering, draw, is_slow

CHOSEN, COMPILING = 40, 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        jobs = metafunc.config.getoption("--jobs")
        first = metafunc.config.getoption("--seed")
        seeds = covering(range(2000), CHOSEN, COMPILING) if jobs is None else range(first, first + jobs)
        marks = {True: [pytest.mark.slow], False: []}
        metafunc.parametrize("seed", [pytest.param(seed, marks=marks[is_slow(draw(seed))]) for seed in seeds])
