"""Tuning of the trainings that a framework runs, from the beginning of each training to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from flatout.autotune.auto import Auto, auto
from flatout.autotune.script_report import ScriptReport
from flatout.core.standard_error import say
from flatout.plan import Plan
from flatout.training.spec import CACHED
from flatout.tuning.arguments import choices_of


class AutoOptions(TypedDict, total=False):
    """Options of :func:`flatout.auto`."""

    techniques: Mapping[str, Any] | None
    precision: str
    deterministic: bool
    plan: Plan | str | Path | None


class FrameworkTuning:
    """Tuning of one training after another, with the same options.

    Args:
        techniques: as in :func:`flatout.auto`.
        precision: as in :func:`flatout.auto`.
        deterministic: as in :func:`flatout.auto`.
        plan: as in :func:`flatout.auto`.

    Raises:
        ValueError: a technique or a precision is unknown.
    """

    def __init__(
        self,
        *,
        techniques: Mapping[str, Any] | None = None,
        precision: str = "auto",
        deterministic: bool = False,
        plan: Plan | str | Path | None = CACHED,
    ) -> None:
        choices_of(techniques, precision)
        self._techniques, self._precision = dict(techniques or {}), precision
        self._deterministic, self._plan = deterministic, plan
        self._auto: Auto | None = None
        self._report: ScriptReport | None = None

    @property
    def report(self) -> ScriptReport | None:
        """Report of the present or the last training, or None before the first training."""
        return self._report if self._auto is None else self._auto.report

    def begin(self, *, sets_precision: bool, scales_losses: bool = False) -> None:
        """Begin to tune the next training.

        Args:
            sets_precision: True if the user has chosen a precision of the framework. This precision does not change.
            scales_losses: True if the framework has a loss scaler, and rejects to clip gradients of optimizers that
                unscale gradients themselves. flatout's native optimizers do so.
        """
        techniques = dict(self._techniques)
        if sets_precision and self._precision == "auto":
            techniques.setdefault("precision", False)
        if scales_losses:
            techniques.setdefault("fused_optimizer", False)
        self._auto = auto(
            techniques=techniques,
            precision=self._precision,
            deterministic=self._deterministic,
            plan=self._plan,
        )

    def end(self, *, shows_report: bool) -> None:
        """Undo all kept techniques, and show the report. Do nothing if no training has begun."""
        if self._auto is None:
            return
        ended, self._auto = self._auto, None
        ended.undo()
        self._report = ended.report
        if shows_report and not ended.why_nothing:
            for line in str(self._report).splitlines():
                say(line)
