"""``flatout.auto``, which tunes the trainings of a script or a notebook without a change to its code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.autotune.engine import Engine
from flatout.autotune.module_tuning import Options
from flatout.autotune.script_report import ScriptReport
from flatout.core.described import Described
from flatout.core.standard_error import say
from flatout.plan import Plan
from flatout.training.spec import CACHED
from flatout.tuning.arguments import budget_of, explains_keywords


class Auto(Described):
    """Tuning that :func:`auto` has started, as a context manager that undoes everything at its end."""

    def __init__(self, options: Options) -> None:
        self._engine = Engine(options, say)

    @property
    def report(self) -> ScriptReport:
        """Report on all tuning so far."""
        return ScriptReport.of(self._engine)

    @property
    def why_nothing(self) -> str:
        """Reason why nothing is tuned, which stderr shows already. Empty if there is none."""
        return self._engine.why_nothing

    def undo(self) -> None:
        """Stop tuning, and turn off everything that is kept. Weights keep the values that training gave them."""
        self._engine.undo()

    def _facts(self) -> Mapping[str, str]:
        return self.report._facts()

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


@explains_keywords
def auto(
    *,
    techniques: Mapping[str, Any] | None = None,
    precision: str | torch.dtype = "auto",
    deterministic: bool = False,
    plan: Plan | str | Path | None = CACHED,
) -> Auto:
    """Tune all later trainings of the process, without a change to their code.

    Write ``flatout.auto()`` or ``with flatout.auto():``. flatout records two updates of each optimizer, with the calls
    of its modules and the gradients of their outputs. It then measures the techniques of :func:`flatout.optimize` on
    these calls, between updates of the training. Tuning takes a second at first, and later at most a tenth of the time
    that the script has trained. ``FLATOUT_BUDGET`` limits its seconds, and 0 tunes nothing. Techniques that make the
    training faster are kept. Objects, their ``state_dict`` and their pickles do not change. If flatout fails, its
    changes are undone, one line on stderr gives the reason, and the training continues.

    A second call undoes the first one. A call in a script that ``flatout run`` has started undoes the tuning of
    ``flatout run``.

    Args:
        techniques: ``{"compile": False}`` forbids a technique, ``{"precision": "bf16"}`` forces one.
        precision: as in :func:`flatout.optimize`.
        deterministic: as in :func:`flatout.optimize`.
        plan: as in :func:`flatout.optimize`.

    Returns:
        A handle with ``report`` and ``undo``.

    Raises:
        TypeError: an argument is unknown.
        ValueError: a technique or a precision is unknown, or ``FLATOUT_BUDGET`` is not a number >= 0.
    """
    return Auto(Options(dict(techniques or {}), precision, deterministic, plan, budget=budget_of(None)))
