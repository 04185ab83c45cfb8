"""Additional technique: the number of threads of CPU operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flatout.core.machine import own_cores
from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

_GRAIN = 32768
"""Elements per thread of an elementwise operator, from torch (``at::internal::GRAIN_SIZE``)."""


@process_flag
def threads() -> Saved:
    """Return the part for the number of threads."""
    return Saved(torch.get_num_threads, torch.set_num_threads, int.__eq__)


def threads_candidate(number: int) -> Candidate:
    """Return the candidate that sets torch's process-wide number of intra-op threads."""

    def change() -> Callable[[], None]:
        before = torch.get_num_threads()
        _set_threads(number)
        return partial(_set_threads, before)

    return ChangeCandidate(f"{number} thread{'' if number == 1 else 's'}", number, change)


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    # OpenMP starts and ends threads in the next operator, so that operator must not be timed
    torch.empty(_GRAIN * threads).fill_(0)


class CpuThreads(StepTechnique):
    """Tries fewer threads, and as many as there are cores to use, where the step runs on the CPU.

    When it helps: small operators, which take longer to distribute than to compute. Containers with fewer cores than
    the machine also profit: torch starts a thread for each core that it sees, and the quota then stops all threads for
    most of each period (kserve/kserve, issue 1031). Hardware threads of one core share its arithmetic units, so torch
    and flatout count physical cores. When it hurts: other code in the process gets the same number. Sums have another
    order, so the last bits of a result may differ.

    Source: torch's documentation, "CPU threading and TorchScript inference", tuning the number of threads.
    """

    name = "cpu_threads"
    title = "CPU threads"
    values = "a number of threads >= 1"
    keeps_cpu_time = False
    rationale = "operators are shared by this many threads: with more or fewer, they take longer"
    is_combinable = True
    recompiles = True

    def check(self, job: Job) -> None:
        """Require a step on the CPU."""
        if job.spec.device.type != "cpu":
            raise NotApplicable("training runs on the GPU: the CPU's threads do not compute the step")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return candidates for all usable cores, for half of them and for one, except for torch's present number."""
        numbers = self._numbers(job)
        if not numbers:
            raise NotApplicable("there is only one core, and torch already uses one thread")
        return [threads_candidate(number) for number in numbers]

    def accepts(self, value: Any) -> bool:
        """Accept a number of threads >= 1."""
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    def check_value(self, job: Job, value: Any) -> None:
        """Reject more threads than the machine has cores."""
        super().check_value(job, value)
        most = os.cpu_count() or 1
        if value > most:
            raise ValueError(f"techniques['{self.name}'] must be a number from 1 to {most} or False, got {value!r}")

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a number of threads."""
        return threads_candidate(value)

    @staticmethod
    def _numbers(job: Job) -> list[int]:
        cores, threads = job.spec.ranks.first((own_cores(), torch.get_num_threads()))
        numbers = dict.fromkeys((cores, max(1, cores // 2), 1))
        numbers.pop(threads, None)
        return list(numbers)
