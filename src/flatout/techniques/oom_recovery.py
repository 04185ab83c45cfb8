"""Neighbour: steps that run out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.techniques.base import NotApplicable, Rule

if TYPE_CHECKING:
    from flatout.training.job import Job


class OomRecovery(Rule):
    """Repeats a step that ran out of memory, on the same samples in smaller parts, and goes on with parts of that size.

    A rule, and not a trial: until memory ends it reads a few numbers in each step, and changes no result.

    When it helps: batches of other lengths or shapes than those before, a GPU that others use too, memory that is
    fragmented: a training that would have ended goes on, with the gradients of the whole batch, and no sample is lost
    or seen twice. When it hurts: parts are slower than the whole, and they go on to be computed where one batch alone
    was too large. Limits: BatchNorm normalises each part by itself, Dropout draws masks for each part, and a loss that
    is no mean over samples needs ``optimize(loss_weight=...)``; a warning names what of that there is. A batch that
    cannot be taken apart, or whose single samples do not fit, ends with the error, and with what would help.

    Source: that the sum of the parts' gradients, weighed by their samples, is the gradient of the whole is how gradient
    accumulation works; what goes wrong in it with token means is told in
    https://huggingface.co/blog/gradient_accumulation. That nothing may be retried before the error and its frames are
    gone: https://docs.pytorch.org/docs/stable/notes/faq.html#my-out-of-memory-exception-handler-cant-allocate-memory.
    """

    name = "oom_recovery"
    title = "out-of-memory recovery"
    rationale = (
        "a step of run.step that runs out of memory is computed again in smaller parts, with the same samples, and so "
        "are those that follow"
    )
    exact = True

    def check(self, job: Job) -> None:
        """Steps that ``run.step`` takes."""
        if job.spec.optimizer is None:
            raise NotApplicable(
                "no optimizer was given to optimize(): in a loop of one's own a step cannot be repeated"
            )
