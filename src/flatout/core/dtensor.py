"""DTensors (FSDP2, tensor parallel): what of one lies in this process, and what all ranks say made one.

Nothing here needs ``torch.distributed.tensor`` before there is a DTensor.
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
"""Tensor types the native operators take; any other has its own idea of what its memory is."""


def is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The tensor in this process's memory behind a DTensor; any other tensor itself."""
    # Not to_local(): it makes a view, or a node for autograd, with each call.
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def is_settled(tensor: Tensor) -> bool:
    """False for a DTensor whose numbers are still to be summed over ranks (Partial)."""
    return not is_distributed(tensor) or not any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def is_elsewhere(tensor: Tensor) -> bool:
    """True for a DTensor on a mesh that this process is not part of: nothing of it lies here."""
    return is_distributed(tensor) and tensor.device_mesh.get_coordinate() is None  # type: ignore[attr-defined]


def alike(a: Tensor, b: Tensor) -> bool:
    """True when both lie over the same ranks in the same way, as two plain tensors do."""
    mesh = getattr(a, "device_mesh", None)
    return mesh == getattr(b, "device_mesh", None) and (mesh is None or a.placements == b.placements)  # type: ignore[attr-defined]


def placed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor`` laid over the ranks as its parameter is, where it is on the same ranks; else as it is.

    Sequence parallelism leaves gradients of replicated parameters as sums still to be taken (Partial); state may have
    been saved under other placements.
    """
    if not is_distributed(parameter) or not is_settled(parameter) or alike(tensor, parameter):
        return tensor
    if getattr(tensor, "device_mesh", None) != parameter.device_mesh:  # type: ignore[attr-defined]
        return tensor
    return tensor.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def spread_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """State of a parameter laid over the ranks as it is; a plain tensor is taken for the whole, the same on all ranks.

    Raises:
        ValueError: it is a DTensor of other ranks.
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
    """Ranks that hold the parts of DTensors, each part once: their replicas are held by others."""

    mesh: DeviceMesh
    dims: tuple[int, ...]
    """Dimensions of the mesh that the tensors are sharded over; they are replicated over any others."""

    @property
    def part(self) -> int:
        """Which part this process holds; replicas have the same number."""
        number = 0
        for dim in self.dims:
            number = number * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return number

    def agree(self, found_inf: Tensor, norm: Tensor, norm_type: float) -> tuple[Tensor, Tensor]:
        """``(found_inf, grad_norm)`` over all parts from those of each: one all-reduce of two numbers per dimension.

        Args:
            found_inf: of the parts in this process, 0-dim.
            norm: of the parts in this process, 0-dim.
            norm_type: 1, 2 or inf.
        """
        order = 1.0 if norm_type == math.inf else norm_type
        # In float64, where the square of no float32 number overflows. A maximum over ranks loses NaN: 2 tells of it.
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
    """The ranks that have to agree on what is found in ``tensor``; None where this process holds all of it."""
    if not is_distributed(tensor) or is_elsewhere(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return Ranks(mesh, dims) if dims else None


def whole(scalar: Any) -> Tensor:
    """A DTensor's number as one over all ranks, in a plain tensor."""
    return scalar.full_tensor() if is_distributed(scalar) else scalar


def replicated(scalar: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """A number about ``tensors`` that all ranks know, as torch has it: a DTensor where all are DTensors of one mesh."""
    meshes = {getattr(tensor, "device_mesh", None) for tensor in tensors} if is_distributed(tensors[0]) else set()
    if len(meshes) != 1:
        return scalar
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = meshes.pop()
    return DTensor.from_local(scalar, mesh, [Replicate()] * mesh.ndim, run_check=False)
