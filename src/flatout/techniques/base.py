"""The protocol of a technique: when it applies, what there is to try, and how it is turned on and off."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from flatout.core.errors import Unsuitable
from flatout.core.toggle import Toggle
from flatout.report.model import Row, Status

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job


class Candidate(Toggle):
    """Candidate of a technique that changes how a step runs. Turning it on and off costs nothing.

    Attributes:
        value: what ``techniques={name: value}`` would force it with; a plan stores this.
        watches: whether it wants to see the batches that are trained on.
        why_off: why the change has stopped working while it was on; empty while it does.
        settling: steps of each batch that it takes to work again after training state was put back.
        hides_memory: whether steps take memory that is not allocated step by step, so that it cannot be measured.
        scale: samples of a step, relative to one without it.
    """

    value: Any
    watches: ClassVar[bool] = False
    why_off: str = ""
    settling: int = 0
    hides_memory: bool = False
    scale: float = 1.0

    def freeze(self) -> None:
        """Called once when the trial's batches have been seen: what is prepared for inputs is complete."""

    def on_tuning_end(self) -> None:
        """Called when it is on for good: free what was only kept for going back and forth."""

    def saw(self, batch: Any) -> None:
        """Called with each batch of ``run.loader`` where the switch ``watches``, also when it is off."""


class PairCandidate(Candidate):
    """Two switches that are on together or not at all.

    Args:
        first: turned on first, and off last.
        second: of a companion technique.
        label: what the report calls the two.
    """

    def __init__(self, first: Candidate, second: Candidate, label: str) -> None:
        self.label = label
        self.value = (first.value, second.value)
        self.parts = (first, second)
        self.settling = max(first.settling, second.settling)
        self.hides_memory = first.hides_memory or second.hides_memory

    @property
    def why_off(self) -> str:  # type: ignore[override]
        """Why one of them has stopped working."""
        return self.parts[0].why_off or self.parts[1].why_off

    def _turn_on(self) -> None:
        for part in self.parts:
            part.enable()

    def _turn_off(self) -> None:
        for part in reversed(self.parts):
            part.disable()

    def freeze(self) -> None:
        """Of both."""
        for part in self.parts:
            part.freeze()

    def release(self) -> None:
        """Of both."""
        for part in self.parts:
            part.release()


class LoaderCandidate(Protocol):
    """A loader with the same batches as the user's, made on demand. ``label`` and ``value`` as in ``Candidate``."""

    label: str
    value: Any

    def make(self) -> Iterable[Any]:
        """Build the loader."""


class NotApplicable(Exception):
    """A technique, or one of its candidates, does not apply to this job.

    Args:
        reason: one sentence for the report.
        lasts: whether the reason holds whatever is decided about earlier techniques.
    """

    def __init__(self, reason: str, *, lasts: bool = True) -> None:
        super().__init__(reason)
        self.lasts = lasts


class NothingBetter(Unsuitable):
    """Why no candidate is worth a trial, as measured already: one sentence for the report."""


class Technique(ABC):
    """One row of the checklist.

    Attributes:
        name: what ``optimize(techniques={name: ...})`` calls it.
        number: its number in the checklist; None for a neighbour.
        title: what the report calls it.
        rationale: reason in the row when the technique is kept.
        exact: whether training with it is bit-identical to training without.
        expected: the gain in speed that its literature expects, for the report. For the numbered rows that is the
            checklist "Maximizing GPU Utilization in PyTorch" (github.com/behnamasadi/PyTorchTutorial); the docstring
            names any other source.
    """

    name: ClassVar[str]
    number: ClassVar[int | None] = None
    title: ClassVar[str]
    rationale: ClassVar[str]
    exact: ClassVar[bool] = False
    expected: ClassVar[str] = ""

    @property
    def purpose(self) -> str:
        """What it does: the first sentence of its docstring; empty where Python runs without docstrings."""
        told = " ".join((type(self).__doc__ or "").split()).replace("``", "`")
        sentence = re.split(r"\.(?: |$)", told, maxsplit=1)[0]
        return sentence[:1].lower() + sentence[1:]

    def check(self, job: Job) -> None:
        """Raise ``NotApplicable`` when this job cannot use the technique."""

    def row(self, status: Status, why: str, chosen: str = "") -> Row:
        """Its line in the report."""
        return Row(
            self.name, self.number, self.title, status, why, chosen, expected=self.expected, purpose=self.purpose
        )


class Rule(Technique):
    """A technique that is always right: applied without a trial.

    Attributes:
        costs_speed: whether a trial is to show, for the report, what its switch costs; it stays on in any case.
        argument: the argument of ``optimize`` that turns the rule on; empty for a rule that is always applied.
    """

    costs_speed: ClassVar[bool] = False
    argument: ClassVar[str] = ""

    def switch(self, job: Job) -> Candidate | None:
        """What to turn on; None when there is nothing to turn (the technique is how ``Run`` works)."""
        return None


class Measured(Technique):
    """A technique that has to earn its place in a trial."""

    @abstractmethod
    def most_saved(self, job: Job, pace: Pace) -> float:
        """The most that it could save of a step, in milliseconds: what cannot pay is not tried."""

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Seconds that a candidate takes before its first timed step, for example a cold compilation."""
        return 0.0

    def found(self, candidate: Any) -> str:
        """What finding a candidate showed, for the row's why; empty when there was nothing to find."""
        return ""

    def accepts(self, value: Any) -> bool:
        """Return whether ``value`` is valid for some job and machine, in ``techniques={name: value}`` or in a plan."""
        return value is True

    @abstractmethod
    def forced(self, job: Job, value: Any) -> Any:
        """The candidate that ``techniques={name: value}`` asks for.

        Raises:
            ValueError: no candidate has that value.
        """

    def is_so(self, job: Job, value: Any) -> bool:
        """Return whether the job already has what ``techniques={name: value}`` would turn on."""
        return False


class StepTechnique(Measured):
    """Changes how a step runs. Its candidates are ``Candidate`` objects; trials time the step alone.

    Attributes:
        is_verified: whether outputs, gradients and losses have to be the baseline's, but for what
            ``tuning/equivalence.py`` allows in their dtype.
        draws_other_numbers: whether dropout and its like draw other random numbers than without the technique;
            results may then differ by what other numbers alone would change.
        checks_evaluation: whether a trial also compares the outputs in eval mode, because what the technique changes
            can break a branch that training does not take.
        optimistic_gain: the most that is expected of it: a setup that cannot pay back even then is not begun.
        companions: names of techniques with whose candidates those of this one are tried again, where all were too slow
            by themselves: together they may pay.
    """

    is_verified: ClassVar[bool] = False
    draws_other_numbers: ClassVar[bool] = False
    checks_evaluation: ClassVar[bool] = False
    optimistic_gain: ClassVar[float] = 2.0
    companions: ClassVar[tuple[str, ...]] = ()

    def most_saved(self, job: Job, pace: Pace) -> float:
        """What ``optimistic_gain`` would leave out of the step."""
        return pace.step_ms * (1 - 1 / self.optimistic_gain)

    @abstractmethod
    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Switches to try, most promising first."""


class SizeRange(NamedTuple):
    """Numbers of samples that a search may try, and the present one."""

    now: int
    smallest: int
    largest: int


class SizeTechnique(StepTechnique):
    """Technique whose only candidate is a number of samples, which the tuner finds by timing steps."""

    @abstractmethod
    def sizes(self, job: Job) -> SizeRange:
        """Return the numbers of samples to search.

        Raises:
            NotApplicable: nothing can be searched.
        """

    @abstractmethod
    def candidate(self, job: Job, samples: int, reason: str) -> Candidate:
        """Return the candidate for a number of samples.

        Args:
            job: the training.
            samples: result of the search.
            reason: result of the search, in one sentence.
        """

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return no candidate, because there is none before a search."""
        return ()


class LoaderTechnique(Measured):
    """Changes how batches are made. Trials of its ``LoaderCandidate`` objects time loading and stepping."""

    def most_saved(self, job: Job, pace: Pace) -> float:
        """All the waiting for batches."""
        return pace.load_ms

    def spares(self, job: Job) -> bool:
        """Whether candidates take less of the machine than the loader does: then one need only not be slower."""
        return False

    @abstractmethod
    def candidates(self, job: Job, pace: Pace) -> Sequence[LoaderCandidate]:
        """Loaders to try beside a step of this pace, most promising first.

        Raises:
            NotApplicable: there is none that serves this job.
            NothingBetter: finding out showed that none can do better than the loader.
        """


class Advice(Technique):
    """Names what only the user can change: nothing is turned on, and nothing is timed against anything."""

    rationale = ""

    @abstractmethod
    def findings(self, job: Job, seconds: float) -> Sequence[str]:
        """Sentences with file and line.

        Args:
            job: as tuned. It may be stepped: what that changes is put back afterwards.
            seconds: what looking may take.

        Raises:
            NotApplicable: there is nothing to say, and why.
        """
