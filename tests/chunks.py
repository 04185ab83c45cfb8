"""Sizes around a chunk and tensors at any address, for tests of the kernels."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

CHUNK = 16384
"""Number of elements that one block processes."""

sizes = st.lists(
    st.one_of(
        st.integers(0, 70),
        st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5, 3 * CHUNK + 17]),
    ),
    min_size=1,
    max_size=8,
)


def at_offset(values: torch.Tensor, offset: int, device: str = "cpu") -> torch.Tensor:
    """Return a copy of ``values`` that starts ``offset`` elements after a 64-byte boundary."""
    return torch.empty(values.numel() + offset, dtype=values.dtype, device=device)[offset:].copy_(values)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ORDERS = [1.0, 2.0, math.inf]
"""Orders of norms that the kernels compute."""
BAD_PLACES = [0, 1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 12]
"""Indices of the bad value in ``one_bad_gradient``: ends of vectors, of chunks and of the tensor."""


def parameters_with_gradients(
    dtypes: list[torch.dtype], sizes: list[int], device: str = "cpu"
) -> list[torch.nn.Parameter]:
    """Return parameters with random gradients of alternating dtypes."""
    generator = torch.Generator().manual_seed(0)
    listed = []
    for i, size in enumerate(sizes):
        parameter = torch.nn.Parameter(torch.zeros(size, dtype=dtypes[i % len(dtypes)], device=device))
        parameter.grad = torch.randn(size, generator=generator).to(parameter)
        listed.append(parameter)
    return listed


def norms_in_double(parameters: list[torch.nn.Parameter], order: float) -> torch.Tensor:
    """Return the norms of gradients in double, computed by torch on the CPU.

    Missing and empty gradients have norm 0.
    """
    grads = [torch.zeros(1) if p.grad is None or not p.grad.numel() else p.grad.cpu() for p in parameters]
    return torch.stack([torch.linalg.vector_norm(grad.to_dense().double(), order) for grad in grads])


def mixed_gradients(
    sizes: list[int], dtypes: list[torch.dtype], offset: int, device: str = "cpu"
) -> list[torch.Tensor]:
    """Return random gradients whose dtypes alternate."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)]
    return [at_offset(each, offset, device) for each in values]


def one_bad_gradient(dtype: torch.dtype, where: int, bad: float, device: str = "cpu") -> list[torch.Tensor]:
    """Return two tensors of ones. The second one has ``bad`` at index ``where``."""
    grads = [torch.ones(n, dtype=dtype, device=device) for n in (3, CHUNK + 13)]
    grads[1][where] = bad
    return grads
