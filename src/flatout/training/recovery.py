"""Recovery of ``Run.step`` from out of memory, by a repetition of the same samples in smaller parts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor

from flatout.core import formatting
from flatout.core.batches import batch_size_of, split
from flatout.core.errors import free_memory, parameters_of, ran_out_of_memory, state_bytes, versions
from flatout.training.autocast import autocast_dtype
from flatout.training.equal_parts import STATEMENT, why_parts_differ
from flatout.training.micro_batches import Part, part_sizes
from flatout.training.stepper import PhaseOf, Stepper, as_range

_grad = attrgetter("grad")
_values = methodcaller("values")


class Recovery:
    """Runner of a job's steps that recovers from steps that run out of memory.

    *Forward and backward* are repeated on halves of the batch, which are halved again if needed. Gradients are added as
    in ``MicroBatches``. Gradients of complete parts and of earlier batches are kept. The first part draws the same
    random numbers as the start of the whole batch. A module that ran before memory ran out keeps its buffers as the
    whole batch updated them. Later batches are split from the start.

    *The update* is tried once more, as a whole, after cached memory is freed. flatout's optimizers allocate before they
    change a parameter. Another optimizer that fails in the middle of its step raises ``PartialUpdateError``.

    Before a step, only the positions of the generators, the versions of buffers, and the versions of accumulated
    gradients are recorded, because this is cheap. Buffers are copied only after a failed step.

    Before the first repetition, parts of a batch that fits are compared with this batch as a whole. An error gives the
    reason if they differ, if a batch cannot be split (see ``flatout.data.split``), or if hooks use gradients during the
    backward. One case is not detected. A weight in several ``torch.utils.checkpoint`` calls with ``use_reentrant=True``
    may have half of a batch's gradient, in addition to earlier accumulated gradients.

    Args:
        stepper: runs the steps, with an optimizer.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._micro = stepper.micro_batches
        self._told_of_update = False
        self._difference: str | None = None
        """Difference between a batch in parts and the whole batch; None before the first step in parts."""

    def step(self, batch: Any, phase: PhaseOf = as_range) -> Tensor:
        """Run ``Stepper.step`` with recovery.

        Args:
            batch: a batch on the device.
            phase: entered for the forward and the backward of each part, and for the update.

        Returns:
            The loss of the whole batch, 0-dim, detached, on the device, not synchronized.

        Raises:
            torch.OutOfMemoryError: recovery failed. Gradients, random generators and pending batches are as before the
                step. Gradients of earlier batches that already contain a part of this batch are dropped, and the error
                reports this.
            flatout.optim.PartialUpdateError: an optimizer that is not flatout's failed in the middle of its step.
            RankFailure: the step failed on some of the ranks.
        """
        stepper, failure = self._stepper, ""
        begun = self._begin(adds=stepper.pending > 0)
        try:
            parts = stepper.parts(batch)
        except BaseException:
            begun.restore_draws()
            raise
        # Ranks decide by the limit, which is the same on all ranks. The number of parts may differ, because one rank
        # may have a sample more.
        if len(parts) == 1 if stepper.sync is None else self._micro.size is None:
            try:
                return stepper.step_whole(batch, phase)
            except RuntimeError as error:
                if stepper.sync is not None and stepper.sync.allow_unused(error):
                    begun.undo()
                    begun.restore_draws()
                elif ran_out_of_memory(error):
                    failure = formatting.first_line(error)
                else:
                    raise
            # The error is freed at this point, with the frames that hold the graph.
            if stepper.pending > begun.pending:
                loss = stepper.last_loss
                assert loss is not None
                self._update_again(phase, failure)
                return loss
        loss = self._gradients(batch, parts, begun, phase, failure)
        stepper.count_batch(loss)
        if stepper.is_due:
            self.flush(phase)
        return loss

    def flush(self, phase: PhaseOf = as_range) -> bool:
        """Run ``Stepper.flush``. If the update runs out of memory, free cached memory and try again.

        Raises:
            torch.OutOfMemoryError: the second try failed. The update is skipped.
            flatout.optim.PartialUpdateError: as in ``step``.
        """
        try:
            return self._stepper.flush(phase)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = formatting.first_line(error)
        self._update_again(phase, failure)
        return True

    def _update_again(self, phase: PhaseOf, failure: str) -> None:
        self._free_memory()
        try:
            self._stepper.flush(phase)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = formatting.first_line(error)
        else:
            if not self._told_of_update:
                self._told_of_update = True
                warnings.warn(
                    "an update ran out of memory, and went well when what the allocator had cached was freed",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return
        self._stepper.abandon()
        raise torch.OutOfMemoryError(f"the update ran out of memory, and was left out: {failure}. {self._ladder()}")

    def _gradients(
        self, batch: Any, parts: Sequence[Part], begun: StepCheckpoint, phase: PhaseOf, failure: str
    ) -> Tensor:
        """Add the gradients of a loader's batch in parts.

        Args:
            batch: a batch of the loader.
            parts: the parts of ``batch``.
            begun: checkpoint that was made before the step.
            phase: as in ``step``.
            failure: error of the batch computed whole. Empty if the batch is split from the start.

        Returns:
            The loss of the batch.
        """
        before, height = self._micro.size, self._height()
        whole = Part(batch, batch_size_of(batch))
        try:
            with begun.kept_on_error(), self._stepper.together() as result:
                if failure:
                    if any(p._post_accumulate_grad_hooks for p in self._trained()):
                        self._fail(failure, "hooks use the gradients of parameters while the backward runs", height)
                    result.loss = self._in_smaller_parts(whole, begun, phase, failure, height)
                else:
                    if not begun.pending:
                        self._stepper.zero_grad()
                    result.loss = self._in_parts(parts, phase, height=height)
        except BaseException as error:
            self._micro.size, tried = before, self._micro.size
            is_new = tried != before and isinstance(error, Exception) and not isinstance(error, MemoryError)
            if not is_new or ran_out_of_memory(error):
                raise
            why = f"in parts of {tried} it fails: {formatting.first_line(error)}"
            raise torch.OutOfMemoryError(self._message(failure, why, height)) from error
        if self._micro.size is not None:
            self._micro.size = int(self._stepper.spec.ranks.smallest([self._micro.size])[0])
        if self._micro.size != before:
            self._tell(whole.samples, begun)
        return result.loss

    def _in_smaller_parts(
        self, part: Part, begun: StepCheckpoint, phase: PhaseOf, failure: str, height: int | None
    ) -> Tensor:
        """Run ``_in_parts`` on a part that has failed as a whole."""
        size = part.samples
        whole, moved = begun.undo(), begun.buffers_that_moved()
        self._free_memory()
        if size == 1 or split(part.batch, [1, size - 1]) is None:
            self._fail(
                failure, "a single sample does not fit" if size == 1 else "the batch cannot be taken apart", height
            )
        self._micro.size = max(part_sizes(size, -(-size // 2)))
        if self._difference is None:
            self._difference = why_parts_differ(self._stepper, part.batch, -(-size // 2))
        if self._difference:
            self._fail(failure, f"parts of it assume that {STATEMENT}, but {self._difference}", height)
        begun.restore_draws()
        with aside(whole):
            return self._in_parts(self._parts_of(part), phase, moved, height)

    def _parts_of(self, part: Part) -> list[Part]:
        """Return the parts of a part of a batch."""
        return [p._replace(share=part.share * p.share) for p in self._micro.parts(part.batch)]

    def _in_parts(
        self, parts: Sequence[Part], phase: PhaseOf, moved: Sequence[bool] | None = None, height: int | None = None
    ) -> Tensor:
        """Add the gradients of a batch, or of a part of a batch.

        Args:
            parts: the parts of the batch.
            phase: as in ``step``.
            moved: True for each module whose buffers the whole batch has already updated. None means all False.
            height: peak memory of earlier steps above the resident memory, in bytes, or None if unknown.

        Returns:
            The loss of the batch.
        """
        return self._micro.add_gradients(parts, lambda p: self._part(p, phase, height), moved)

    def _part(self, part: Part, phase: PhaseOf, height: int | None) -> Tensor:
        if self._micro.splits(part.batch):  # an earlier part has failed
            return self._in_parts(self._parts_of(part), phase, height=height)
        begun = self._begin(adds=True)
        try:
            return self._stepper.add_gradients(part, phase)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = formatting.first_line(error)
        return self._in_smaller_parts(part, begun, phase, failure, height)

    def _begin(self, *, adds: bool) -> StepCheckpoint:
        """Record the state before a step, or before a part of a step, that adds to gradients or not."""
        # At the start of an update only parameters outside the optimizer have gradients.
        parameters = self._trained() if adds else self._stepper.not_updated
        return StepCheckpoint(self._stepper, self._micro.slots, parameters, adds=adds)

    def _trained(self) -> list[Tensor]:
        """Return all parameters that get gradients, in the optimizer's present groups and outside the optimizer."""
        assert self._stepper.spec.optimizer is not None
        return [*parameters_of(self._stepper.spec.optimizer), *self._stepper.not_updated]

    def _free_memory(self) -> None:
        """Free all memory that is not in use."""
        if self._stepper.runner is not None:
            self._stepper.runner.release()
        free_memory(self._stepper.spec.device)

    def _height(self) -> int | None:
        """Return the peak memory of steps above the resident memory, in bytes, or None on a CPU."""
        device = self._stepper.spec.device
        if device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    # -- messages --------------------------------------------------------------------------------------------

    def _tell(self, size: int, begun: StepCheckpoint) -> None:
        seen = []
        if begun.has_drawn():
            seen.append("random numbers (Dropout's masks) are drawn for each part")
        if any(p._backward_hooks for p in self._trained()):
            seen.append("hooks see the gradients of each part")
        warnings.warn(
            f"a step of {size} samples ran out of memory: it is computed in parts of {self._micro.size} from here on, "
            f"{self._micro.result(*seen)}",
            RuntimeWarning,
            stacklevel=5,
        )

    def _fail(self, failure: str, why: str, height: int | None) -> NoReturn:
        raise torch.OutOfMemoryError(self._message(failure, why, height))

    def _message(self, failure: str, why: str, height: int | None) -> str:
        took = "" if height is None else f" Steps took up to {formatting.size_of(height)} on top of what stays."
        found = f": {failure}" if failure else ""
        return f"a step ran out of memory, and {why}{found}.{took} {self._ladder()}"

    def _ladder(self) -> str:
        """Return the advice against out of memory, with the known figures."""
        spec = self._stepper.spec
        parameters = list({id(p): p for p in self._trained()}.values())
        weights = sum(p.nbytes for p in parameters)
        assert spec.optimizer is not None
        state = state_bytes(spec.optimizer)
        steps = ["smaller batches from the loader, or smaller samples (shorter sequences, smaller images)"]
        if autocast_dtype(spec.model) is None and all(p.dtype is not torch.bfloat16 for p in parameters):
            steps.append("precision='bf16', for about half of what the forward keeps for the backward")
        steps.append("torch.utils.checkpoint around the model's blocks, for their inputs instead of all within them")
        if state:
            steps.append(
                "moments of 8 bits (flatout.optim, moment_dtype=torch.uint8), for a quarter of those in float32"
            )
        return (
            f"Parameters that are trained take {formatting.size_of(weights)}, gradients as much, optimizer state "
            f"{formatting.size_of(state)}. What would help: {'; '.join(steps)}"
        )


def _gpu_position(device: torch.device) -> tuple[torch.Generator, int, int] | None:
    """Return the generator of a GPU, its seed and its offset, or None for a device that is not CUDA."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    return generator, generator.initial_seed(), generator.get_offset()


class StepCheckpoint:
    """Cheap record of the state before a step, or before a part of a step.

    The record has positions of generators and versions of tensors, but no copies of buffers. The position of a CUDA
    generator is two numbers. The CPU generator has no such position, so its state of 5 KB is copied.

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
        self._stepper = stepper
        self._slots = slots
        self._adds = adds
        self._params = parameters
        self._draws = torch.default_generator.get_state()
        self._gpu_draws = None if stepper.spec.device.type == "cpu" else _gpu_position(stepper.spec.device)
        self._buffers = list(chain.from_iterable(map(_values, slots))) if slots else []
        self._buffer_versions = versions(self._buffers) if slots else []
        self._grads = list(map(_grad, parameters)) if parameters else []
        self._versions = versions(self._grads) if parameters else []

    def restore_draws(self) -> None:
        """Restore the generators of torch's operations."""
        torch.default_generator.set_state(self._draws)
        if self._gpu_draws is not None:
            generator, seed, offset = self._gpu_draws
            generator.manual_seed(seed)
            generator.set_offset(offset)

    def has_drawn(self) -> bool:
        """Return True if a generator has drawn numbers since the checkpoint."""
        if not torch.equal(torch.default_generator.get_state(), self._draws):
            return True
        return self._gpu_draws is not None and self._gpu_draws[0].get_offset() != self._gpu_draws[2]

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
            self.restore_draws()
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
