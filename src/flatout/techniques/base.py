"""Protocol of a technique: its conditions, its candidates, and their effects.

A technique defines ``name``, ``title``, ``rationale``, ``check`` and ``candidates``. The first sentence of its
docstring is its row of the checklist. The docstring contains "When it helps:" and "When it hurts:". The tuner asks
``check`` if the technique applies, times each candidate against the present state, keeps the best and reverts the
others. ``check`` and ``check_value`` of a forced technique also run before there are batches, while
``job.data.batches`` is empty. If ``check`` refuses because the user already made the change, ``is_so`` returns True, so
that forcing the technique is no error.

There are three patterns for a candidate:

- a process-wide flag: ``cpu_threads.py``, with ``core/snapshot.py``;
- a class for one module: ``activation_checkpointing.py``, with ``core/instance_class.py``;
- a call that replaces a module's call or the loss: ``compile.py``, with ``calls.py``.

``docs/guides/adding_a_technique.md`` has the steps to add a technique.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flatout.core.errors import Unsuitable
from flatout.core.torch_state import recompilation_seconds
from flatout.guards import Guard
from flatout.report.model import Row, Status
from flatout.techniques.calls import has_compiled_code
from flatout.techniques.candidate import Candidate, LoaderCandidate

if TYPE_CHECKING:
    from flatout.data.stages import Stage
    from flatout.report.model import Pace
    from flatout.training.job import Job

Effect = Literal["exact", "rounding", "reseeded"]
"""Change of numerics.

"exact" is bit-identical, and "rounding" rounds differently. "reseeded" also draws other random numbers of the same
distribution.
"""

Goal = Literal["speed", "memory"]
"""Reason to keep a technique.

A technique for memory is kept on request, or if batches do not fit otherwise. It is also kept if it makes room for
larger parts of batches that are faster (``Tuner._decide_memory``).
"""


class NotApplicable(Exception):
    """Rejection of a technique, or of one candidate, that does not apply to this job.

    The message is one sentence for the report.
    """


class NothingBetter(Unsuitable):
    """Rejection of all candidates by measurements, before any trial. The message is one sentence for the report."""


class Technique(ABC):
    """Row of the checklist.

    Attributes:
        name: key of ``optimize(techniques={name: ...})``.
        number: number in the checklist; None for an additional technique.
        title: name in the report.
        rationale: reason in the row when the technique is kept.
        effect: change of numerics.
        reseeds: text for the row on the random numbers that differ if the effect is "reseeded".
        goal: resource that the technique saves.
        expected: expected gain in speed from the literature, for the report. The source of numbered rows is the
            checklist "Maximizing GPU Utilization in PyTorch" (github.com/behnamasadi/PyTorchTutorial). The docstring
            names any other source.
        assumes: guards of the assumptions under which the technique does no harm.
    """

    name: str
    number: int | None = None
    title: str
    rationale: str = ""
    effect: Effect = "exact"
    reseeds: str = ""
    goal: Goal = "speed"
    expected: str = ""
    assumes: ClassVar[tuple[Guard, ...]] = ()

    @property
    def documentation(self) -> str:
        """Text on the technique: effect, benefits and drawbacks. Empty if Python runs without docstrings."""
        return self.__doc__ or ""

    @property
    def purpose(self) -> str:
        """First sentence of the documentation, with a lowercase first letter."""
        text = " ".join(self.documentation.split()).replace("``", "`")
        sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
        return sentence[:1].lower() + sentence[1:]

    def check(self, job: Job) -> None:
        """Raise ``NotApplicable`` if this job cannot use the technique."""

    def effect_on(self, job: Job) -> Effect:
        """Return the change of numerics for a job to which the technique applies."""
        return self.effect

    def rationale_on(self, job: Job) -> str:
        """Return the reason in the row when the technique is kept for this job."""
        is_reseeded = self.reseeds and self.effect_on(job) == "reseeded"
        return f"{self.rationale}; {self.reseeds}" if is_reseeded else self.rationale

    def row(self, status: Status, why: str, chosen: str = "") -> Row:
        """Return the technique's line in the report."""
        return Row(
            self.name, self.number, self.title, status, why, chosen, expected=self.expected, purpose=self.purpose
        )


class Rule(Technique):
    """Technique that is applied without a trial. ``techniques={name: False}`` forbids a rule that has a candidate.

    Attributes:
        argument: the argument of ``optimize`` that turns the rule on; empty for a rule that is always applied.
        depends_on_loop: True if the rule depends on ``Job.why_no_step``, so that it is applied after the first step.
        is_priced: True if a trial shows the rule's cost in speed. The rule stays on in any case.
    """

    argument: ClassVar[str] = ""
    depends_on_loop: bool = False
    is_priced: ClassVar[bool] = False

    @property
    def is_forbiddable(self) -> bool:
        """True if ``techniques={name: False}`` may leave the rule out."""
        return not self.argument and type(self).candidate is not Rule.candidate

    def candidate(self, job: Job) -> Candidate | None:
        """Return the candidate to turn on; None if the rule is built into ``Run``."""
        return None


class Measured(Technique):
    """Technique that is kept only if a trial shows a gain.

    Attributes:
        values: values of ``techniques={name: value}``, for error messages.
        on_request: reason for the row why the technique is used only if it is forced; empty for other techniques.
    """

    values: ClassVar[str] = "True"
    on_request: ClassVar[str] = ""

    @abstractmethod
    def most_saved(self, job: Job, pace: Pace) -> float:
        """Return the largest possible saving per step, in milliseconds."""

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds until a candidate's first timed step, for example for a cold compilation."""
        return 0.0

    def assumed(self, job: Job, value: Any = None) -> Sequence[Guard]:
        """Return the guards of ``assumes`` that count for ``techniques={name: value}``; None stands for no choice."""
        return self.assumes

    def found(self, candidate: Any) -> str:
        """Return the findings of the search for a candidate, for the row; empty without a search."""
        return ""

    def accepts(self, value: Any) -> bool:
        """Return True if ``value`` is valid for some job and machine, in ``techniques={name: value}`` or in a plan."""
        return value is True

    def check_value(self, job: Job, value: Any) -> None:
        """Reject a value of ``techniques={name: value}`` before the first step of this job.

        Raises:
            ValueError: no candidate of this job has that value.
            NotApplicable: the candidate with that value does not apply.
        """
        if not self.accepts(value):
            raise ValueError(f"techniques[{self.name!r}] must be {self.values} or False, got {value!r}")

    def forced(self, job: Job, value: Any) -> Any:
        """Return the candidate for ``techniques={name: value}``.

        Raises:
            ValueError: see ``check_value``.
            NotApplicable: no candidate applies to this job.
        """
        self.check_value(job, value)
        return self.candidate_of(job, value)

    @abstractmethod
    def candidate_of(self, job: Job, value: Any) -> Any:
        """Return the candidate for a value that the technique accepts."""

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the job already has the effect of ``techniques={name: value}``."""
        return False


class StepTechnique(Measured):
    """Technique that changes how a step runs. Trials of its ``Candidate`` objects time the step alone.

    Attributes:
        checks_evaluation: True if a trial also compares the outputs in eval mode, because the technique can break a
            branch that training does not take.
        keeps_cpu_time: True if candidates change neither the number of threads nor waits. Then CPU times of steps with
            and without a candidate are comparable.
        is_combinable: True if candidates need no setup and switch in less than a step. Trials try them in combinations.
        requires: name of an earlier technique that candidates need; empty if there is none. If the earlier technique is
            off, trials turn on both.
        alternative_to: name of an earlier combinable technique that leaves this one without effect; empty if there is
            none.
        companions: names of later combinable techniques that may help only together with this one. Trials also try
            pairs with candidates of these techniques.
        saves_communication: True if candidates change how gradients are averaged over the ranks during the backward.
            They can save at most the exposed communication.
        changes_activations: True if candidates change the memory format or the dtype of activations. The random numbers
            that torch draws depend on both. Trials make them independent of both (``tuning/numerics.py``).
        optimistic_gain: the largest gain to expect. A setup that would not pay even with this gain is not started.
        recompiles: True if candidates change a state that compiled code checks, such as the number of threads. Compiled
            code is then compiled again, which is part of the setup.
    """

    effect: Effect = "rounding"
    checks_evaluation: ClassVar[bool] = False
    keeps_cpu_time: ClassVar[bool] = True
    is_combinable: ClassVar[bool] = False
    requires: ClassVar[str] = ""
    alternative_to: ClassVar[str] = ""
    companions: ClassVar[tuple[str, ...]] = ()
    saves_communication: ClassVar[bool] = False
    changes_activations: ClassVar[bool] = False
    optimistic_gain: ClassVar[float] = 2.0
    recompiles: ClassVar[bool] = False

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds of a recompilation, if candidates cause one."""
        return recompilation_seconds() if self.recompiles and has_compiled_code(job) else 0.0

    def may_combine(self, job: Job) -> bool:
        """Return True if trials may combine the technique with others. Such trials switch the technique often."""
        return self.is_combinable and not (self.recompiles and has_compiled_code(job))

    @property
    def is_verified(self) -> bool:
        """True if a trial compares outputs, gradients and losses with the baseline's (``tuning/numerics.py``)."""
        return self.effect != "exact"

    def most_saved(self, job: Job, pace: Pace) -> float:
        """Return the saving per step for ``optimistic_gain``. On the CPU no technique saves sleep and other waits."""
        if self.saves_communication:
            return pace.step_ms if pace.exposed_ms is None else pace.exposed_ms
        computing_ms = pace.step_ms
        if job.spec.device.type == "cpu" and pace.cpu_ms is not None:
            computing_ms = min(computing_ms, pace.cpu_ms)
        return computing_ms * (1 - 1 / self.optimistic_gain)

    @abstractmethod
    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the candidates to try, the most promising first."""

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the first candidate."""
        return self.candidates(job)[0]


class LoaderTechnique(Measured):
    """Technique that changes how batches are made. Trials of its ``LoaderCandidate`` objects time loading, too."""

    def most_saved(self, job: Job, pace: Pace) -> float:
        """Return the time that a step waits for its batch."""
        return pace.load_ms

    @abstractmethod
    def candidates(self, job: Job, pace: Pace) -> Sequence[LoaderCandidate]:
        """Return the loaders to try beside a step of this pace, the most promising first.

        Raises:
            NotApplicable: no loader suits this job.
            NothingBetter: measuring showed that no loader is faster than the present one.
        """

    def spares(self, job: Job) -> bool:
        """Return True if candidates use fewer resources, so that a candidate is kept if it is no slower."""
        return False


class Advice(Technique):
    """Technique that names changes that only the user can make. Nothing is turned on and nothing is timed."""

    @abstractmethod
    def findings(self, job: Job, pace: Pace, seconds: float) -> Sequence[str | Stage]:
        """Return sentences with file and line, or the stages of loading.

        Args:
            job: the tuned job. Its steps may run, because the caller restores their changes.
            pace: pace of the tuned loop.
            seconds: time limit.

        Raises:
            NotApplicable: no findings. The message is the reason.
        """
