"""What a step begins with, as far as it is cheap to keep, and how it is brought back when the step fails."""

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
    """Where the generators are that torch's operations on a device draw from.

    A CUDA generator is told by two numbers; the CPU's has no position that could be told, and is copied (5 KB).
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
        """Whether anybody has drawn since."""
        if not torch.equal(torch.default_generator.get_state(), self._state):
            return True
        return self._generator is not None and self._generator.get_offset() != self._place[1]


class StepCheckpoint:
    """What a step, or a part of one, begins with: as much of it as is cheap to keep.

    Args:
        stepper: runs the step.
        slots: the buffers of each module, by name.
        parameters: whose gradients may be there already.
        adds: whether gradients of the update under way are.
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
        """Drop the gradients that were begun since.

        Returns:
            Parameters whose gradients were there before, and have had the whole batch added: a backward adds to the
            gradient of a parameter once, when all of it is known.
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
        """For each module with buffers, whether they have been updated since.

        Some kernels write running statistics without a trace, so any buffer of a module tells for all of them.
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
        """What an error ends has not been begun."""
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
    """Inside, these parameters get no gradients; those that they have come back."""

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
