"""Rules that are built into ``Run``. They cannot be turned on or forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.techniques.base import NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.training.job import Job


def _applies(job: Job) -> str:
    return ""


def _needs_run_step(job: Job) -> str:
    return f"{job.why_no_step}: flatout cannot repeat one" if job.why_no_step else ""


def _needs_gpu(why: str) -> Callable[[Job], str]:
    return lambda job: "" if job.spec.device.type == "cuda" else f"training runs on the CPU: {why}"


class BuiltIn(Rule):
    """Rule that is built into ``Run``. Arguments that are not listed are attributes of ``Technique``.

    Args:
        documentation: docstring of the rule.
        why_not: returns why the rule does not apply to a job; empty if it applies.
    """

    def __init__(
        self,
        name: str,
        title: str,
        rationale: str,
        documentation: str,
        why_not: Callable[[Job], str] = _applies,
        **row: Any,
    ) -> None:
        vars(self).update(row, name=name, title=title, rationale=rationale, __doc__=documentation)
        self.depends_on_loop = why_not is _needs_run_step
        self._why_not = why_not

    def check(self, job: Job) -> None:
        """Raise ``NotApplicable`` with the reason of ``why_not``. A script has no ``Run``."""
        reason = "the script iterates its own loaders" if job.spec.is_recorded else self._why_not(job)
        if reason:
            raise NotApplicable(reason)


BUILT_IN = (
    BuiltIn(
        "profiler",
        "profiler",
        "the parts of a step are named for torch.profiler and Nsight; run.profile() shows on request where its time "
        "goes",
        """Marks the parts of each step (loader, copy, forward, backward, update) for profilers.

        When it helps: a profile without names shows thousands of operators, and not their part of the step. When it
        hurts: never while no profiler listens. A profile slows the steps that it covers, so it is made on request.
        """,
        number=7,
        expected="no gain: names for profiles",
    ),
    BuiltIn(
        "monitoring",
        "live monitoring",
        "run.stats counts steps, phases and MFU without waiting for the device; run.verdict sets MFU beside NVML's "
        "utilization; `flatout monitor` shows the GPUs live",
        """Counts steps, samples, waits and the share of the peak that the model makes use of (MFU) as training runs.

        When it helps: utilization says that some kernel ran, not that the GPU did much. A loop that waits for its
        loader or for Python shows at once. When it hurts: a step costs a few microseconds of the host.

        Source: `pytest benchmarks/counting_overhead.py --full`, on 2 cores of an AMD EPYC.
        """,
        number=12,
        expected="no gain: 5 µs a step",
    ),
    BuiltIn(
        "gc_pauses",
        "garbage-collector pauses",
        "when Python's garbage collector stops the training to look at every object, what is still in use is set aside "
        "until the epoch ends: the next time is short",
        """Lets a full garbage collection pause training once in an epoch, not again and again.

        Objects that outlive a full collection of 10 ms or more are set aside (``gc.freeze``) until the epoch ends.
        Later collections look only at newer objects. A trial of seconds rarely sees such a collection.

        When it helps: large heaps (tokenizers, datasets of Python objects, transformers) in a loop that makes many
        objects or calls ``gc.collect()``. Full collections of 600 to 700 ms between steps of 680 ms were seen
        (karpathy/nanochat, pull request 477). Freezing took a collection from 1.5 s to 5 ms (VectorInstitute/FL4Health,
        pull request 222). When it hurts: a frozen object that becomes garbage in a reference cycle stays until the
        epoch ends. So automatic collection stays on. torchtitan turns it off and collects every so many steps, for
        1.5 % on 512 GPUs (pytorch/torchtitan, pull request 148), because ranks that pause at different times wait for
        each other.
        """,
        expected="1.5 % on 512 GPUs",
    ),
    BuiltIn(
        "oom_recovery",
        "out-of-memory recovery",
        "a step of run.step that runs out of memory is computed again in smaller parts, with the same samples, and so "
        "are those that follow",
        """Repeats a step that ran out of memory, with the same samples in smaller parts. Later steps keep these parts.

        When it helps: batches of varying length, a shared GPU, fragmented memory. The update gets the gradients of the
        whole batch, and no sample is lost or seen twice. When it hurts: parts are slower than the whole, also
        for later batches. Limits: BatchNorm normalizes each part by itself, Dropout draws masks for each part, and a
        loss that is no mean over samples needs ``optimize(loss_weight=...)``. A warning names what applies. A batch
        that cannot be split, or a single sample that does not fit, ends with an error that names remedies.

        Sources: gradient accumulation of token means, https://huggingface.co/blog/gradient_accumulation; a retry must
        come after the error and its frames are gone,
        https://docs.pytorch.org/docs/stable/notes/faq.html#my-out-of-memory-exception-handler-cant-allocate-memory.
        """,
        expected="no gain: training goes on",
        why_not=_needs_run_step,
    ),
    BuiltIn(
        "pinned_memory",
        "pinned memory",
        "batches are copied to the GPU beside the running step, from a few pinned buffers in turn",
        """Copies batches from pinned host memory, so that transfers overlap compute.

        When it helps: only a copy from pinned memory overlaps with compute. When it hurts: pinning memory for every
        batch (``pin_memory()`` per tensor) can cost more than it saves. So the buffers are reused.
        """,
        number=1,
        expected="10–20 %",
        why_not=_needs_gpu("batches are where they are needed already"),
    ),
    BuiltIn(
        "prefetch",
        "prefetch to the device",
        "the next two batches are copied to the device while the step works on this one",
        """Copies the next two batches to the device while the step works on this one.

        When it helps: the copy overlaps the step. When it hurts: every batch ahead takes device memory.
        """,
        number=8,
        expected="10–20 %",
        why_not=_needs_gpu("no copy to hide; how far workers load ahead is for row 2"),
    ),
)
"""Table of built-in rules. The report keeps this order for rules without a number."""
