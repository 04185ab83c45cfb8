"""Blocks and threads of the CUDA kernels, played on the host over the functions that the kernels call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.optim  # noqa: F401  (loads the operators)

CHUNK = 16384
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

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


@settings(max_examples=25, deadline=None)
@given(
    sizes=sizes,
    dtype=st.sampled_from(DTYPES),
    offsets=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    together=st.booleans(),
    amsgrad=st.booleans(),
    threads=st.sampled_from([32, 128, 512]),
    piece=st.sampled_from([CHUNK, 2 * CHUNK, 1 << 31]),
)
def test_blocks_and_threads_cover_every_element_once(sizes, dtype, offsets, together, amsgrad, threads, piece):
    if together:
        offsets = offsets[:1] * 5
    generator = torch.Generator().manual_seed(0)
    lists = [
        [at_offset(torch.rand(n, generator=generator).to(dtype), o) for n in sizes] for o in offsets[: 4 + amsgrad]
    ]
    params, grads, exp_avgs, exp_avg_sqs = lists[:4]
    maxima = lists[4] if amsgrad else []
    steps = [torch.full((), float(i)) for i in range(len(sizes))]
    copies = [[t.clone() for t in ts] for ts in (params, grads, exp_avgs, exp_avg_sqs, maxima, steps)]
    launches = torch.ops.flatout_testing.adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        maxima,
        steps,
        lr=0.1,
        weight_decay=0.1,
        threads=threads,
        piece=piece,
    )
    pieces = sum(-(-n // piece) for n in sizes)
    assert launches == -(-pieces // 3)
    torch.ops.flatout.adamw_(
        *copies, lr=0.1, lr_tensor=None, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True,
        maximize=False, grad_factor=None, found_inf=None,
    )  # fmt: skip
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 8e-3)
    for played, expected in zip((params, grads, exp_avgs, exp_avg_sqs, maxima, steps), copies, strict=True):
        for a, b in zip(played, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    sizes=sizes,
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 9),
    threads=st.sampled_from([32, 512]),
    piece=st.sampled_from([CHUNK, 1 << 31]),
    inv_scale=st.sampled_from([0.5, 1.0]),
)
def test_the_check_sees_and_rewrites_every_gradient_once(sizes, dtype, offset, threads, piece, inv_scale):
    grads = [at_offset(torch.full((n,), 2.0, dtype=dtype), offset) for n in sizes]
    total, bad = torch.ops.flatout_testing.check_(grads, inv_scale=inv_scale, threads=threads, piece=piece)
    assert (total, bad) == (sum(sizes) * (2 * inv_scale) ** 2, 0)
    assert all((g == 2 * inv_scale).all() for g in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 12])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_gradient_is_found_wherever_it_is(dtype, where, bad):
    g = torch.ones(CHUNK + 13, dtype=dtype)
    g[where] = bad
    _, played = torch.ops.flatout_testing.check_([g.clone()], inv_scale=0.5, threads=64, piece=1 << 31)
    assert played != 0
    found_inf, _, _ = torch.ops.flatout.unscale_and_check([torch.ones(3, dtype=dtype), g], None, None)
    assert found_inf == 1


def test_every_half_and_bfloat16_converts_as_torch_does():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    factor = torch.tensor(1.0009765625)  # not 1, or nothing would be computed
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        expected = (values.float() * factor).to(dtype)
        scaled = values.clone()
        torch.ops.flatout.scale_([scaled], factor)
        played = values.clone()
        torch.ops.flatout_testing.check_([played], inv_scale=factor.item(), threads=32, piece=1 << 31)
        for result in (scaled, played):
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
