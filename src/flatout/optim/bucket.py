"""Buckets: the parameters of one kind, device and dtype, which the native core keeps under a number."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from flatout.core import dtensor, gradients
from flatout.optim import dynamic8
from flatout.optim.options import StateLayout, compute_dtype

_ops = torch.ops.flatout
_versions = attrgetter("_version")
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the seeds of two parts of DTensors: the odd constant of SplitMix64, so that all seeds differ."""

READY, STALE, COPIED, FOREIGN = range(4)
"""Results of ``set_grads``.

- READY: the bucket can step.
- STALE: tensors have moved, or gradients have several dtypes, so new buckets are needed.
- COPIED: the bucket can step. The core has copied gradients whose strides differ from those of their weights.
- FOREIGN: the kernels do not accept a gradient.
"""


@dataclass(frozen=True)
class Kind:
    """Properties that the parameters of a bucket have in common."""

    rule: str
    """Name of the rule in csrc/optim/rules.h."""
    streams: tuple[str, ...]
    """State entries that the rule updates with the parameter."""
    count_dtype: torch.dtype | None
    """Dtype of new step counts; None if steps are not counted."""
    seeded: bool
    """True if parameters or moments are rounded stochastically."""
    layout: StateLayout
    """Dtypes of the moments and of the additional state."""

    @property
    def has_state(self) -> bool:
        """True if parameters have state. Otherwise they have no state entry, as in torch."""
        return bool(self.streams or self.count_dtype or self.layout.extras)


def takes(parameter: Tensor, grad: Tensor | None) -> bool:
    """Return True if a bucket can hold ``parameter`` and accept ``grad``."""
    if not _is_native(parameter) or not dtensor.is_settled(parameter):
        return False
    return grad is None or (
        grad.device == parameter.device
        and grad.is_complex() == parameter.is_complex()
        and dtensor.alike(grad, parameter)
        and _is_native(grad)
    )


def _is_native(tensor: Tensor) -> bool:
    # The type is checked first, because tensors of other types, such as lazy parameters, may have no memory.
    return type(dtensor.local(tensor)) in dtensor.PLAIN and gradients.is_native(_real(tensor))


def overlaps_itself(tensor: Tensor) -> bool:
    """Return True if two elements have one address, as in an expanded tensor. Updates are then undefined."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    # Interleaved dimensions may have no common address, so the addresses are counted.
    reach = sum((size - 1) * stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    addresses = torch.arange(reach + 1).as_strided(tensor.shape, tensor.stride())
    return addresses.unique().numel() < tensor.numel()


def like(tensor: Tensor, leader: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor`` with the device and strides of ``leader``, in ``dtype``. Copy only if one of these differs."""
    tensor = dtensor.spread_like(tensor, leader).to(device=leader.device, dtype=dtype)
    if _laid_out_like(tensor, leader):
        return tensor
    return torch.empty_like(leader, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _laid_out_like(tensor: Tensor, leader: Tensor) -> bool:
    return tensor.stride() == leader.stride() or (tensor.is_contiguous() and leader.is_contiguous())


def _real(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` in this process, as real numbers."""
    return gradients.as_real(dtensor.local(tensor).resolve_conj())


def _begin(state: dict[str, Any], p: Tensor, kind: Kind) -> None:
    """Complete the state of one parameter. Existing entries are kept, with the strides of ``p``.

    New entries are those of torch, except that the step count is on the device of the parameter. If moments exist
    without a count, the count becomes 1, because they come from a class that does not count.
    """
    moments = kind.layout.moments
    if kind.count_dtype is not None:
        count = state.get("step")
        if count is None:
            count = any(state.get(name) is not None for name in kind.streams)
        if not isinstance(count, Tensor):
            count = torch.full((), float(count), dtype=kind.count_dtype, device=p.device)
        dtype = count.dtype if count.dtype in (torch.float32, torch.float64) else kind.count_dtype
        state["step"] = gradients.move(count, p.device, dtype)
    for name in kind.streams:
        keep_moment(state, name, p, moments)
    for name, dtype in kind.layout.extras.items():
        kept = state.get(name)
        state[name] = _first(name, state, p, dtype) if kept is None else like(kept, p, dtype)


def keep_moment(state: dict[str, Any], name: str, p: Tensor, dtype: torch.dtype) -> None:
    """Create a moment of ``p`` as zeros, or convert the existing one to ``dtype``, device and strides of ``p``."""
    if not gradients.is_dense(dtensor.local(p)):
        p = torch.empty_like(p)  # moments are dense
    moment, absmax = state.get(name), dynamic8.absmax_name(name)
    if moment is not None and moment.dtype == torch.uint8:
        if dtype == torch.uint8 and _laid_out_like(moment, p):
            state[name], state[absmax] = moment.to(p.device), state[absmax].to(p.device)
            return
        moment = dynamic8.decode(moment, state[absmax], name)
    if dtype == torch.uint8:  # blocks have the order of memory, so strides change first
        made = dynamic8.zeros(p, name) if moment is None else dynamic8.encode(like(moment, p), name)
        state[name], state[absmax] = made
    else:
        state[name] = torch.zeros_like(p, dtype=dtype) if moment is None else like(moment, p, dtype)
        state.pop(absmax, None)


def _first(name: str, state: dict[str, Any], p: Tensor, dtype: torch.dtype) -> Tensor:
    if name == "remainder":
        return torch.zeros_like(p, dtype=dtype)
    first = torch.empty_like(p, dtype=dtype)
    dtensor.local(first).copy_(dtensor.local(p) if name == "copy" else _weight(state, p))
    return first


def drop_weights(state: dict[str, Any], kind: Kind) -> None:
    """Drop a master or remainder that the options do not use, because no step updates it."""
    for name in {"master", "remainder"} - kind.layout.extras.keys():
        state.pop(name, None)


def _weight(state: dict[str, Any], p: Tensor) -> Tensor:
    """Return the local part of a weight: the master, the parameter with its remainder, or the parameter."""
    if "remainder" in state:
        high = dtensor.local(p).view(torch.int16).to(torch.int32) << 16
        weight = (high + dtensor.local(state["remainder"]).to(torch.int32)).view(torch.float32)
        # After a write of zero or infinity to the parameter, some remainders make a NaN.
        return torch.where(weight.isnan(), high.view(torch.float32), weight)
    return dtensor.local(state.get("master", p))


class Bucket:
    """Parameters of one :class:`Kind`, device and dtype with their state, as the native core keeps them.

    The owner of a bucket must detect that a parameter, its memory or an entry of its state was replaced. The native
    bucket is freed with this object, and must not be copied.

    Args:
        kind: properties that the parameters have in common.
        params: at least one parameter. No two of them share memory.
        positions: positions of the parameters in the optimizer, which are keys of the random bits.
        groups: positions of the parameters' groups, ascending. These groups differ in ``lr`` and ``weight_decay`` only.
        states: states of the parameters, which are completed here. Empty for a rule without state.
    """

    def __init__(
        self,
        kind: Kind,
        params: list[Tensor],
        positions: list[int],
        groups: list[int],
        states: list[dict[str, Any]],
    ) -> None:
        self.kind = kind
        self.groups = list(dict.fromkeys(groups))
        """Positions of the param groups."""
        self.device = params[0].device
        self.ranks = dtensor.ranks_of(params[0])
        self._params = params
        self._positions = positions
        self._complex = params[0].is_complex()
        self._distributed = any(map(dtensor.is_distributed, params))
        # Tensors that represent parameters in the core, because torch.utils.swap_tensors refuses a parameter that has
        # other references. The kernels need dense blocks of real numbers. So any other parameter is computed in a
        # separate block and written back.
        self._leaders = [p.detach() if self._is_walked(p) else torch.empty_like(p).copy_(p) for p in params]
        self._stand_ins = {i for i, p in enumerate(params) if not self._is_walked(p)}
        for state, leader in zip(states, self._leaders, strict=bool(states)):
            _begin(state, leader, kind)

        def entries(name: str) -> list[Tensor]:
            return [_real(state[name]) for state in states] if name in kind.layout.extras else []

        absmaxes = map(dynamic8.absmax_name, kind.streams if kind.layout.moments == torch.uint8 else ())

        leaders = list(map(_real, self._leaders))
        self._masters = entries("master")
        self._copies = entries("copy")
        self._versions: list[int] = []
        self.handle: int = _ops.make_bucket(
            kind.rule,
            self._masters or leaders,
            [_real(state[name]) for name in kind.streams for state in states],
            [state[name] for name in absmaxes for state in states],
            [state["step"] for state in states] if kind.count_dtype else [],
            entries("ema"),
            leaders if self._masters else entries("remainder") or self._copies,
            positions,
            list(map(self.groups.index, groups)),
        )
        weakref.finalize(self, _ops.free_bucket, self.handle).atexit = False
        self._which: list[int] = []  # indices of the parameters whose gradients are set; empty: all
        self.given = 0
        """Number of gradients that are set."""
        self.reads_copies = False
        """True if the kernels read copies of some gradients, so that writing the copies would not change ``p.grad``."""

    def _is_walked(self, p: Tensor) -> bool:
        return not self._complex and gradients.is_dense(dtensor.local(p))

    def seed(self, seed: int) -> int:
        """Return the seed of this process's part of the parameters, for the optimizer's ``seed``."""
        return seed if self.ranks is None else (seed + self.ranks.part * _SEED_STEP) % 2**63

    def set_grads(self, grads: list[Tensor | None]) -> int:
        """Pass the gradients of this bucket to the core, which keeps them until the step, and return a status.

        Args:
            grads: the gradients of all parameters of the optimizer.
        """
        everything = len(self._positions) == len(grads)
        mine = grads if everything else list(map(grads.__getitem__, self._positions))
        given: list[Any] = [grad for grad in mine if grad is not None]
        self._which = [] if len(given) == len(mine) else [i for i, grad in enumerate(mine) if grad is not None]
        if not given:
            self.forget_grads()
            return READY
        params = self._chosen(self._params)
        if self._distributed and not all(map(dtensor.alike, given, params)):
            return FOREIGN
        self.reads_copies = self._complex and any(map(Tensor.is_conj, given))
        if self._complex or self._distributed:
            given = list(map(_real, given))
        status = self._set(given)
        if status == FOREIGN and all(map(takes, params, self._chosen(mine))):
            if len({grad.dtype for grad in given}) > 1:
                return STALE
            self.reads_copies = True
            wide = compute_dtype(_real(self._leaders[0]).dtype)
            status = self._set([grad.to(wide) for grad in given])
        return status

    def _set(self, grads: list[Tensor]) -> int:
        status: int = _ops.set_grads(self.handle, grads, self._which)
        if status == COPIED:
            self.reads_copies, status = True, READY
        self.given = len(grads) if status == READY else 0
        return status

    def step(self, *numbers: Any) -> None:
        """Run one step with the gradients that are set, after ``refresh_masters``.

        Args:
            numbers: the operator's arguments after the bucket. The last one is ``unscale_grads``.
        """
        stand_ins = self._stand_ins.intersection(self._which) if self._which else self._stand_ins
        for i in stand_ins:
            self._leaders[i].copy_(self._params[i])
        _ops.step_bucket_(self.handle, *numbers)
        self.given = 0
        params = self._chosen(self._params)
        written = [p.grad for p in params if p.grad is not None] if numbers[-1] else []
        torch.autograd.graph.increment_version(params + self._chosen(self._copies) + written)
        for i in stand_ins:
            self._params[i].copy_(self._leaders[i])
        if self._masters:
            self._versions = self._seen()

    def forget_grads(self) -> None:
        """Release gradients that the core still holds, because no step has used them."""
        if self.given:
            _ops.set_grads(self.handle, [], [])
            self.given = 0

    def _chosen(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors of the parameters whose gradients are set."""
        return [tensors[i] for i in self._which] if tensors and self._which else tensors

    def _seen(self) -> list[int]:
        """Return versions that change with writes to parameters, or to parts of DTensors, as in a checkpoint load."""
        parts = list(map(dtensor.local, self._params)) if self._distributed else []
        return list(map(_versions, self._params + parts))

    def refresh_masters(self, in_captures: bool) -> None:
        """Copy parameters to their masters where they differ, after other code has written a parameter.

        ``model.load_state_dict`` is an example of such code.

        Args:
            in_captures: True to copy in every capture of a CUDA graph, so that each replay sees the writes since the
                last replay.
        """
        if self._masters and (self._seen() != self._versions or (in_captures and is_capturing())):
            for i in self._stand_ins:
                self._leaders[i].copy_(self._params[i])
            for master, leader in zip(self._masters, map(_real, self._leaders), strict=True):
                master.copy_(torch.where(master.to(leader.dtype) == leader, master, leader))


def is_capturing() -> bool:
    """Return True inside a capture of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def make_buckets(
    kind: Kind, params: list[Tensor], positions: list[int], groups: list[int], states: list[dict[str, Any]]
) -> list[Bucket]:
    """Make one bucket, or several that step in order, as in torch's loop, if parameters share memory."""
    if sharing(params) is None:
        return [Bucket(kind, params, positions, groups, states)]
    waves: list[list[int]] = []
    seen: Counter[int] = Counter()
    for i, p in enumerate(params):
        storage = dtensor.local(p).untyped_storage().data_ptr()
        if seen[storage] == len(waves):
            waves.append([])
        waves[seen[storage]].append(i)
        seen[storage] += 1
    parts: Any = (params, positions, groups, states)
    return [Bucket(kind, *([part[i] for i in wave if part] for part in parts)) for wave in waves]


def sharing(params: list[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two parameters whose spans of memory overlap; None if there are none."""
    spans = []
    for i, p in enumerate(map(dtensor.local, params)):
        if p.numel():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), i))
    spans.sort()
    return next(((i, j) for (_, end, i), (begin, _, j) in itertools.pairwise(spans) if begin < end), None)
