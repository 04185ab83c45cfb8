"""Sees to it that training stays finite: what ``Run.step`` says, and when it stops, after infinities and NaNs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.job import Job
from flatout.logs import Logs
from flatout.mfu.flops import eager

LOOK_EVERY = 50
"""Steps between two looks at the loss, while it is finite: a look takes the host 40 us."""

STOP_AFTER = 50
"""Bad looks in a row after which training stops. A loss scaler that finds its scale skips half as many at most."""


class FiniteWatch:
    """Looks at every fiftieth loss, and at every one after a bad one, without waiting for the device.

    A step is bad when its loss is infinite or NaN or, with a loss scaler, when the scaler skipped its update. A bad
    loss is told once, by a warning. A scaler's skips are how it works: nothing is said of them, unless they do not end.

    Args:
        job: what is stepped.
        stop_after: bad steps in a row after which ``look`` raises.

    Attributes:
        next_look: the step to look at next.
    """

    def __init__(self, job: Job, stop_after: int = STOP_AFTER) -> None:
        self.stop_after = stop_after
        self._job = job
        self._values = Logs(keep=1)
        self._values.listen(self._heard)
        self._bad = 0
        self._told = False
        self.next_look = 0

    def look(self, step: int, loss: Tensor, batch: Any) -> None:
        """Look at a step that has been queued.

        Args:
            step: its number.
            loss: of that step, on the device.
            batch: of that step; looked at when training stops.

        Raises:
            FloatingPointError: ``stop_after`` steps in a row were bad. It names the first module whose output is.
        """
        self.next_look = step + (1 if self._bad else LOOK_EVERY)
        skipped = None if self._job.scaler is None else self._job.scaler.last_step_skipped
        if skipped is None:
            self._values.log("loss", loss, step)
        else:
            self._values.log("skipped", skipped, step)
        if self._bad >= self.stop_after:
            raise FloatingPointError(
                f"{self._bad} steps in a row, up to step {step}, were infinite or NaN: {first_bad(self._job, batch)}"
            )

    def _heard(self, step: int, name: str, value: Any) -> None:
        bad = value if name == "skipped" else value - value != 0  # only what is finite is 0 from itself
        self._bad = self._bad + 1 if bad else 0
        if bad and name == "loss" and not self._told:
            self._told = True
            warnings.warn(f"the loss of step {step} is {value}", RuntimeWarning, stacklevel=6)


def first_bad(job: Job, batch: Any) -> str:
    """Where infinities or NaNs come from, in words, as a forward (and, with a loss scaler, a backward) shows it."""
    for name, parameter in job.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the parameter {name} is not finite any more: lower the learning rate, or clip gradients"
    found: list[str] = []
    with eager(), _watched(job.model, found.append):
        loss = job.loss(batch)
    if found:
        return found[0]
    if not bool(loss.isfinite()):
        return "every module's output is finite, and the loss that is made of them is not"
    job.model.zero_grad(set_to_none=True)
    with eager():
        (loss if job.scaler is None else job.scaler.scale(loss)).backward()
    bad = [name for name, p in job.model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    job.model.zero_grad(set_to_none=True)
    if bad:  # the last in the forward is the first in the backward
        return f"the gradient of {bad[-1]} is the first that is not finite in the backward"
    return "this batch is finite now, in forward and backward"


@contextlib.contextmanager
def _watched(model: nn.Module, tell: Callable[[str], object]) -> Iterator[None]:
    """Tells of every module that makes something infinite of finite inputs, the innermost first."""

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _are_finite(args) and not _are_finite(output):
            tell(f"the output of {name or 'the model'} ({type(module).__name__}) is the first that is not finite")

    hooks = [
        module.register_forward_hook(lambda m, a, o, name=name: look(name, m, a, o))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _are_finite(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return all(bool(t.isfinite().all()) for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
