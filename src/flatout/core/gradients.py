"""Checks, norms and scaling of gradients of any device and dtype, by native operators if possible.

Devices without kernels, sparse or complex gradients, and tensor subclasses use torch's operations with the same
results. For a DTensor the local part is checked, and then all ranks agree on the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout import native
from flatout.core import dtensor
from flatout.core.dtensor import PLAIN, Ranks
from flatout.core.torch_state import uncompiled

_ops = torch.ops.flatout
_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_NORM_TYPES = (1.0, 2.0, math.inf)
_PLAIN: tuple[tuple[Callable[[Tensor], Any], frozenset[Any]], ...] = (
    (type, PLAIN),
    (operator.attrgetter("dtype"), _DTYPES),
    (operator.attrgetter("layout"), frozenset((torch.strided,))),
    (Tensor.is_neg, frozenset((False,))),  # else the memory holds the negated values
)


def trained_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules that may get gradients, each once."""
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())


class GradCheck(NamedTuple):
    """Result of one check of all gradients: 0-dim tensors on the first gradient's device, not synchronized."""

    found_inf: Tensor
    """1 if a gradient is inf or NaN, else 0, as float32."""
    grad_norm: Tensor
    """Norm of the unscaled gradients, as float64 if all gradients are float64 or complex128, else as float32."""
    grad_factor: Tensor
    """``inv_scale`` x clip coefficient: the factor for each gradient."""
    skipped: Tensor | None = None
    """``found_inf`` as bool. None if the check does not also compute the next loss scale."""


def has_kernels(device: torch.device) -> bool:
    """Return True if the native operators run on ``device``."""
    return device.type == "cpu" or (device.type == "cuda" and native.has_cuda_kernels(device.index))


def is_native(tensor: Tensor) -> bool:
    """Return True if the native operators accept the device, dtype, type and layout of ``tensor``."""
    return _all_plain((tensor,)) and has_kernels(tensor.device)


def _all_plain(tensors: Sequence[Tensor]) -> bool:
    return all(allowed.issuperset(map(what, tensors)) for what, allowed in _PLAIN)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill a block of memory in some order, as the flat kernels need."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dense(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, or None. A sparse gradient is coalesced, and its values are returned."""
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return grad
    parameter.grad = grad = grad.coalesce()
    return grad._values()


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the :func:`dense` storage of each gradient that is not None."""
    return [grad for grad in map(dense, parameters) if grad is not None]


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return :func:`gradients_of` all parameters of an optimizer."""
    return gradients_of(p for group in optimizer.param_groups for p in group["params"])


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a plain complex tensor as real numbers. Other tensors are returned unchanged."""
    if not tensor.is_complex() or type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_conj():
        return tensor
    return torch.view_as_real(tensor)


def _by_place(
    grads: Sequence[Tensor], norm_type: float = 2.0
) -> dict[tuple[torch.device, Ranks | None], tuple[list[Tensor], list[Tensor]]]:
    """Group gradients by device and ranks, each group split into gradients for native operators and others.

    A strided complex gradient counts as its real view, except for norms that differ between the two. A DTensor counts
    as its local part, except if the norms of its parts do not add up to its norm.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    groups: dict[tuple[torch.device, Ranks | None], list[Tensor]] = {}
    for device, group in by_device.items():
        if PLAIN.issuperset(map(type, group)) or norm_type not in _NORM_TYPES:
            groups[device, None] = group
            continue
        for grad in group:
            settled = dtensor.is_settled(grad)
            place = device, dtensor.ranks_of(grad) if settled else None
            groups.setdefault(place, []).append(dtensor.local(grad) if settled else grad)
    return {place: _split(group, place[0], norm_type) for place, group in groups.items()}


def _split(grads: list[Tensor], device: torch.device, norm_type: float) -> tuple[list[Tensor], list[Tensor]]:
    if norm_type not in _NORM_TYPES or not has_kernels(device):
        return [], grads
    if norm_type == 2 and any(map(Tensor.is_complex, grads)):
        grads = list(map(as_real, grads))
    if _all_plain(grads):
        return grads, []
    return [grad for grad in grads if _all_plain((grad,))], [grad for grad in grads if not _all_plain((grad,))]


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor.to(device, dtype)`` without waiting, except for copies to the CPU."""
    if tensor.device == device and dtype in (None, tensor.dtype):  # as in most steps
        return tensor
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def on_device(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """Return ``value`` as a 0-dim tensor on ``device``. float64 tensors stay float64. All else becomes float32."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        dtype = value.dtype if value.dtype == torch.float64 else torch.float32
        return move(value.detach() if value.requires_grad else value, device, dtype)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if all(g.dtype in (torch.float64, torch.complex128) for g in grads) else torch.float32


def _on_dense(native_op: Callable[..., Any], grads: list[Tensor], *arguments: Any) -> Any:
    """Call an operator that only reads gradients. Gradients with gaps in memory are copied first."""
    try:
        return native_op(grads, *arguments)
    except RuntimeError as error:
        if not _is_about_memory(error):
            raise
    return native_op([grad if is_dense(grad) else grad.contiguous() for grad in grads], *arguments)


def _is_about_memory(error: RuntimeError) -> bool:
    """Return True if a native operator rejected the memory layout of tensors, before it changed anything.

    Operators always check the layout, and almost all layouts are valid. So callers try the operator first, and check
    the layout only after a rejection. A check in advance costs more than a step over small tensors.
    """
    return "must be dense" in str(error) or "share memory" in str(error)


def _found_inf(grads: Sequence[Tensor]) -> Tensor:
    return 1.0 - torch.stack([dtensor.whole(grad.isfinite().all()) for grad in grads]).all().float()


def _norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    norms = [_norm_of_one(grad, norm_type).to(_norm_dtype(grads)) for grad in grads if grad.numel()]
    if not norms:
        return torch.zeros((), dtype=_norm_dtype(grads), device=grads[0].device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _norm_of_one(grad: Tensor, norm_type: float) -> Tensor:
    return dtensor.whole(torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad)))


@uncompiled
@torch.no_grad()
def norms(grads: Sequence[Tensor | None], inv_scale: Tensor | float | None, norm_type: float) -> Tensor:
    """Return the norm of each gradient times ``inv_scale``, on the device of the first gradient. None has norm 0.

    Args:
        grads: gradients of any devices and dtypes, not all None. A sparse gradient is passed as its values.
        inv_scale: factor of the gradients (a float, or 0-dim).
        norm_type: order of the norms. 1, 2 and inf are native. torch computes other orders.
    """
    given = [grad for grad in grads if grad is not None]
    device = given[0].device
    inverse = on_device(inv_scale, device)
    has_operator = norm_type in _NORM_TYPES and has_kernels(device)
    if has_operator and {grad.device for grad in given} == {device} and _all_plain(given):
        nothing = given[0].new_empty(0)
        listed = [nothing if grad is None else grad for grad in grads]
        result: Tensor = _on_dense(_ops.grad_norms, listed, inverse, norm_type)
        return result
    found = torch.zeros(len(grads), dtype=_norm_dtype(given), device=device)
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            found[i] = move(_norm_of_one(grad, norm_type), device)
    return found if inverse is None else found * inverse.abs()


def _wide(grad: Tensor) -> torch.dtype:
    """Return the dtype for torch's norm, which is float32 or wider."""
    return torch.promote_types(grad.dtype, torch.float32)


def together(looks: Sequence[tuple[Tensor, Tensor]], norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
    """Combine pairs of ``(found_inf, grad_norm)`` into one pair, on the first one's device."""
    if len(looks) == 1:
        return looks[0]
    device = looks[0][0].device
    dtype = _norm_dtype([norm for _, norm in looks])
    found_inf = torch.stack([move(found, device) for found, _ in looks]).amax()
    norms = torch.stack([move(norm, device, dtype) for _, norm in looks])
    # In float64 the square of a float32 norm cannot overflow.
    return found_inf, torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64).to(dtype)


def agreed(look: tuple[Tensor, Tensor], ranks: Ranks | None, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return ``(found_inf, grad_norm)`` over all ``ranks``, from the local pair."""
    return look if ranks is None else ranks.agree(*look, norm_type)


@uncompiled
@torch.no_grad()
def check(
    grads: Sequence[Tensor],
    inv_scale: Tensor | float | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> GradCheck:
    """Read all gradients once, without changing them.

    Args:
        grads: at least one gradient, of any devices and dtypes.
        inv_scale: first factor of the gradients (a float, or 0-dim).
        max_norm: limit of the norm over *all* gradients, for clipping.
        norm_type: order of the norm. 1, 2 and inf are native. torch computes other orders.

    Raises:
        ValueError: ``max_norm`` is negative or NaN.
    """
    check_max_norm(max_norm)
    places = _by_place(grads, norm_type)
    (device, ranks), (ours, others) = next(iter(places.items()))
    if len(places) == 1 and ranks is None and not others:
        return GradCheck(*_on_dense(_ops.unscale_and_check, ours, on_device(inv_scale, device), max_norm, norm_type))
    looks = []
    for (device, ranks), (ours, others) in places.items():
        inverse = on_device(inv_scale, device)
        here = []
        if ours:
            here.append(_on_dense(_ops.unscale_and_check, ours, inverse, None, norm_type)[:2])
        if others:
            norm = _norm(others, norm_type)
            here.append((_found_inf(others), norm if inverse is None else norm * inverse))
        looks.append(agreed(together(here, norm_type), ranks, norm_type))
    return conclude(looks, inv_scale, max_norm, norm_type)


def check_max_norm(max_norm: float | None) -> None:
    """Reject a negative norm and NaN."""
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_grad_norm must be >= 0, got {max_norm}")


def conclude(
    looks: Sequence[tuple[Tensor, Tensor]],
    inv_scale: Tensor | float | None,
    max_norm: float | None,
    norm_type: float = 2.0,
) -> GradCheck:
    """Combine checks of parts of the gradients, as ``(found_inf, grad_norm)``, into one on the first one's device."""
    found_inf, norm = together(looks, norm_type)
    inverse = on_device(inv_scale, norm.device)
    factor = torch.ones_like(norm) if inverse is None else inverse.to(norm.dtype)
    if max_norm is not None:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return GradCheck(found_inf, norm, factor)


@uncompiled
@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor | float | None) -> list[tuple[Tensor, Tensor]]:
    """Multiply all gradients with ``inv_scale`` in place.

    Returns:
        Pairs of ``(found_inf, grad_norm)`` over all ranks, from the same pass, one or more per device.
            :func:`together` combines them.

    Raises:
        RuntimeError: a gradient is expanded. Nothing has changed.
    """

    def by_torch(others: list[Tensor], inverse: Tensor | None) -> tuple[Tensor, Tensor]:
        found_inf = _found_inf(others)
        if inverse is not None:
            _multiply(others, inverse)
        return found_inf, _norm(others, 2.0)

    return [agreed(look, ranks) for ranks, look in _rewrite(grads, inv_scale, _ops.unscale_and_check_, by_torch)]


@uncompiled
@torch.no_grad()
def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients with ``factor`` in place. A factor of 1 touches no memory.

    Raises:
        RuntimeError: a gradient is expanded. Nothing has changed.
    """
    _rewrite(grads, factor, _ops.scale_, _multiply)


def _rewrite(
    grads: Sequence[Tensor],
    factor: Tensor | float | None,
    native_op: Callable[[list[Tensor], Any], Any],
    by_torch: Callable[[list[Tensor], Any], Any],
) -> list[tuple[Ranks | None, Any]]:
    """Rewrite gradients in place, with ``native_op`` if possible, else with the equivalent ``by_torch``.

    Returns:
        The results of both, each with the ranks that must agree on it.
    """
    places = _by_place(grads)
    if len(places) > 1 or any(others for _, others in places.values()):
        _refuse_expanded(grads)  # native operators check only their own gradients before they write
    results: list[tuple[Ranks | None, Any]] = []
    for (device, ranks), (ours, others) in places.items():
        here = on_device(factor, device)
        if ours:
            try:
                results.append((ranks, native_op(ours, here)))
            except RuntimeError as error:
                if not _is_about_memory(error):
                    raise
                _refuse_expanded(ours)
                others = ours + others
        if others:
            results.append((ranks, by_torch(others, here)))
    torch.autograd.graph.increment_version(list(grads))
    return results


def _refuse_expanded(grads: Sequence[Tensor]) -> None:
    for i, grad in enumerate(map(dtensor.local, grads)):
        if grad.numel() and any(n > 1 and s == 0 for n, s in zip(grad.shape, grad.stride(), strict=True)):
            raise RuntimeError(f"gradient {i} is expanded, several elements in one place: clone() it to rewrite it")


def _multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors one by one. As in torch, shared memory is multiplied once per tensor in the list."""
    for grad in grads:
        grad.mul_(factor)
