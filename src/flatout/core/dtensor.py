"""Local parts of DTensors (FSDP2, tensor parallel), and agreement of all ranks on results.

``torch.distributed.tensor`` is imported only when a DTensor exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Tensor types that the native operators take. Other types may define their own memory."""


def is_distributed(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor. Other tensors are returned unchanged."""
    # Not to_local(): each call makes a view, or a node for autograd.
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def is_settled(tensor: Tensor) -> bool:
    """Return False for a DTensor with a sum over ranks still pending (Partial)."""
    return not is_distributed(tensor) or not any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def is_elsewhere(tensor: Tensor) -> bool:
    """Return True for a DTensor on a mesh without this process, so that no part of it is local."""
    return is_distributed(tensor) and tensor.device_mesh.get_coordinate() is None  # type: ignore[attr-defined]


def alike(a: Tensor, b: Tensor) -> bool:
    """Return True if both tensors have the same mesh and placements, or if both are plain tensors."""
    mesh = getattr(a, "device_mesh", None)
    return mesh == getattr(b, "device_mesh", None) and (mesh is None or a.placements == b.placements)  # type: ignore[attr-defined]


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return ``tensor`` with the placements of its parameter. A tensor on another mesh is returned unchanged.

    With sequence parallelism, gradients of replicated parameters are pending sums (Partial). State may have been saved
    with other placements.
    """
    if not is_distributed(parameter) or not is_settled(parameter) or alike(tensor, parameter):
        return tensor
    if getattr(tensor, "device_mesh", None) != parameter.device_mesh:  # type: ignore[attr-defined]
        return tensor
    return tensor.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def spread_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return state with the placements of its parameter. A plain tensor is the whole state, the same on all ranks.

    Raises:
        ValueError: the state is a DTensor on another mesh.
    """
    tensor = placed_like(tensor, parameter)
    if alike(tensor, parameter):
        return tensor
    if is_distributed(tensor):
        raise ValueError(f"state must lie on the ranks of its parameter, got it on {tensor.device_mesh}")  # type: ignore[attr-defined]
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor.detach().to(parameter.device), mesh, placements, src_data_rank=None)


@dataclass(frozen=True)
class Ranks:
    """Ranks that together hold DTensors, each part once. Replicas are on other ranks."""

    mesh: DeviceMesh
    dims: tuple[int, ...]
    """Mesh dimensions that shard the tensors. The tensors are replicated over all others."""

    @property
    def part(self) -> int:
        """Number of the part on this process. Replicas have the same number."""
        number = 0
        for dim in self.dims:
            number = number * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return number

    def agree(self, found_inf: Tensor, norm: Tensor, norm_type: float) -> tuple[Tensor, Tensor]:
        """Return ``(found_inf, grad_norm)`` over all parts, by one all-reduce of two numbers per dimension.

        Args:
            found_inf: found in the local parts, 0-dim.
            norm: norm of the local parts, 0-dim.
            norm_type: 1, 2 or inf.
        """
        order = 1.0 if norm_type == math.inf else norm_type
        # In float64 the square of a float32 number cannot overflow. A maximum over ranks loses NaN, so 2 marks NaN.
        found = torch.where(norm.isnan(), 2.0, found_inf.double())
        numbers = torch.stack([found, norm.double() ** order])
        for dim in self.dims:
            reduction = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
            dist.all_reduce(numbers, reduction, self.mesh.get_group(dim))
        together = numbers[1] ** (1 / order)
        if norm_type == math.inf:
            together = torch.where(numbers[0] == 2, math.nan, together)
        return (numbers[0] > 0).to(found_inf.dtype), together.to(norm.dtype)


def ranks_of(tensor: Tensor) -> Ranks | None:
    """Return the ranks that must agree on results for ``tensor``, or None if they need not agree.

    Ranks need not agree if the tensor is not a DTensor, is replicated in all dimensions, or has no part here.
    """
    if not is_distributed(tensor) or is_elsewhere(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return Ranks(mesh, dims) if dims else None


def whole(scalar: Any) -> Tensor:
    """Return a DTensor's scalar as a plain tensor with the result over all ranks."""
    return scalar.full_tensor() if is_distributed(scalar) else scalar


def replicated(scalar: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return a scalar result for ``tensors`` as torch would, which is a DTensor if all are DTensors of one mesh."""
    meshes = {getattr(tensor, "device_mesh", None) for tensor in tensors} if is_distributed(tensors[0]) else set()
    if len(meshes) != 1:
        return scalar
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = meshes.pop()
    return DTensor.from_local(scalar, mesh, [Replicate()] * mesh.ndim, run_check=False)
