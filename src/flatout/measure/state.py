"""Everything that training changes, captured and put back bit for bit.

One ``State`` serves trials, undo and recovery. What a user's ``forward`` or dataset keeps in Python attributes is
theirs and is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flatout._backends import AttentionKernels, Float32Precision
from flatout._malloc import MallocSetting
from flatout.data.generators import RandomState


class _SavedTensor:
    """A tensor object and the bits it held, gradient included: both the object and the bits come back."""

    def __init__(self, tensor: Tensor, on: torch.device | None) -> None:
        self._tensor = tensor
        self._bits = _copied(tensor, on)
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_bits = None if self._grad is None else _copied(self._grad, on)

    def restore(self) -> Tensor:
        with torch.no_grad():
            owned(self._tensor).copy_(self._bits)
            if self._grad_bits is not None and self._grad is not None:
                owned(self._grad).copy_(self._grad_bits)
        if self._tensor.is_leaf:
            self._tensor.grad = self._grad
            self._tensor.requires_grad_(self._requires_grad)
        return self._tensor


def owned(tensor: Tensor) -> Tensor:
    """The elements behind a tensor: an expanded dimension, whose entries are one and the same, shrinks to one."""
    if tensor.layout is not torch.strided:
        return tensor  # sparse gradients, and moments made of them: writing to a view of one does not reach it
    view = tensor.detach()
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if stride == 0 and size > 1:
            view = view.narrow(dim, 0, 1)
    return view


def _copied(tensor: Tensor, on: torch.device | None) -> Tensor:
    bits = owned(tensor).detach()
    return bits.clone() if on is None else bits.to(on, copy=True)


def _save(value: Any, on: torch.device | None) -> Any:
    """Copy one piece of optimizer state; tensors keep their identity."""
    return _SavedTensor(value, on) if isinstance(value, Tensor) else copy.deepcopy(value)


def _load(saved: Any) -> Any:
    return saved.restore() if isinstance(saved, _SavedTensor) else copy.deepcopy(saved)


class ModuleSlots:
    """Which parameter and buffer objects a module tree holds, and its modes; not their bits."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]

    def restore(self) -> None:
        for module, training, parameters, buffers in self._slots:
            module.training = training
            if not isinstance(module, torch.jit.ScriptModule):  # whose slots no Python code can change
                pairs: tuple[tuple[Any, Any], ...] = ((module._parameters, parameters), (module._buffers, buffers))
                for slots, saved in pairs:
                    slots.clear()
                    slots.update(saved)


class _Tensors:
    """The bits and gradients of every distinct tensor."""

    def __init__(self, tensors: Iterable[Tensor], on: torch.device | None) -> None:
        self._saved = [_SavedTensor(t, on) for t in {id(t): t for t in tensors}.values()]

    def restore(self) -> None:
        for saved in self._saved:
            saved.restore()


def _save_entry(entry: Any, on: torch.device | None) -> Any:
    """State of one parameter: a dict of values, or whatever else an optimizer keeps under a key of its own."""
    return {k: _save(v, on) for k, v in entry.items()} if isinstance(entry, dict) else _save(entry, on)


def _load_entry(saved: Any) -> Any:
    return {k: _load(v) for k, v in saved.items()} if isinstance(saved, dict) else _load(saved)


_OPTIMIZER_PARTS = frozenset({"state", "param_groups", "defaults"})


class _OptimizerState:
    """State, hyper-parameters and bookkeeping attributes of an optimizer.

    Restoring an optimizer that had not stepped removes the state that steps have created since.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, on: torch.device | None) -> None:
        self._optimizer = optimizer
        self._state = {key: _save_entry(entry, on) for key, entry in optimizer.state.items()}
        self._groups = [
            (list(group["params"]), {k: _save(v, on) for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]
        self._attributes = {k: v for k, v in vars(optimizer).items() if k not in _OPTIMIZER_PARTS}

    def restore(self) -> None:
        optimizer = self._optimizer
        optimizer.state.clear()
        for parameter, saved in self._state.items():
            optimizer.state[parameter] = _load_entry(saved)
        for group, (parameters, saved) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = parameters
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            group.update({k: _load(v) for k, v in saved.items()})
        for key in vars(optimizer).keys() - self._attributes.keys() - _OPTIMIZER_PARTS:
            delattr(optimizer, key)
        vars(optimizer).update(self._attributes)


class _BackendFlags:
    """Process-wide switches that techniques may turn."""

    def __init__(self) -> None:
        self._cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
        self._precision = Float32Precision()
        self._attention = AttentionKernels()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._fill_uninitialized = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self._threads = torch.get_num_threads()
        self._malloc = MallocSetting()

    def restore(self) -> None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._cudnn
        self._precision.restore()
        self._attention.restore()
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self._fill_uninitialized  # type: ignore[attr-defined]
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._malloc.restore()


class State:
    """A snapshot of a training job: ``State.capture(...)`` now, ``restore()`` as often as wanted.

    Restoring is bit-exact and in place: parameters, buffers and optimizer state keep their storage, so views,
    tied weights and references held elsewhere stay valid. It costs one copy of the model, its gradients and the
    optimizer's state.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    @classmethod
    def capture(
        cls,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        loader: Any = None,
        *,
        on: torch.device | None = None,
    ) -> State:
        """Copy everything that a training step changes.

        Args:
            modules: model and loss modules: parameters, buffers, gradients and train/eval modes.
            optimizer: its state, hyper-parameters and bookkeeping, and the parameters it holds from elsewhere.
            loader: the random generators that it, its samplers and its dataset keep.
            on: the device for the copies; default: where the originals are.
        """
        modules = list(modules)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        parts: list[Any] = [_BackendFlags(), RandomState.capture(loader)]
        if optimizer is not None:
            tensors += [p for group in optimizer.param_groups for p in group["params"]]
            parts.append(_OptimizerState(optimizer, on))
        parts.append(_Tensors(tensors, on))
        parts += [ModuleSlots(module) for module in modules]
        return cls(parts)

    def restore(self) -> None:
        """Put everything back as it was when captured. May be called any number of times."""
        for part in reversed(self._parts):
            part.restore()
