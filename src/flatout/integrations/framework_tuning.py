"""Tuning of the trainings that a framework runs, from the beginning of each to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from flatout.autotune.door import Auto, auto, say
from flatout.autotune.script_report import ScriptReport
from flatout.plan import CACHED, Plan
from flatout.tuning.choices import choices_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AutoOptions(TypedDict, total=False):
    """Options of :func:`flatout.auto`."""

    techniques: Mapping[str, Any] | None
    precision: str
    deterministic: bool
    plan: Plan | str | Path | None


class FrameworkTuning:
    """Tuning of one training after another, with the same options.

    Args:
        options: as in :func:`flatout.auto`.

    Raises:
        ValueError: a technique or a precision is unknown.
    """

    def __init__(self, **options: Unpack[AutoOptions]) -> None:
        self._options: AutoOptions = {"techniques": None, "precision": "auto", "deterministic": False, "plan": CACHED}
        self._options.update(options)
        choices_of(self._options["techniques"], self._options["precision"])
        self._auto: Auto | None = None
        self._report: ScriptReport | None = None

    @property
    def report(self) -> ScriptReport | None:
        """Report of the present training, or of the last one; None before the first."""
        return self._report if self._auto is None else self._auto.report

    def begin(self, *, sets_precision: bool, scales_losses: bool) -> None:
        """Tune the training that follows.

        Args:
            sets_precision: the framework trains in a precision that its user has chosen, which stays.
            scales_losses: the framework steps optimizers with a loss scaler. A native step unscales gradients itself,
                so Lightning would refuse to clip them. accelerate would restore the ``step`` of the original class.
        """
        own = dict.fromkeys(["precision"] * sets_precision + ["fused_optimizer"] * scales_losses, False)
        if self._options["precision"] != "auto":
            own.pop("precision", None)
        self._auto = auto(**{**self._options, "techniques": {**own, **(self._options["techniques"] or {})}})

    def end(self, *, shows_report: bool) -> None:
        """Undo everything that is kept, and show the report. Does nothing if no training has begun."""
        if self._auto is None:
            return
        ended, self._auto = self._auto, None
        ended.undo()
        self._report = ended.report
        if shows_report:
            for line in str(self._report).splitlines():
                say(line)
