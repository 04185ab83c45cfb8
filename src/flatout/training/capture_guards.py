"""Constants of a captured step's graph, and checks that they have not changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from flatout.core.step_hooks import has_users_pre_hooks, is_patched
from flatout.mfu.counted_calls import after_update, is_wrapped
from flatout.training.stepper import Stepper


class CaptureGuards:
    """Constants of a graph, which are every address and every choice that the host made during the capture.

    Attributes:
        trained: parameters that may get a gradient.
        rates: the learning rates, in device memory, so that schedules can change them.
        hooked: True if hooks are registered, because a replay calls no hook.
    """

    NUMBERS = "numbers in the optimizer's param_groups"

    def __init__(self, stepper: Stepper) -> None:
        optimizer = stepper.spec.optimizer
        assert optimizer is not None
        self._modules = [m for root in stepper.spec.modules for m in root.modules()]
        self._slots: list[Any] = [s for m in self._modules for s in (m._parameters, m._buffers, m._modules)]
        values = [list(group.values()) for group in optimizer.param_groups]
        self._numbers = list(chain.from_iterable(values))  # references, so that ids are not reused
        self._members = self._now(stepper)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._tensors = list({id(t): t for t in self._members if _is_plain(t)}.values())
        leaves = (*(t for t in self._members if isinstance(t, nn.Parameter)), *stepped)
        self._leaves = list({id(p): p for p in leaves}.values())
        self.trained = [p for p in self._leaves if p.requires_grad]
        begun = set(map(id, stepped))
        self._growing = [p for p in self.trained if id(p) not in begun]  # steps add to these gradients
        self._grown = list(map(_grad, self._growing))
        self._stepped = [p for p in stepped if p.grad is not None]
        self._copies = [entry["copy"] for entry in optimizer.state.values() if "copy" in entry]
        self._masters = [p for p, entry in optimizer.state.items() if "master" in entry]
        self._versions: list[int] = []
        self._hooks: list[Any] = [
            hooks
            for m in self._modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._hooks += _GLOBAL_HOOKS
        self._hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        self.rates = LearningRates(optimizer, stepper.spec.device)
        self.hooked = self._is_hooked(stepper)
        reads: tuple[tuple[str, Callable[[Stepper], Any]], ...] = (
            ("parts of the model, parameters of the optimizer or its state", self._has_others),
            ("places of tensors in memory", lambda _: list(map(Tensor.data_ptr, self._tensors))),
            ("modes (train or eval)", lambda _: list(map(_training, self._modules))),
            ("parameters that require gradients", lambda _: list(map(_requires_grad, self._leaves))),
            ("gradients that no update uses up", self._has_other_gradients),
            ("hooks", self._is_hooked),
            (self.NUMBERS, _numbers),
            ("settings of the step", _settings),
        )
        self._facts = [(what, read, read(stepper)) for what, read in reads]

    def changed(self, stepper: Stepper) -> str:
        """Return the name of the first constant that has changed, or an empty text if none has."""
        return next((what for what, read, then in self._facts if read(stepper) != then), "")

    def written(self) -> bool:
        """Return True if a parameter with a master weight was written to.

        Only an eager step copies such a write to the master weight.
        """
        return bool(self._masters) and list(map(_version, self._masters)) != self._versions

    def note_writes(self) -> None:
        """Record the versions of all parameters with master weights, which are up to date now."""
        self._versions = list(map(_version, self._masters))

    def note_replay(self) -> None:
        """Increment the versions of parameters and copies that a replay has written."""
        torch.autograd.graph.increment_version(self._stepped + self._copies)
        self.note_writes()

    def show(self, grads: Sequence[Tensor | None]) -> None:
        """Set the gradients of ``trained``."""
        if not all(map(is_, map(_grad, self.trained), grads)):
            for p, grad in zip(self.trained, grads, strict=True):
                p.grad = grad

    def _now(self, stepper: Stepper) -> list[Any]:
        """Return all parts of the model, all parameters of the optimizer, and all entries of its state."""
        assert stepper.spec.optimizer is not None
        of_groups = map(_params, stepper.spec.optimizer.param_groups)
        of_state = map(dict.values, stepper.spec.optimizer.state.values())
        return list(chain.from_iterable(chain(map(dict.values, self._slots), of_groups, of_state)))

    def _has_others(self, stepper: Stepper) -> bool:
        now = self._now(stepper)
        return len(now) != len(self._members) or not all(map(is_, now, self._members))

    def _has_other_gradients(self, stepper: Stepper) -> bool:
        return not all(map(is_, map(_grad, self._growing), self._grown))

    def _is_hooked(self, stepper: Stepper) -> bool:
        assert stepper.spec.optimizer is not None
        return (
            any(self._hooks)
            or has_users_pre_hooks()
            or any(hook is not after_update for hook in torch_optimizer._global_optimizer_post_hooks.values())
            or any(map(is_wrapped, stepper.spec.modules))
            or any(map(_tensor_hooks, self.trained))
            or any(map(_accumulated_hooks, self.trained))
            or is_patched(stepper.spec.optimizer)
            or "_swapped" in vars(stepper.spec.optimizer)  # inside optimizer.ema.swap(), where steps are rejected
        )


class LearningRates:
    """Learning rates in device memory, where a captured update reads them.

    Learning rates are written in stream order, as launch arguments, and only after a change. So no pinned buffer must
    stay alive until its copy completes. A learning rate that is already on the device stays in its own tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        groups = optimizer.param_groups
        # float64, like a Python number, so that the update computes the same as with a Python number.
        self._slots = list(torch.zeros(len(groups), dtype=torch.float64, device=device).unbind())
        self._written: list[float | None] = [None] * len(groups)

    def write(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the current learning rates to the device."""
        for i, group in enumerate(optimizer.param_groups):
            rate = group["lr"]
            if _is_on_device(rate):
                continue
            rate = float(rate)
            if rate != self._written[i]:
                self._slots[i].fill_(rate)
                self._written[i] = rate

    @contextlib.contextmanager
    def lent(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Make the optimizer read its learning rates from the device, inside the block.

        The captured step then does not refresh master weights, because ``CaptureGuards.written`` detects writes.
        """
        groups = optimizer.param_groups
        own = [group["lr"] for group in groups]
        vars(optimizer)["_detects_writes"] = True
        try:
            for group, slot in zip(groups, self._slots, strict=True):
                if not _is_on_device(group["lr"]):
                    group["lr"] = slot
            yield
        finally:
            del vars(optimizer)["_detects_writes"]
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate


_params = itemgetter("params")
_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")
_grad = attrgetter("grad")
_tensor_hooks = attrgetter("_backward_hooks")
_accumulated_hooks = attrgetter("_post_accumulate_grad_hooks")

_GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)


def _numbers(stepper: Stepper) -> list[Any]:
    """Return every option of every group. A learning rate counts only if it is a tensor on the device."""
    assert stepper.spec.optimizer is not None
    return [
        (name, id(value)) if isinstance(value, Tensor) and (name != "lr" or _is_on_device(value)) else (name, value)
        for group in stepper.spec.optimizer.param_groups
        for name, value in group.items()
        if name != "params" and (name != "lr" or _is_on_device(value))
    ]


def _settings(stepper: Stepper) -> list[Any]:
    scaler = stepper.scaler
    scaling = None if scaler is None else (scaler, scaler.is_enabled(), id(scaler._scale), _schedule_of(scaler))
    compiled = stepper.spec.model._compiled_call_impl, stepper.objective.compiled
    return [type(stepper.spec.model), compiled, type(stepper.spec.optimizer), scaling]


def _schedule_of(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


class _Unsuited(Exception):
    """Batch with a part that cannot be an input of a graph."""


def sign(batch: Any, device: torch.device) -> tuple[Hashable, list[Tensor]] | None:
    """Return the constants of a batch, and its tensors in the order of ``map_tensors``.

    Returns:
        The constants and the tensors. None if the batch cannot be copied into a graph. Such a batch holds no tensors,
            tensors on other devices, tensor subclasses, tensors that require gradients, or objects of other types.
    """
    tensors: list[Tensor] = []
    try:
        key = _signed(batch, device.type, tensors)
    except _Unsuited:
        return None
    return (key, tensors) if tensors else None


_VALUES = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _signed(value: Any, device: str, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if kind is Tensor:
        if value.device.type != device or value.requires_grad or not _is_plain(value):
            raise _Unsuited
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if kind in _VALUES:
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple([_signed(part, device, tensors) for part in value])
    if isinstance(value, Mapping):
        return kind, tuple([(key, _signed(part, device, tensors)) for key, part in value.items()])
    raise _Unsuited
