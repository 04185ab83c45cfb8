"""Training job, with its specification, objective, stepper and data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flatout.core.batches import sizes_of, tensors_within
from flatout.core.breaks import Breaks
from flatout.core.effects import Unrepeatable
from flatout.data.loader_class import base_of
from flatout.data.loaders import Randomness, changed_by_reading, randomness_of, why_not_read
from flatout.data.seeding import is_seeded
from flatout.mfu.flop_count import CountedWork
from flatout.training.objective import Objective
from flatout.training.parallel_stepper import ParallelStepper
from flatout.training.spec import Spec
from flatout.training.step_flops import counted_work
from flatout.training.stepper import Stepper


@dataclass(eq=False)
class JobData:
    """Data of a training, and the batches of its trials.

    Attributes:
        loader: the user's loader, or a copy with another batch size.
        source: the iterable of the training, which is ``loader``, or a faster loader of the same batches.
        expected_steps: expected number of batches of ``loader`` in the whole training.
        batches: batches for trials, on the device. Empty after the trials.
        why_not_read: why samples must not be read out of turn; empty if they may be.
    """

    loader: Iterable[Any]
    source: Iterable[Any]
    expected_steps: int = 0
    batches: Sequence[Any] = ()
    why_not_read: str = ""

    def __post_init__(self) -> None:
        self.why_not_read = self.why_not_read or why_not_read(self.loader)

    @property
    def varies(self) -> bool:
        """True if ``batches`` have several shapes."""
        return len({tuple(map(sizes_of, tensors_within(batch))) for batch in self.batches}) > 1

    @cached_property
    def randomness(self) -> Randomness | None:
        """Evidence that samples depend on the process that makes them, or None without such evidence.

        The value is None, too, if each sample has its own seed.

        Raises:
            Unrepeatable: samples must not be read out of turn.
            Exception: an error of the dataset, which may be able to load samples in worker processes only.
        """
        if self.why_not_read:
            raise Unrepeatable(self.why_not_read)
        base = base_of(self.loader)
        return None if base is None or is_seeded(base) else randomness_of(base)

    @cached_property
    def changed_by_reading(self) -> str:
        """What making a sample again changes, as a clause. Empty without a change, and if the loader is unknown."""
        base = base_of(self.loader)
        return "" if base is None else changed_by_reading(base)


@dataclass(frozen=True, eq=False)
class Job:
    """Training job. Techniques change its parts. Trials and ``Run`` take its steps.

    Attributes:
        spec: the user's arguments, which never change.
        data: loader and batches.
        objective: forward and loss.
        stepper: gradients and updates.
        work: function of a batch that returns its samples, tokens and FLOPs.
        breaks: assumptions of kept techniques that training has contradicted.
    """

    spec: Spec
    data: JobData
    objective: Objective = field(init=False)
    stepper: Stepper = field(init=False)
    work: CountedWork = field(init=False)
    breaks: Breaks = field(default_factory=Breaks, init=False)

    @property
    def why_no_step(self) -> str:
        """Reason why no technique can change a whole training step. Empty if ``run.step`` runs the steps.

        A missing loss is only known after the first step.
        """
        if self.spec.is_recorded:
            return "the script makes its own steps"
        if self.spec.optimizer is None:
            return "no optimizer was given to optimize()"
        return "" if self.objective.has_loss else "no loss was given to optimize()"

    def __post_init__(self) -> None:
        objective = Objective(self.spec)
        object.__setattr__(self, "objective", objective)
        stepper = Stepper if self.spec.ranks.size == 1 else ParallelStepper
        object.__setattr__(self, "stepper", stepper(self.spec, objective))
        object.__setattr__(self, "work", counted_work(objective))
