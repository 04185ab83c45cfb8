"""What is being trained, and how one step of it goes. Techniques act on it; trials and ``Run`` step it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.amp import GradScaler
from flatout.core.batches import cloned, tensors_of, tensors_within, with_own_containers
from flatout.core.kinds import check_kinds, check_number
from flatout.core.out_of_memory import parameters_of, ran_out_of_memory
from flatout.core.random_state import RandomState
from flatout.core.snapshot import State
from flatout.mfu.flop_count import FlopCount
from flatout.mfu.flops import count_flops
from flatout.mfu.peaks import measured_peak_flops, multiplies_in_tf32, peak_flops
from flatout.mfu.ranges import range
from flatout.mfu.signatures import CountedWork
from flatout.mfu.wrapped import is_wrapped
from flatout.optim import update
from flatout.optim.atomic_update import AllOrNothing
from flatout.optim.native_step import NativeStep
from flatout.training.autocast import autocast_dtype
from flatout.training.loss_suggestion import compute_loss_line
from flatout.training.micro_batches import LossWeight, MicroBatches, Part

if TYPE_CHECKING:
    from flatout.training.graphed_step import WholeStep

PhaseOf = Callable[[str], AbstractContextManager[Any]]
"""``with phase("forward"): ...``: tells whoever listens what the step is doing."""


def as_range(phase: str) -> range:
    """A range for profilers alone."""
    return range(f"flatout.{phase}")


@dataclass(eq=False)
class Job:
    """A model, its data and its update rule, with the settings that every technique reads.

    Attributes:
        model: the user's module, always the same object.
        loader: the user's loader, or one made of it with another batch size.
        source: what training iterates instead: that loader or a faster one with the same batches.
        optimizer: the user's optimizer; None in the two-value form.
        loss_fn: ``(output, target) -> loss``.
        compute_loss: ``(model, batch) -> loss``, where ``loss_fn`` does not fit.
        loss_weight: what the loss of a part of a batch is a mean over; None: its samples.
        device: where steps run.
        inference: whether a step is a forward alone.
        accumulate: batches per update.
        resizes: whether the loader may be made anew with a batch size that is faster.
        memory_limit: bytes that training may take; None: what the device has.
        max_grad_norm: global gradient norm to clip to; None for no clipping.
        deterministic: whether only bit-identical techniques may be chosen by timing.
        reproducible: whether ``deterministic`` is set because :func:`flatout.reproducible` is in force, which already
            sets torch's flags.
        expected_steps: steps that the training is going to take, for break-even decisions.
        batches: what trials run on, on the device, while there are trials.
        failed: names of the techniques of which no candidate ran at all.
        micro_batches: how batches are taken apart that are not computed in one.
        compiled_loss: takes the place of ``loss`` in the steps of a training, and may fall back on it; None: every step
            computes the loss plainly.
        writes_batches: whether the loss or the forward changes tensors of its batch in place.
        whole_step: takes the place of a training's ``eager_step``, and may fall back on it; None: every step is eager.
        last_loss: of the last batch that waits for an update, as ``step`` returns it; None: none waits.
        work: ``work(batch)``: samples, tokens, and FLOPs of forward, loss and backward of a batch.
    """

    model: nn.Module
    loader: Iterable[Any]
    source: Iterable[Any]
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[[Any, Any], Tensor] | None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None
    device: torch.device
    loss_weight: LossWeight | None = None
    inference: bool = False
    accumulate: int = 1
    resizes: bool = False
    memory_limit: int | None = None
    max_grad_norm: float | None = None
    deterministic: bool = False
    reproducible: bool = False
    expected_steps: int = 0
    batches: Sequence[Any] = field(default=(), init=False)
    failed: set[str] = field(default_factory=set, init=False)
    micro_batches: MicroBatches = field(init=False)
    compiled_loss: Callable[[Any], Tensor] | None = field(default=None, init=False)
    writes_batches: bool = field(default=False, init=False)
    whole_step: WholeStep | None = field(default=None, init=False)
    work: CountedWork = field(init=False)
    last_loss: Tensor | None = field(default=None, init=False)
    _pending: int = field(default=0, init=False)
    _averaged: bool = field(default=False, init=False)
    _scaler: GradScaler | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.work = CountedWork(self._count_flops)
        self.micro_batches = MicroBatches(self)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler; there is one only while the model computes in fp16."""
        if autocast_dtype(self.model) is not torch.float16:
            return None
        if self._scaler is None:
            self._scaler = GradScaler(self.device.type)
        return self._scaler

    @property
    def modules(self) -> list[nn.Module]:
        """Model and loss modules: everything with parameters or buffers that a step may use."""
        return [m for m in (self.model, self.loss_fn, self.compute_loss) if isinstance(m, nn.Module)]

    @property
    def code(self) -> list[Any]:
        """The user's modules and functions that a step calls."""
        functions = (self.loss_fn, self.compute_loss, self.loss_weight)
        return [self.model, *(function for function in functions if function is not None)]

    @property
    def varies(self) -> bool:
        """Whether ``batches`` come in several shapes."""
        return len({tuple(t.shape for t in tensors_within(batch)) for batch in self.batches}) > 1

    def loss(self, batch: Any) -> Tensor:
        """Forward pass and loss of one batch that is already on the device.

        Raises:
            TypeError: the batch is neither a pair nor a mapping and there is no ``compute_loss``.
            ValueError: an optimizer was given, but nothing says what to minimise.
        """
        if self.compute_loss is not None:
            return self.compute_loss(self.model, self.lent(batch))
        output, target = self.forward(batch)
        if self.loss_fn is not None:
            if target is None:
                raise TypeError(
                    f"batches must be (x, y) pairs for loss_fn, got {type(batch).__name__}. "
                    f"Replace loss_fn by {compute_loss_line(self.model, batch, has_loss_fn=True)}"
                )
            return self.loss_fn(output, target)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is not None:
            return loss
        if self.optimizer is not None:
            raise ValueError(
                f"model must return an output with .loss if there is no loss_fn or compute_loss, got "
                f"{type(output).__name__}. Pass loss_fn, or "
                f"{compute_loss_line(self.model, batch, has_loss_fn=True)}"
            )
        return torch.stack([t.float().sum() for t in tensors_of(output) if t.is_floating_point()]).sum()

    def objective(self, batch: Any) -> Tensor:
        """The loss as steps compute it: by ``compiled_loss`` where there is one.

        Plainly where a counter listens to the model's calls, which compiled code does not tell.
        """
        if self.compiled_loss is None or is_wrapped(self.model):
            return self.loss(batch)
        if self.loss_fn is not None and type(batch) is list:
            batch = tuple(batch)  # a loader's list and run.step((x, y)) are one kind of call
        return self.compiled_loss(self.lent(batch))

    def lent(self, batch: Any) -> Any:
        """Return a copy of a batch for the user's code, which may pop entries and write to tensors.

        Containers are always copied, tensors only if ``writes_batches``. The batch itself must not change, because
        trials and steps that ran out of memory use it again.
        """
        return cloned(batch) if self.writes_batches else with_own_containers(batch)

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The model's output for one batch, and the target; None where the batch has none."""
        batch = self.lent(batch)
        if isinstance(batch, Mapping):
            return self.model(**batch), None
        if isinstance(batch, Tensor):
            return self.model(batch), None
        if isinstance(batch, Sequence) and len(batch) == 2:
            return self.model(batch[0]), batch[1]
        given = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
        line = compute_loss_line(self.model, batch, has_loss_fn=self.loss_fn is not None)
        raise TypeError(f"batches must be (x, y) pairs or mappings, got {given}. Define the loss: {line}")

    def infer(self, batch: Any) -> Any:
        """The model's output for one batch, or what ``compute_loss`` makes of it, under ``inference_mode``."""
        with torch.inference_mode():
            if self.compute_loss is not None:
                return self.compute_loss(self.model, self.lent(batch))
            return self.forward(batch)[0]

    def step(self, batch: Any, phase: PhaseOf = as_range) -> Any:
        """Forward, backward and, after ``accumulate`` batches, the update.

        Args:
            batch: on the device.
            phase: entered for the forward, the backward and the update.

        Returns:
            The loss, 0-dim, detached, on the device, not synchronised; in inference what ``infer`` returns.
        """
        if self.inference:
            with phase("forward"):
                return self.infer(batch)
        if self.whole_step is None or self.micro_batches.takes_apart(batch):
            return self.eager_step(batch, phase)
        return self.whole_step(self, batch, phase)

    def eager_step(self, batch: Any, phase: PhaseOf = as_range) -> Tensor:
        """``step`` of a training, kernel by kernel."""
        if self._pending == 0:
            self.zero_grad()
        parts = self.micro_batches.parts(batch)
        loss = self.micro_batches.add_gradients(parts, lambda part: self.add_gradients(part, phase))
        self.count_batch(loss)
        if self._pending == self.accumulate:
            self.flush(phase)
        return loss

    def add_gradients(self, part: Part, phase: PhaseOf = as_range) -> Tensor:
        """Forward and backward of one batch, or of a part of one.

        Args:
            part: on the device; where its share is 0, its loss may be anything.
            phase: entered for the forward and the backward.

        Returns:
            The loss times the part's share, detached.
        """
        share = part.share
        with phase("forward"):
            loss = self.objective(part.batch)
            if isinstance(share, Tensor):
                loss = torch.where(share == 0, 0, loss * share).to(loss.dtype)
            elif share == 0:
                loss = torch.zeros_like(loss)
            elif share != 1:
                loss = loss * share
        with phase("backward"):
            if loss.requires_grad or share:
                (loss if self.scaler is None else self.scaler.scale(loss / self.accumulate)).backward()
        return loss.detach()

    def count_batch(self, loss: Tensor) -> None:
        """One more batch has all its gradients; ``loss`` is its loss."""
        self._pending += 1
        self.last_loss = loss

    @property
    def pending(self) -> int:
        """Batches whose gradients wait for the next update."""
        return self._pending

    def flush(self, phase: PhaseOf = as_range) -> bool:
        """Update with the gradients of the batches since the last update, averaged over just these.

        Args:
            phase: entered for the update.

        Returns:
            Whether there was anything to update with.

        Raises:
            torch.OutOfMemoryError: as all that runs out of memory. The gradients wait still: it may be called again.
            flatout.optim.UpdateCutInHalf: it ran out of memory when it had changed some of the parameters.
        """
        batches, self._pending = self._pending, 0
        if batches == 0 or self.optimizer is None:
            return False
        # An optimizer of ours sees to it by itself.
        watch = None if isinstance(self.optimizer, NativeStep) else AllOrNothing(self.optimizer)
        try:
            with phase("update"), watch or contextlib.nullcontext():
                self._update(batches)
        except Exception as error:
            if ran_out_of_memory(error):
                self._pending = batches
                self._averaged |= watch is not None and watch.has_rewritten_gradients
            raise
        self._averaged, self.last_loss = False, None
        return True

    def _update(self, batches: int) -> None:
        assert self.optimizer is not None
        if self.scaler is not None:
            if batches < self.accumulate and not self._averaged:  # an epoch's leftover: they share the whole weight
                grads = [p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
                torch._foreach_mul_(grads, self.accumulate / batches)
                self._averaged = True
            # The lazy form, also without clipping, moves 4 bytes per parameter less.
            clip = math.inf if self.max_grad_norm is None else self.max_grad_norm
            self.scaler.step(self.optimizer, max_grad_norm=clip)
            self.scaler.update()
        else:
            inv_scale = None if batches == 1 or self._averaged else 1.0 / batches
            update(self.optimizer, inv_scale=inv_scale, max_grad_norm=self.max_grad_norm)

    @property
    def progress(self) -> tuple[int, GradScaler | None]:
        """Batches that wait for an update, and the loss scaler: what ``State`` does not have of a job."""
        return self._pending, self._scaler

    @progress.setter
    def progress(self, progress: tuple[int, GradScaler | None]) -> None:
        self._pending, self._scaler = progress

    def reset(self) -> None:
        """Forget batches that were accumulated but not updated with, and what the loss scaler has learnt."""
        self._pending = 0
        self._averaged = False
        self._scaler = None

    def abandon(self) -> None:
        """Forget a step that an error ended half way; what the loss scaler has learnt stays."""
        self._pending = 0
        self._averaged = False
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        """What training has made of model, loss, optimizer and loss scaler, and of batches not updated with yet."""
        return {
            "modules": [module.state_dict() for module in self.modules],
            "others": [p.detach() for p in self._parameters_elsewhere()],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "pending": self._pending,
            "gradients": [p.grad for p in self._parameters()] if self._pending else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was saved; its tensors may be taken over.

        Raises:
            Exception: of many kinds; it does not fit. Part of it may be loaded by then.
        """
        elsewhere, parameters = self._parameters_elsewhere(), self._parameters()
        here = {"modules": len(self.modules), "others": len(elsewhere), "optimizer": self.optimizer is not None}
        there = {name: len(state[name]) for name in ("modules", "others")} | {
            "optimizer": state["optimizer"] is not None
        }
        if here != there:
            raise ValueError(f"it has {there}, this training {here}")
        if check_number(state["pending"], "pending") >= self.accumulate:
            raise ValueError(f"it is in the middle of more batches than accumulate={self.accumulate}")
        own = self.state_dict()
        for name in ("others", "optimizer", "scaler"):
            check_kinds(state[name], own[name], name)
        for module, saved in zip(self.modules, state["modules"], strict=True):
            module.load_state_dict(saved)
        with torch.no_grad():
            for p, values in zip(elsewhere, state["others"], strict=True):
                p.copy_(values)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.reset()
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._pending = state["pending"]
        if self._pending:
            for p, gradient in zip(parameters, state["gradients"], strict=True):
                p.grad = None if gradient is None else gradient.to(p.device)

    def _parameters(self) -> list[Tensor]:
        """Every parameter once, in a fixed order."""
        return [*self._parameters_inside().values(), *self._parameters_elsewhere()]

    def _parameters_inside(self) -> dict[int, nn.Parameter]:
        return {id(p): p for module in self.modules for p in module.parameters()}

    def _parameters_elsewhere(self) -> list[Tensor]:
        """What the optimizer trains that is in no module known here: a temperature, say, that ``compute_loss`` uses."""
        inside, held = self._parameters_inside(), [] if self.optimizer is None else parameters_of(self.optimizer)
        return list({id(p): p for p in held if id(p) not in inside}.values())

    def peak_flops(self, *, measure: bool) -> tuple[float | None, str]:
        """The peak in FLOP/s that MFU is relative to, in the precision that the model computes in, and what it is.

        Args:
            measure: whether it may be measured now (a second or two) where no data sheet tells it.
        """
        real = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = autocast_dtype(self.model) or next(real, torch.float32)  # complex products are made of these
        if self.device.type != "cuda":
            peak = measured_peak_flops(self.device, dtype, measure=measure)
            return peak, f"the fastest matrix product here in {_short(dtype)}"
        tf32 = dtype is torch.float32 and multiplies_in_tf32(self.device)
        peak = peak_flops(self.device, "tf32" if tf32 else dtype)
        return peak, f"the data sheet's peak in {'tf32' if tf32 else _short(dtype)}"

    def share_of_flops(self, module: str) -> float | None:
        """Share of a step's FLOPs, 0..1, that one of the model's modules takes; None where that is not known.

        Args:
            module: its name in ``model.named_modules()``.
        """
        for count in self.work.counts[:1]:
            try:
                return count.by_module[f"parts.0.{module}"].total / max(1, count.total)
            except KeyError:  # counted under another of its names
                return None
        return None

    def _count_flops(self, batch: Any) -> FlopCount:
        """Count FLOPs with the user's model and loss, even during training, and restore what these change."""
        state = State.capture([], code=[f for f in self.code if f is not self.model])
        with RandomState.capture(self.model).restored(), state.guarded(), state.extended():
            try:
                return count_flops(_Forward(self), batch, backward=not self.inference)
            finally:
                state.restore()

    def zero_grad(self) -> None:
        """Begin with no gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.model.zero_grad(set_to_none=True)


class _Forward(nn.Module):
    """A job's forward and loss as a module, over everything that has parameters or buffers."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self.parts = nn.ModuleList(job.modules)

    def forward(self, batch: Any) -> Any:
        return self._job.infer(batch) if self._job.inference else self._job.loss(batch)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype)[6:])
