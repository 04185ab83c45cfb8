"""Cheap record of the state before a step, and the rollback after a failed step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, methodcaller

import torch
from torch import Tensor

from flatout.core.out_of_memory import ran_out_of_memory, versions
from flatout.training.stepper import Stepper

_grad = attrgetter("grad")
_values = methodcaller("values")


class Random:
    """Positions of the generators of torch's operations on a device.

    The position of a CUDA generator is two numbers. The CPU generator has no such position, so its state of 5 KB is
    copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._state = torch.default_generator.get_state()
        self._generator: torch.Generator | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
            self._place = self._generator.initial_seed(), self._generator.get_offset()

    def restore(self) -> None:
        torch.default_generator.set_state(self._state)
        if self._generator is not None:
            seed, offset = self._place
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)

    def moved(self) -> bool:
        """Return True if a generator has drawn numbers since this object was made."""
        if not torch.equal(torch.default_generator.get_state(), self._state):
            return True
        return self._generator is not None and self._generator.get_offset() != self._place[1]


class StepCheckpoint:
    """Cheap record of the state before a step, or before a part of a step.

    The record has positions of generators and versions of tensors, but no copies of buffers.

    Args:
        stepper: runs the step.
        slots: the buffers of each module, by name.
        parameters: parameters that may have gradients already.
        adds: True if these parameters may have gradients of the current update.
    """

    def __init__(
        self, stepper: Stepper, slots: Sequence[dict[str, Tensor | None]], parameters: Sequence[Tensor], *, adds: bool
    ) -> None:
        self.pending = stepper.pending
        self.random = Random(stepper.spec.device)
        self._stepper = stepper
        self._slots = slots
        self._buffers = list(chain.from_iterable(map(_values, slots)))
        self._buffer_versions = versions(self._buffers)
        self._adds = adds
        self._params = parameters
        self._grads = list(map(_grad, parameters))
        self._versions = versions(self._grads)

    def undo(self) -> list[Tensor]:
        """Drop the gradients since the checkpoint.

        Returns:
            Parameters that had gradients before, and whose gradients now include the whole batch. A backward adds to a
                parameter's gradient once, after it has computed the sum of all uses.
        """
        if not self._adds:
            self._stepper.zero_grad()
        whole = []
        for p, grad, version in zip(self._params, self._grads, self._versions, strict=True):
            if grad is None:
                p.grad = None
            elif p.grad is not grad or versions([grad]) != [version]:
                whole.append(p)
        return whole

    def buffers_that_moved(self) -> list[bool]:
        """Return for each module with buffers True if they have been updated since the checkpoint.

        Some kernels write running statistics without a version change. So one changed buffer marks all buffers of its
        module.
        """
        now = list(chain.from_iterable(map(_values, self._slots)))
        if len(now) != len(self._buffers):
            return [True] * len(self._slots)
        same = [
            new is old and version == then
            for new, old, version, then in zip(now, self._buffers, versions(now), self._buffer_versions, strict=True)
        ]
        which = iter(same)
        return [not all([next(which) for _ in range(len(slots))]) for slots in self._slots]

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Roll back to the checkpoint if an error leaves the block."""
        try:
            yield
        except BaseException as error:
            lost = self._stepper.pending if self.undo() else 0
            self.random.restore()
            if lost:
                self._stepper.abandon()
                if ran_out_of_memory(error):
                    raise torch.OutOfMemoryError(
                        f"{error}. Gradients accumulated before hold part of this batch: those of {lost} before it "
                        "are lost, too"
                    ) from None
            raise


@contextlib.contextmanager
def aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Discard new gradients of these parameters inside the block, and restore their gradients after the block."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    grads = list(map(_grad, parameters))
    for p in parameters:
        p.grad = None
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in parameters]
    try:
        yield
    finally:
        for hook, p, grad in zip(hooks, parameters, grads, strict=True):
            hook.remove()
            p.grad = grad
