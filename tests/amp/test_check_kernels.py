"""Blocks and threads of the check's CUDA kernels, played on the host over the functions that the kernels call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp  # noqa: F401  (loads the operators)
from tests.chunks import CHUNK, at_offset, sizes

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ORDERS = [1.0, 2.0, math.inf]

PLAY = dict(inv_scale=1.0, max_norm=1e9, norm_type=2.0, rewrite=False, threads=64, seed=0)


def play(grads, **options):
    return torch.ops.flatout_testing.check_(grads, **PLAY | options)


def exact_norm(grads, order):
    flat = torch.cat([g.double().flatten() for g in grads])
    return torch.linalg.vector_norm(flat, order).item() if flat.numel() else 0.0


@settings(max_examples=40, deadline=None)
@given(
    sizes=sizes,
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    order=st.sampled_from(ORDERS),
    threads=st.sampled_from([32, 512]),
    seed=st.integers(0, 1000),
)
def test_the_block_that_finishes_last_adds_all_of_all_launches(sizes, dtypes, offset, order, threads, seed):
    """Blocks finish in any order. Partial sums start as NaN, so that reading one too early is detected."""
    generator = torch.Generator().manual_seed(seed)
    grads = [
        at_offset(torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)]), offset) for i, n in enumerate(sizes)
    ]
    options = dict(inv_scale=0.5, max_norm=1.0, norm_type=order, threads=threads)
    found_inf, norm, factor, concluded = play(grads, seed=seed, **options)
    assert (found_inf, concluded) == (0, int(any(sizes)))
    if any(sizes):
        assert norm == pytest.approx(exact_norm(grads, order) / 2, rel=1e-6)
        assert factor == pytest.approx(0.5 * min(1, 1 / (norm + 1e-6)))
        assert play(grads, seed=seed + 1, **options)[:3] == (found_inf, norm, factor), "bit for bit in any order"
    expected = torch.ops.flatout.unscale_and_check(grads, torch.tensor(0.5), 1.0, order)
    assert found_inf == expected[0]
    assert norm == pytest.approx(expected[1].item(), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    sizes=sizes,
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 9),
    threads=st.sampled_from([32, 512]),
    inv_scale=st.sampled_from([0.5, 1.0]),
    rewrite=st.booleans(),
)
def test_the_check_sees_and_rewrites_every_gradient_once(sizes, dtype, offset, threads, inv_scale, rewrite):
    grads = [at_offset(torch.full((n,), 2.0, dtype=dtype), offset) for n in sizes]
    found_inf, norm, _, _ = play(grads, inv_scale=inv_scale, norm_type=1.0, rewrite=rewrite, threads=threads)
    assert (found_inf, norm) == (0, sum(sizes) * 2 * inv_scale)
    assert all((g == (2 * inv_scale if rewrite else 2)).all() for g in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 12])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_gradient_is_found_wherever_it_is(dtype, where, bad):
    g = torch.ones(CHUNK + 13, dtype=dtype)
    g[where] = bad
    for order in ORDERS:
        played = play([torch.ones(3, dtype=dtype), g], norm_type=order)
        found = torch.ops.flatout.unscale_and_check([torch.ones(3, dtype=dtype), g], None, None, order)
        for found_inf, norm in (played[:2], (found[0].item(), found[1].item())):
            assert found_inf == 1
            assert norm == abs(bad) or (math.isnan(norm) and math.isnan(bad)), "NaN spreads, infinity stays infinity"


def test_every_half_and_bfloat16_converts_as_torch_does():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    factor = torch.tensor(1.0009765625)  # not 1, or nothing would be computed
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        expected = (values.float() * factor).to(dtype)
        scaled = values.clone()
        torch.ops.flatout.scale_([scaled], factor)
        played = values.clone()
        play([played], inv_scale=factor.item(), rewrite=True)
        for result in (scaled, played):
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
