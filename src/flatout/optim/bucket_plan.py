"""All buckets of an optimizer, and the check that they still fit the optimizer."""

from __future__ import annotations

from collections import Counter
from itertools import chain, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.core import dtensor
from flatout.native import _host
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

MAX_GROUPS = 64
"""Largest number of param groups in a bucket, as in csrc/optim/rules.h."""


class Bucketed(Protocol):
    """Optimizer whose parameters are divided into buckets: ``NativeStep``."""

    param_groups: list[dict[str, Any]]
    state: Any

    def _kind(self, group: dict[str, Any], dtype: torch.dtype, in_8_bits: bool) -> Kind: ...

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]: ...

    def _counts(self, group: dict[str, Any]) -> bool: ...

    def _options(self, group: dict[str, Any]) -> list[float | Tensor]: ...


class BucketPlan:
    """Buckets of an optimizer, which are made again only if the optimizer has changed.

    Each step first compares everything that may have changed. These are the parameters, their memory, dtypes and
    strides, every value in the state, and the options that determine the state. The native core itself detects that the
    memory of the state has moved. Groups that differ in ``lr`` and ``weight_decay`` only share a bucket.

    A parameter is in a bucket, and has state, from its first gradient on.
    """

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._members: set[int] = set()  # positions of the parameters in buckets
        self._others: list[int] = []  # all other positions
        self._signature = b""
        self._signed: list[Any] = []  # keeps the objects of the signature alive, whose identities count
        self._forms: list[Any] = []
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
        known = self._sign(optimizer, params) == self._signature
        if not known:
            self._distributed = any(map(dtensor.is_distributed, params))
        if self._distributed:
            # This waits for all ranks. So it comes before code that may take another path on another rank.
            with torch.no_grad():
                given, grads = grads, [g if g is None else self._here(g, p) for g, p in zip(grads, params, strict=True)]
            self._redistributed = any(map(is_not, grads, given))
        status = STALE
        try:
            if known and _forms(optimizer) == self._forms:
                status = self._set_grads(grads)
            else:
                self._members = set()
            if status == STALE:
                # State that is created in inference mode cannot be written outside of this mode.
                with torch.inference_mode(False), torch.no_grad():
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

    def _sign(self, optimizer: Bucketed, params: list[Tensor]) -> bytes:
        parts = list(map(dtensor.local, params)) if self._distributed else params
        return _host.optimizer_signature(params, parts, optimizer.state, Tensor)

    @staticmethod
    def _here(grad: Tensor, parameter: Tensor) -> Tensor | None:
        return None if dtensor.is_elsewhere(parameter) else dtensor.placed_like(grad, parameter)

    def _set_grads(self, grads: list[Tensor | None]) -> int:
        for bucket in self._buckets:
            status = bucket.set_grads(grads)
            if status != READY:
                return status
        return STALE if any(grads[i] is not None for i in self._others) else READY

    def _make(self, optimizer: Bucketed, params: list[Tensor], grads: list[Tensor | None]) -> int:
        self._buckets, self._signature = [], b""  # invalid until this method is done
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
        forms = _forms(optimizer)
        groups = list(chain.from_iterable(repeat(i, length) for i, (length, *_) in enumerate(forms)))
        if sharing([params[i] for i in sorted(members)]) is not None:
            # The order of the groups then counts. So each group has its own buckets, as in torch's loop.
            forms = [(*form, i) for i, form in enumerate(forms)]
        kinds = self._kinds(optimizer, params, members, grads, groups, forms)
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
            made += make_buckets(kind, own, positions, [groups[i] for i in positions], states)
            for p in optimizer.state.keys() & own:
                drop_weights(optimizer.state[p], kind)
        self._buckets, self._members = made, members
        self._others = [i for i in range(len(params)) if i not in members]
        self._signed = [*params, *_values(optimizer)]
        self._signature = self._sign(optimizer, params)
        self._forms = _forms(optimizer)
        return self._set_grads(grads)

    @staticmethod
    def _kinds(
        optimizer: Bucketed,
        params: list[Tensor],
        members: set[int],
        grads: list[Tensor | None],
        groups: list[int],
        forms: list[Any],
    ) -> list[tuple[Kind, list[int]]]:
        """Group the positions of the members by form, kind, device, ranks and dtype of the gradient."""
        found: dict[Any, tuple[Kind, list[int]]] = {}
        for position in sorted(members):
            p, grad, index = params[position], grads[position], groups[position]
            group = optimizer.param_groups[index]
            in_8_bits = options.in_8_bits(group, p)
            grad_dtype = p.dtype if grad is None else grad.dtype
            form = index // MAX_GROUPS, *forms[index][1:], options.count_dtype(group)
            key = form, p.dtype, in_8_bits, p.device, dtensor.ranks_of(p), grad_dtype
            if key not in found:
                found[key] = optimizer._kind(group, p.dtype, in_8_bits), []
            found[key][1].append(position)
        return list(found.values())


def _begins_twice(optimizer: Bucketed, kind: Kind, params: list[Tensor]) -> bool:
    """Return True if SGD is about to create the momentum buffer of a parameter that is listed twice.

    torch's loop sets the buffer to the gradient at each mention. Native steps would add the gradient to the same zeros
    twice.
    """
    if kind.rule != "sgd" or not kind.streams:
        return False
    twice = [p for p, mentions in Counter(params).items() if mentions > 1]
    return any(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in twice)


def _forms(optimizer: Bucketed) -> list[Any]:
    """Return, for each group, all values that determine its buckets and that may change between steps.

    The last value is the position of the first group with the same numbers. So a number may change in all groups.
    """
    first: dict[Any, int] = {}
    alone = len(optimizer.param_groups) == 1
    return [
        (
            len(group["params"]),
            optimizer._streams(group),
            optimizer._counts(group),
            options.form(group),
            0 if alone else first.setdefault(_common_numbers(optimizer, group), i),
        )
        for i, group in enumerate(optimizer.param_groups)
    ]


def _common_numbers(optimizer: Bucketed, group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the numbers that all groups of a bucket have in common."""
    return (*map(float, optimizer._options(group)), group["maximize"], group.get("ema_decay"), group.get("seed"))


def _values(optimizer: Bucketed) -> list[Any]:
    return [value for entry in optimizer.state.values() if isinstance(entry, dict) for value in entry.values()]
