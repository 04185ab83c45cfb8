"""Which jobs are run: those of ``--jobs`` and ``--seed``, or a choice that covers every kind of part."""

from __future__ import annotations

import pytest

from tests.differential.grammar import Job, covering, draw

CHOSEN, COMPILING = 40, 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        jobs = metafunc.config.getoption("--jobs")
        first = metafunc.config.getoption("--seed")
        seeds = covering(range(2000), CHOSEN, COMPILING) if jobs is None else range(first, first + jobs)
        metafunc.parametrize("seed", [pytest.param(seed, marks=_known(draw(seed))) for seed in seeds])


def _known(job: Job) -> list[pytest.MarkDecorator]:
    """Defects that are being mended."""
    reasons = {
        "movable object": "objects that only have .to() are refused",
    }
    found = [reasons[kind] for kind in (job.loss, job.batch, job.loader) if kind in reasons]
    return [pytest.mark.xfail(reason=found[0], strict=False)] if found else []
