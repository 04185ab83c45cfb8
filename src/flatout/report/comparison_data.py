"""Data of a comparison, plain and frozen: the text and the JSON read it."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.report.estimates import Verdict
from flatout.report.measured_loop import FactKind
from flatout.report.model import Gain


@dataclass(frozen=True)
class ComparedPart:
    """Part of a batch's time in both loops.

    Attributes:
        name: such as ``"data"``, ``"step"``, ``"forward"``, or ``"untuned loop"``.
        a_ms: milliseconds in the first loop.
        b_ms: milliseconds in the second loop, for as many samples.
        verdict: on ``b``; None if the part was measured once, so that no spread is known.
        whole: name of the part that this one belongs to; empty for the batch.
    """

    name: str
    a_ms: float
    b_ms: float
    verdict: Verdict | None
    whole: str = ""


@dataclass(frozen=True)
class ComparedLoop:
    """Loop that both runs have.

    Attributes:
        name: class of its module; empty if the runs have one loop only.
        speed: speed of ``b`` relative to ``a``; 1.25 is 25 % more samples per second.
        verdict: on ``b``.
        samples: samples of a batch, to which all times refer; None if unknown.
        batch: time of a batch.
        parts: its parts.
        mainly: name of the part that makes most of the difference; empty if none is shown.
        untuned: time of a batch before tuning; None if unknown.
        drifted: True if the untuned loop, which is the same in both runs, changed its speed. ``speed`` is corrected by
            this change then.
    """

    name: str
    speed: Gain
    verdict: Verdict
    samples: float | None
    batch: ComparedPart
    parts: tuple[ComparedPart, ...]
    mainly: str
    untuned: ComparedPart | None
    drifted: bool


@dataclass(frozen=True)
class Change:
    """Fact that differs between the runs.

    Attributes:
        kind: such as ``"code"`` or ``"versions"``.
        name: such as ``"torch"``, or the name of a class.
        a: the fact of the first run; None if the run lacks it.
        b: the fact of the second run.
        loop: name of the loop; empty if all loops of the runs have the change.
    """

    kind: FactKind
    name: str
    a: str | None
    b: str | None
    loop: str = ""


@dataclass(frozen=True, repr=False)
class ComparisonData:
    """Comparison of two runs.

    Attributes:
        a: name of the first run.
        b: name of the second run.
        loops: the loops that both runs have, at least one.
        changes: facts that differ.
        same: kinds of facts that are recorded and do not differ.
        unrecorded: kinds of facts that a run does not record.
        disturbed: names of the runs that were measured while other programs used the cores.
    """

    a: str
    b: str
    loops: tuple[ComparedLoop, ...]
    changes: tuple[Change, ...]
    same: tuple[FactKind, ...]
    unrecorded: tuple[FactKind, ...]
    disturbed: tuple[str, ...]
