"""Frozen data classes of a comparison, the source of its text and JSON form."""

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
        b_ms: milliseconds in the second loop, for the same number of samples.
        verdict: verdict on the second loop; None if the part was measured once, so that no spread is known.
        whole: name of the part that contains this part; empty for the batch.
    """

    name: str
    a_ms: float
    b_ms: float
    verdict: Verdict | None
    whole: str = ""


@dataclass(frozen=True)
class ComparedLoop:
    """Comparison of a loop that both runs have.

    Attributes:
        name: class of the loop's module; empty if the runs have one loop only.
        speed: speed of ``b`` relative to ``a``. A value of 1.25 is 25 % more samples per second.
        verdict: verdict on the loop of ``b``.
        samples: samples of a batch, to which all times refer; None if unknown.
        batch: time of a batch.
        parts: parts of a batch.
        mainly: name of the part with most of the difference; empty without a significant difference.
        untuned: time of a batch before tuning; None if unknown.
        drifted: True if the untuned loop is the same in both runs but differs in speed. ``speed`` is then relative to
            the untuned loop.
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
        a: fact of the first run; None if the run lacks the fact.
        b: fact of the second run; None if the run lacks the fact.
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
        loops: loops that both runs have, at least one.
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
