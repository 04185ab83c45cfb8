"""Everything that training changes, captured and put back bit for bit.

One ``State`` serves trials, undo and recovery. What a user's ``forward`` or dataset keeps in Python attributes is
theirs and is not touched.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class _SavedTensor:
    """A tensor object and the bits it held, gradient included: both the object and the bits come back."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._bits = tensor.detach().clone()
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._grad_bits = None if self._grad is None else self._grad.detach().clone()

    def restore(self) -> Tensor:
        with torch.no_grad():
            self._tensor.copy_(self._bits)
            if self._grad_bits is not None and self._grad is not None:
                self._grad.copy_(self._grad_bits)
        if self._tensor.is_leaf:
            self._tensor.grad = self._grad
            self._tensor.requires_grad_(self._requires_grad)
        return self._tensor


def _save(value: Any) -> Any:
    """Copy one piece of optimizer state; tensors keep their identity."""
    return _SavedTensor(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _load(saved: Any) -> Any:
    return saved.restore() if isinstance(saved, _SavedTensor) else copy.deepcopy(saved)


class _ModuleState:
    """Parameters, buffers (non-persistent ones too), gradients and modes of a module tree."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        tensors = (t for _, _, params, buffers in self._slots for t in (*params.values(), *buffers.values()))
        unique = {id(t): t for t in tensors if t is not None}
        self._tensors = [_SavedTensor(t) for t in unique.values()]

    def restore(self) -> None:
        for module, training, parameters, buffers in self._slots:
            module.training = training
            if not isinstance(module, torch.jit.ScriptModule):  # whose slots no Python code can change
                pairs: tuple[tuple[Any, Any], ...] = ((module._parameters, parameters), (module._buffers, buffers))
                for slots, saved in pairs:
                    slots.clear()
                    slots.update(saved)
        for tensor in self._tensors:
            tensor.restore()


_OPTIMIZER_PARTS = frozenset({"state", "param_groups", "defaults"})


class _OptimizerState:
    """State, hyper-parameters and bookkeeping attributes of an optimizer.

    Restoring an optimizer that had not stepped removes the state that steps have created since.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: {k: _save(v) for k, v in state.items()} for p, state in optimizer.state.items()}
        self._groups = [
            (list(group["params"]), {k: _save(v) for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]
        self._attributes = {k: v for k, v in vars(optimizer).items() if k not in _OPTIMIZER_PARTS}

    def restore(self) -> None:
        optimizer = self._optimizer
        optimizer.state.clear()
        for parameter, saved in self._state.items():
            optimizer.state[parameter] = {k: _load(v) for k, v in saved.items()}
        for group, (parameters, saved) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = parameters
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            group.update({k: _load(v) for k, v in saved.items()})
        for key in vars(optimizer).keys() - self._attributes.keys() - _OPTIMIZER_PARTS:
            delattr(optimizer, key)
        vars(optimizer).update(self._attributes)


def generators_of(loader: Any) -> Iterator[torch.Generator]:
    """Every explicit ``torch.Generator`` that a DataLoader and its samplers draw from."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    yield from found.values()


class _RandomState:
    """The global generators of python, numpy and torch (every device in use), and the loader's own."""

    def __init__(self, loader: Any) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._generators = [(g, g.get_state()) for g in generators_of(loader)]

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._generators:
            generator.set_state(state)


class _BackendFlags:
    """Process-wide switches that techniques may turn."""

    def __init__(self) -> None:
        self._cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
        self._matmul_precision = torch.get_float32_matmul_precision()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._threads = torch.get_num_threads()

    def restore(self) -> None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._cudnn
        if torch.get_float32_matmul_precision() != self._matmul_precision:
            torch.set_float32_matmul_precision(self._matmul_precision)
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


class State:
    """A snapshot of a training job: ``State.capture(...)`` now, ``restore()`` as often as wanted.

    Restoring is bit-exact and in place: parameters, buffers and optimizer state keep their storage, so views,
    tied weights and references held elsewhere stay valid. It costs one copy of the model, its gradients and the
    optimizer's state, on the device where they live.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        criterion: Any = None,
        loader: Any = None,
    ) -> State:
        """Copy everything that a training step changes.

        Args:
            model: its parameters, buffers, gradients and train/eval modes.
            optimizer: its state, hyper-parameters and bookkeeping.
            criterion: a loss function; captured like the model when it is a module.
            loader: the generators that it and its samplers draw from.
        """
        parts: list[Any] = [_BackendFlags(), _RandomState(loader), _ModuleState(model)]
        if isinstance(criterion, nn.Module):
            parts.append(_ModuleState(criterion))
        if optimizer is not None:
            parts.append(_OptimizerState(optimizer))
        return cls(parts)

    def restore(self) -> None:
        """Put everything back as it was when captured. May be called any number of times."""
        for part in reversed(self._parts):
            part.restore()
