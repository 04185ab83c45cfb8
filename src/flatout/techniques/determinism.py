"""Additional technique: determinism and seeding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils import deterministic

from flatout.core.reproducible import DeterministicAlgorithms
from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.techniques.base import NotApplicable, Rule
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job


@process_flag
def determinism_flags() -> Saved:
    """Return the part for the choice of deterministic algorithms."""

    def read() -> tuple[bool, bool, bool]:
        is_enabled = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        return is_enabled, warns_only, deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def write(flags: tuple[bool, bool, bool]) -> None:
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
        deterministic.fill_uninitialized_memory = flags[2]  # type: ignore[attr-defined]

    return Saved(read, write)


def _deterministic() -> Callable[[], None]:
    algorithms = DeterministicAlgorithms()
    algorithms.enable()
    return algorithms.disable


class Determinism(Rule):
    """Makes two runs equal bit for bit: algorithms that repeat their results, and a seed for every random number.

    With a ``seed``, random augmentation gets a seed for each sample, so it is the same for any number of workers.

    When it helps: debugging and bitwise comparison of runs. When it hurts: deterministic kernels can be slower, by the
    factor in the row. Operators without a deterministic kernel raise.

    Source: PyTorch's notes on reproducibility (docs.pytorch.org, "Reproducibility").
    """

    name = "determinism"
    title = "determinism and seeding"
    expected = "slower steps"
    rationale = "torch's algorithms repeat their results bit for bit, and no timing decides what changes numerics"
    argument = "deterministic"
    is_priced = True

    def check(self, job: Job) -> None:
        """Require ``deterministic=True``."""
        if not job.spec.deterministic:
            raise NotApplicable("not asked for: optimize(deterministic=True, seed=...) turns it on")

    def candidate(self, job: Job) -> Candidate | None:
        """Return the process-wide flags; None if ``flatout.reproducible`` sets and restores them."""
        return None if job.spec.reproducible else ChangeCandidate("deterministic", "deterministic", _deterministic)
