"""What the tests of blocks and threads share: sizes around a chunk, tensors that begin anywhere."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

CHUNK = 16384
"""Elements that one block works on."""

sizes = st.lists(
    st.one_of(
        st.integers(0, 70),
        st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5, 3 * CHUNK + 17]),
    ),
    min_size=1,
    max_size=8,
)


def at_offset(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of ``values`` that starts ``offset`` elements behind a 64-byte boundary."""
    return torch.empty(values.numel() + offset, dtype=values.dtype)[offset:].copy_(values)
