"""Neighbour: memory that a step frees stays with the process, for the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.core import mallopt
from flatout.techniques.base import Candidate, NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.training.job import Job


class MallocCandidate(Candidate):
    """Has the process keep the memory that it frees, and give it back again."""

    label = "kept"
    value = True

    def _turn_on(self) -> None:
        mallopt.keep(True)

    def _turn_off(self) -> None:
        mallopt.keep(False)


class Malloc(Rule):
    """Keeps the memory that a step on the CPU frees, for the tensors of the next one.

    glibc's malloc gives blocks of megabytes and the end of its heap back to the kernel when they are freed; the kernel
    hands them out again page by page, each cleared and mapped when it is first touched. 4,000 page faults in a step of
    40 ms of a perceptron cost an eighth of it, 1,300 in one of 26 ms of a small GPT as much, on two cores of an EPYC.

    A rule, and not a trial: how much a step faults depends on what the heap has been through, so that the steps of a
    trial after one with memory kept would not be as they were before. Blocks below 32 MiB come from the heap, as they
    do by themselves in a process that has once freed one of that size; and the heap does not shrink any more.

    When it helps: tensors of up to 32 MiB. When it hurts: the process keeps the most memory that it has ever used, for
    other processes to miss. A process whose environment tunes malloc already (MALLOC_TRIM_THRESHOLD_, say) is left
    alone. Source: PyTorch's performance tuning guide, "Switch memory allocator" (jemalloc and TCMalloc keep memory as
    well, but have to be there when Python starts); the glibc manual, "Malloc Tunable Parameters".
    """

    name = "malloc"
    title = "memory kept by malloc"
    rationale = "a step takes the memory that the last one freed: the kernel need not clear and map new pages for it"

    def check(self, job: Job) -> None:
        """A step on the CPU, and glibc's malloc as it came."""
        if job.spec.device.type != "cpu":
            raise NotApplicable("training runs on the GPU, whose memory torch keeps anyway")
        reason = mallopt.why_not()
        if reason:
            raise NotApplicable(reason)

    def candidate(self, job: Job) -> Candidate:
        """Return the setting of the process."""
        return MallocCandidate()
