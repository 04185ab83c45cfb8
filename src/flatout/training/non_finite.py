"""Monitor that warns of the first infinite or NaN loss, and stops training after several in a row."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core import dtensor, gradients
from flatout.core.formatting import first_line
from flatout.mfu.flop_count import eager
from flatout.optim.native_step import NativeStep
from flatout.training.job import Job
from flatout.training.logged_metrics import Logs

LOOK_EVERY = 50
"""Steps from one read of a loss on a GPU to the next while losses are finite. A read takes host time."""

STOP_AFTER = 50
"""Bad steps in a row after which training stops. A loss scaler that searches its scale skips at most half as many."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class NonFiniteMonitor:
    """Monitor that reads losses without waiting for the device and raises after too many bad steps in a row.

    Without a loss scaler, a step is one batch, and a bad step has an infinite or NaN loss. With a loss scaler, a step
    is one update, and a bad step is an update that the scaler skipped. The first bad loss gives a warning. Skipped
    updates are normal for a scaler and give no warning. Warning and error name the first gradient that is not finite,
    if the gradients still exist.

    On a CPU every step is read. On a GPU every fiftieth step is read until a bad value arrives,
    and then every step until a finite value arrives. The count begins with the first bad step that is read. A gap
    between two bad steps restarts the count. Values arrive after the GPU has computed them, so later than the host
    queues the step.

    Args:
        job: the job whose steps are monitored.
        stop_after: bad steps in a row after which ``look`` raises.

    Attributes:
        next_look: number of the next step for which ``look`` must be called.
    """

    def __init__(self, job: Job, stop_after: int = STOP_AFTER) -> None:
        self.stop_after = stop_after
        self._job = job
        self._values = Logs(keep=1)
        self._values.listen(self._heard)
        self._bad = 0
        self._last_bad = -1
        self._first_bad_loss: tuple[int, Any] | None = None
        self._has_warned = False
        self._sent = 0
        self._is_waiting = False
        self.next_look = 0

    def look(self, step: int, loss: Tensor, batch: Any) -> None:
        """Check a batch whose step is queued on the device.

        Args:
            step: the number of the batch.
            loss: the loss of the batch, on the device.
            batch: the batch. When training stops, the forward is repeated on this batch.

        Raises:
            FloatingPointError: ``stop_after`` steps in a row were bad. The message names the first gradient with
                infinities or NaNs, and the place where a repeated forward and backward first produces them.
        """
        scaler = self._job.stepper.scaler
        if scaler is None and self._bad == 0 and loss.is_cpu and (read := loss.item()) - read == 0:  # finite
            self.next_look = step + 1
            return
        if scaler is not None and self._job.stepper.pending:  # ``last_step_skipped`` refers to an earlier update
            return
        skipped = None if scaler is None else scaler.last_step_skipped
        name, value = ("loss", loss) if skipped is None else ("skipped", skipped)
        if value.is_cpu:
            self._heard(step, name, value.item())
            self.next_look = step + 1
        else:
            self._queue(step, name, value)
        if self._first_bad_loss is not None and not self._has_warned:
            self._has_warned = True
            at, bad = self._first_bad_loss
            found = _finding(lambda: first_bad_gradient(self._job, at, now=step))
            warnings.warn(f"the loss of step {at} is {bad}; {found}", RuntimeWarning, stacklevel=3)
        if self._bad >= self.stop_after:
            # This search comes first, because the repeated backward below overwrites gradients.
            found = _finding(lambda: first_bad_gradient(self._job, step, now=step))
            raise FloatingPointError(
                f"{self._bad} steps in a row, up to step {self._last_bad}, were infinite or NaN: "
                f"{_finding(lambda: first_bad(self._job, batch))}; {found}"
            )

    def _queue(self, step: int, name: str, value: Tensor) -> None:
        """Queue a copy of the value to the host. While values are finite, at most one copy is on its way."""
        was_waiting, self._is_waiting = self._is_waiting, self._values.poll()
        if self._bad or not was_waiting:
            self._values.log(name, value, step)
            self._sent, self._is_waiting = step, self._values.poll()
        self.next_look = step + 1 if self._bad or self._is_waiting else self._sent + LOOK_EVERY

    def _heard(self, step: int, name: str, value: Any) -> None:
        bad = value if name == "skipped" else value - value != 0  # a finite number minus itself is 0
        if not bad:
            self._bad = 0
            return
        # At the end of an epoch, the update with the remaining batches is not a step. So the interval between two
        # updates that are read may be almost twice as long.
        gap = 1 if name == "loss" else 2 * self._job.spec.accumulate - 1
        self._bad = self._bad + 1 if step <= self._last_bad + gap else 1
        self._last_bad = step
        if name == "loss" and self._first_bad_loss is None:
            self._first_bad_loss = step, value


def _finding(search: Callable[[], str]) -> str:
    """Return the result of a search. A failed search must not replace the error about bad steps."""
    try:
        return search()
    except Exception as error:
        return f"the search for the first bad value failed with {first_line(error)}"


def first_bad_gradient(job: Job, step: int, now: int) -> str:
    """Return a sentence that names the first parameter whose gradient is not finite, in the order of the model.

    The function waits for the device. The gradients may be scaled by a loss scaler, or accumulated since the last
    update.

    Args:
        job: the job with the gradients.
        step: number of the step with the bad loss or update.
        now: number of the latest step, which has written the gradients.
    """
    if step != now:
        return f"its gradients are no longer known, because step {now} has overwritten them"
    grads = {name: p.grad for name, p in job.spec.model.named_parameters() if p.grad is not None}
    if not grads:
        return f"the gradients of step {step} are no longer known, because they are None"
    if _are_clipped(job, grads.values()):
        return f"the gradients of step {step} are no longer known, because clipping multiplied all of them by NaN"
    for name, grad in grads.items():
        part = dtensor.local(grad)  # a collective would hang, because other ranks may have finite losses
        bad = _count_bad(part)
        if bad:
            shape = tuple(grad.shape)
            return (
                f"in step {step}, the gradient of {name} is the first that is not finite, in the order of parameters: "
                f"{bad} of {part.numel()} elements, shape {shape}"
            )
    return f"the gradients of step {step} are finite"


def _are_clipped(job: Job, grads: Iterable[Tensor]) -> bool:
    """Return True if clipping with a norm of NaN may have rewritten the gradients. A lazy update never does so."""
    if job.spec.max_grad_norm is None:
        return False
    return not (isinstance(job.spec.optimizer, NativeStep) and all(map(gradients.is_native, grads)))


def first_bad(job: Job, batch: Any) -> str:
    """Repeat a forward and backward, and return a sentence about the place where infinities or NaNs begin.

    The gradients of the model are then None.
    """
    for name, parameter in job.spec.model.named_parameters():
        if not _is_finite(parameter):
            return f"the parameter {name} is no longer finite; lower the learning rate or clip gradients"
    found: list[str] = []
    with eager(), _watched(job.spec.model, found.append):
        loss = job.objective.loss(batch)
    if found:
        return found[0]
    if not _is_finite(loss):
        return "every module's output is finite, but the loss is not"
    job.spec.model.zero_grad(set_to_none=True)
    with eager():
        (loss if job.stepper.scaler is None else job.stepper.scaler.scale(loss)).backward()
    bad = [name for name, p in job.spec.model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    job.spec.model.zero_grad(set_to_none=True)
    if bad:  # the backward reaches the last parameter first
        return f"the gradient of {bad[-1]} is the first in the backward that is not finite"
    return "the repeated forward and backward of this batch are finite"


@contextlib.contextmanager
def _watched(model: nn.Module, tell: Callable[[str], object]) -> Iterator[None]:
    """Call ``tell`` for every module with finite inputs and an output that is not finite, the innermost first."""

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
    return all(_is_finite(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _is_finite(tensor: Tensor) -> bool:
    return _count_bad(tensor) == 0


def _count_bad(tensor: Tensor) -> int:
    """Return the number of elements that are infinite or NaN, in a tensor of any layout and dtype."""
    if not (tensor.is_floating_point() or tensor.is_complex()):  # integers, also the scaled integers of quantization
        return 0
    tensor = tensor.detach()
    if tensor.is_nested:
        return sum(map(_count_bad, tensor.unbind()))
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype.itemsize == 1:  # torch has no isfinite for float8
        tensor = tensor.float()
    return tensor.numel() - int(tensor.isfinite().sum())
