"""All buckets of an optimizer, and the check that they still fit the optimizer."""

from __future__ import annotations

from collections import Counter
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.core import dtensor
from flatout.optim import options
from flatout.optim.bucket import (
    FOREIGN,
    READY,
    STALE,
    Bucket,
    Kind,
    drop_weights,
    make_buckets,
    overlaps_itself,
    sharing,
    takes,
)

_grads_are_apart = torch.ops.flatout.grads_are_apart
_params = itemgetter("params")
_grad = attrgetter("grad")
_dtype = attrgetter("dtype")


class Bucketed(Protocol):
    """Optimizer whose parameters are divided into buckets: ``NativeStep``."""

    param_groups: list[dict[str, Any]]
    state: Any

    def _kind(self, group: int, dtype: torch.dtype, in_8_bits: bool) -> Kind: ...

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]: ...

    def _counts(self, group: dict[str, Any]) -> bool: ...


class BucketPlan:
    """Buckets of an optimizer, which are made again only if the optimizer has changed.

    Each step first compares everything that may have changed, at C speed. These are the parameters, the addresses of
    their memory, every value in the state, and the options that determine the state. The native core itself detects
    that the memory of the state has moved.

    A parameter is in a bucket, and has state, from its first gradient on.
    """

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._members: set[int] = set()  # positions of the parameters in buckets
        self._params: list[Tensor] = []
        self._stepped: list[Tensor] = []  # the members
        self._places: list[list[Any]] = []
        self._forms: list[Any] = []
        self._state: list[Any] = []
        self._distributed = False  # there are DTensors
        self._redistributed = False  # some gradients of DTensors were redistributed into new tensors

    def ready(self, optimizer: Bucketed) -> list[Bucket] | None:
        """Return the buckets with work to do, with their gradients set; None if the kernels do not accept a tensor.

        No parameter is changed. If the result is None, no state is changed.

        Raises:
            ValueError: the options do not fit a parameter, or a parameter overlaps itself. Or two parameters with
                master weights share memory.
        """
        params = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        grads = list(map(_grad, params))
        known = _same(params, self._params)
        if not known:
            self._distributed = any(map(dtensor.is_distributed, params))
        if self._distributed:
            # This waits for all ranks. So it comes before code that may take another path on another rank.
            given, grads = grads, [g if g is None else self._here(g, p) for g, p in zip(grads, params, strict=True)]
            self._redistributed = any(map(is_not, grads, given))
        status = STALE
        try:
            if known and self._holds(optimizer):
                status = self._set_grads(grads)
            else:
                self._members = set()
            if status == STALE:
                status = self._make(optimizer, params, grads)
        finally:
            if status != READY:
                for bucket in self._buckets:
                    bucket.forget_grads()
        return [bucket for bucket in self._buckets if bucket.given] if status == READY else None

    def can_unscale(self) -> bool:
        """Return True if the step may write the gradients, which are the ``p.grad`` tensors and share no memory."""
        given = [bucket for bucket in self._buckets if bucket.given]
        return (
            not self._redistributed
            and not any(bucket.reads_copies for bucket in given)
            and _grads_are_apart([bucket.handle for bucket in given])
        )

    def _holds(self, optimizer: Bucketed) -> bool:
        return (
            self._where() == self._places
            and _forms(optimizer) == self._forms
            and _same(_values(optimizer), self._state)
        )

    @staticmethod
    def _here(grad: Tensor, parameter: Tensor) -> Tensor | None:
        return None if dtensor.is_elsewhere(parameter) else dtensor.placed_like(grad, parameter)

    def _where(self) -> list[list[Any]]:
        return _places(list(map(dtensor.local, self._stepped)) if self._distributed else self._stepped)

    def _set_grads(self, grads: list[Tensor | None]) -> int:
        newcomers = sum(map(is_not, grads, repeat(None)))
        for bucket in self._buckets:
            status = bucket.set_grads(grads)
            if status != READY:
                return status
            newcomers -= bucket.given
        return READY if newcomers == 0 else STALE

    def _make(self, optimizer: Bucketed, params: list[Tensor], grads: list[Tensor | None]) -> int:
        self._buckets, self._params = [], []  # invalid until this method is done
        members = self._members | {i for i, grad in enumerate(grads) if grad is not None}
        # All parameters are checked before any state is created.
        if not all(takes(params[i], grads[i]) for i in members):
            return FOREIGN
        for i in members:
            if overlaps_itself(dtensor.local(params[i])):
                raise ValueError(
                    f"parameter {i} of shape {tuple(params[i].shape)} must not overlap itself (strides "
                    f"{params[i].stride()}, as expand() makes them): use contiguous()"
                )
        kinds = self._kinds(optimizer, params, members)
        if any(_begins_twice(optimizer, kind, [params[i] for i in positions]) for kind, positions in kinds):
            return FOREIGN
        for kind, positions in kinds:
            shared = sharing([params[i] for i in positions]) if kind.layout.has_master else None
            if shared is not None:
                i, j = sorted(positions[k] for k in shared)
                raise ValueError(
                    f"parameters {i} and {j} with master_weights must not share memory: it cannot follow two masters"
                )
        made: list[Bucket] = []
        for kind, positions in kinds:
            own = [params[i] for i in positions]
            states = [optimizer.state[p] for p in own] if kind.has_state else []
            made += make_buckets(kind, own, positions, states)
            for p in optimizer.state.keys() & own:
                drop_weights(optimizer.state[p], kind)
        self._buckets, self._params, self._members = made, params, members
        self._stepped = [params[i] for i in members]
        self._places = self._where()
        self._forms = _forms(optimizer)
        self._state = _values(optimizer)
        return self._set_grads(grads)

    def _kinds(self, optimizer: Bucketed, params: list[Tensor], members: set[int]) -> list[tuple[Kind, list[int]]]:
        """Group the positions of the members by kind, device and ranks."""
        found: dict[tuple[Any, ...], list[int]] = {}
        groups = chain.from_iterable(repeat(i, len(g["params"])) for i, g in enumerate(optimizer.param_groups))
        for position, (group, p) in enumerate(zip(groups, params, strict=True)):
            if position in members:
                in_8_bits = options.in_8_bits(optimizer.param_groups[group], p)
                found.setdefault((group, p.dtype, in_8_bits, p.device, dtensor.ranks_of(p)), []).append(position)
        return [
            (optimizer._kind(group, dtype, in_8_bits), positions)
            for (group, dtype, in_8_bits, *_), positions in found.items()
        ]


def _begins_twice(optimizer: Bucketed, kind: Kind, params: list[Tensor]) -> bool:
    """Return True if SGD is about to create the momentum buffer of a parameter that is listed twice.

    torch's loop sets the buffer to the gradient at each mention. Native steps would add the gradient to the same zeros
    twice.
    """
    if kind.rule != "sgd" or not kind.streams:
        return False
    twice = [p for p, mentions in Counter(params).items() if mentions > 1]
    return any(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in twice)


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _places(params: list[Tensor]) -> list[list[Any]]:
    """Return the addresses, strides and dtypes of parameters. The core compares shapes with those of gradients."""
    return [list(map(look, params)) for look in (torch.Tensor.data_ptr, torch.Tensor.stride, _dtype)]


def _forms(optimizer: Bucketed) -> list[Any]:
    """Return, for each group, all values that determine its buckets and that may change between steps."""
    return [
        (len(group["params"]), optimizer._streams(group), optimizer._counts(group), options.form(group))
        for group in optimizer.param_groups
    ]


def _values(optimizer: Bucketed) -> list[Any]:
    return [value for entry in optimizer.state.values() if isinstance(entry, dict) for value in entry.values()]
