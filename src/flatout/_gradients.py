"""Gradients of any mix of devices and dtypes: checked, measured and scaled, natively where possible.

Elsewhere (a device without kernels, sparse or complex gradients, tensor subclasses such as DTensor),
torch's own operations do the same, so callers need not care.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout import _native

_ops = torch.ops.flatout
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Tensor types the native operators take; any other (DTensor) has its own idea of what its memory is."""


@dataclass(frozen=True)
class GradCheck:
    """One look at all gradients; 0-dim tensors on the first gradient's device, nothing synchronised."""

    found_inf: Tensor
    """float32: 1 when a gradient is inf or NaN, else 0."""
    grad_norm: Tensor
    """2-norm of the unscaled gradients; float32, or float64 for float64 gradients."""
    grad_factor: Tensor
    """``inv_scale`` x clip coefficient: what each gradient is to be multiplied with."""


def has_kernels(device: torch.device) -> bool:
    """True when the native operators run on ``device``."""
    return device.type == "cpu" or (device.type == "cuda" and _native.has_cuda_kernels(device.index))


def is_native(tensor: Tensor) -> bool:
    """True when the native operators take ``tensor``: device, dtype, a plain strided tensor."""
    return (
        tensor.dtype in _DTYPES
        and tensor.layout == torch.strided
        and type(tensor) in PLAIN
        and has_kernels(tensor.device)
    )


def is_dense(tensor: Tensor) -> bool:
    """True when the elements fill a block of memory in some order, as the flat kernels need."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_about_layout(error: RuntimeError) -> bool:
    """True when a native operator refused a tensor's strides.

    Operators look at every layout anyway, before they change anything, and almost all are right: so callers
    try, and look themselves only when one was refused. Asking first costs more than a step over small
    tensors.
    """
    return "must be dense" in str(error) or "the shape and strides of" in str(error)


def _all_native(group: Sequence[Tensor]) -> bool:
    """``all(map(is_native, group))`` for tensors of one device and dtype."""
    return (
        is_native(group[0]) and PLAIN.issuperset(map(type, group)) and not any(g.layout != torch.strided for g in group)
    )


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, as dense storage: of a sparse one, its values (coalesced first)."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            parameter.grad = grad = grad.coalesce()
            grad = grad._values()
        found.append(grad)
    return found


def _groups(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor.to(device, dtype)`` that waits only where it must: a CPU copy is read without asking the stream."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def on_device(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    """``value`` as a 0-dim tensor on ``device``; float32 unless it is a float64 tensor already."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        dtype = value.dtype if value.dtype == torch.float64 else torch.float32
        return move(value.detach(), device, dtype)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if all(g.dtype in (torch.float64, torch.complex128) for g in grads) else torch.float32


def _look(grads: list[Tensor], inv_scale: Tensor | None, max_norm: float | None) -> GradCheck:
    """One group: the native operator, or torch's operations with the same meaning."""
    if _all_native(grads):
        try:
            return GradCheck(*_ops.unscale_and_check(grads, inv_scale, max_norm))
        except RuntimeError as error:
            if not is_about_layout(error):
                raise
        dense = [g if is_dense(g) else g.contiguous() for g in grads]
        return GradCheck(*_ops.unscale_and_check(dense, inv_scale, max_norm))
    dtype = _norm_dtype(grads)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=_wide(grads[0], dtype))))
    norm = norm.to(dtype) * (1 if inv_scale is None else inv_scale)
    finite = torch.stack([g.isfinite().all() for g in grads]).all()
    return _conclude((~finite).float(), norm, inv_scale, max_norm)


def _wide(grad: Tensor, dtype: torch.dtype) -> torch.dtype:
    return (torch.complex128 if dtype == torch.float64 else torch.complex64) if grad.is_complex() else dtype


def _conclude(found_inf: Tensor, norm: Tensor, inv_scale: Tensor | None, max_norm: float | None) -> GradCheck:
    factor = torch.ones_like(norm) if inv_scale is None else inv_scale.to(norm.dtype)
    if max_norm is not None:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return GradCheck(found_inf, norm, factor)


@torch.no_grad()
def check(grads: Sequence[Tensor], inv_scale: Tensor | float | None = None, max_norm: float | None = None) -> GradCheck:
    """Reads all gradients once; rewrites none.

    Args:
        grads: at least one gradient; any devices and dtypes.
        inv_scale: what the gradients are to be multiplied with before anything else (a float, or 0-dim).
        max_norm: clip the norm over *all* gradients to this.

    Raises:
        ValueError: ``max_norm`` is negative or NaN.
    """
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_grad_norm must be >= 0, got {max_norm}")
    groups = _groups(grads)
    device = grads[0].device
    if len(groups) == 1:
        return _look(groups[0], on_device(inv_scale, device), max_norm)
    looks = [_look(group, on_device(inv_scale, group[0].device), None) for group in groups]
    norms = torch.stack([move(look.grad_norm, device, torch.float64) for look in looks])
    found_inf = torch.stack([move(look.found_inf, device) for look in looks]).amax()
    norm = torch.linalg.vector_norm(norms).to(_norm_dtype(grads))
    return _conclude(found_inf, norm, on_device(inv_scale, device), max_norm)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Multiplies all gradients with ``inv_scale`` in place: ``(found_inf, grad_norm)`` from the same pass."""
    device = grads[0].device
    found: list[Tensor] = []
    norms: list[Tensor] = []
    for group in _groups(grads):
        inverse = on_device(inv_scale, group[0].device)
        if _all_native(group) and all(map(is_dense, group)):
            found_inf, norm = _ops.unscale_and_check_(group, inverse)
            torch.autograd.graph.increment_version(group)
        else:
            look = _look(group, inverse, None)
            found_inf, norm = look.found_inf, look.grad_norm
            if inverse is not None:
                torch._foreach_mul_(group, inverse)
        found.append(move(found_inf, device))
        norms.append(move(norm, device))
    if len(found) == 1:
        return found[0], norms[0]
    total = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
    return torch.stack(found).amax(), total.to(_norm_dtype(grads))


@torch.no_grad()
def scale_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients with ``factor`` in place; where the factor is 1 no memory is touched."""
    for group in _groups(grads):
        local = on_device(factor, group[0].device)
        assert local is not None
        if _all_native(group) and all(map(is_dense, group)):
            _ops.scale_(group, local)
            torch.autograd.graph.increment_version(group)
        else:
            torch._foreach_mul_(group, local)
