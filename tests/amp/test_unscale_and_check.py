"""The operators ``unscale_and_check``, ``unscale_and_check_`` and ``scale_`` on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp  # noqa: F401  (loads the operators)
from tests.chunks import BAD_PLACES, DTYPES, ORDERS, at_offset, mixed_gradients, one_bad_gradient, sizes

ops = torch.ops.flatout


@settings(max_examples=40)
@given(
    sizes=sizes,
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    order=st.sampled_from(ORDERS),
)
def test_the_norm_is_that_of_float64(sizes, dtypes, offset, order):
    grads = mixed_gradients(sizes, dtypes, offset)
    found_inf, norm, factor = (t.item() for t in ops.unscale_and_check(grads, torch.tensor(0.5), 1.0, order))
    flat = torch.cat([g.double().flatten() for g in grads])
    exact = torch.linalg.vector_norm(flat, order).item() if flat.numel() else 0.0
    assert found_inf == 0
    assert norm == pytest.approx(exact / 2, rel=1e-6)
    assert factor == pytest.approx(0.5 * min(1, 1 / (norm + 1e-6)))


@settings(max_examples=25)
@given(sizes=sizes, dtype=st.sampled_from(DTYPES), offset=st.integers(0, 9), inv_scale=st.sampled_from([0.5, 1.0]))
def test_every_gradient_is_rewritten_once(sizes, dtype, offset, inv_scale):
    grads = [at_offset(torch.full((n,), 2.0, dtype=dtype), offset) for n in sizes]
    found_inf, _ = ops.unscale_and_check_(grads, torch.tensor(inv_scale))
    assert found_inf == 0
    assert all((g == 2 * inv_scale).all() for g in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", BAD_PLACES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_gradient_is_found_at_any_place(dtype, where, bad):
    grads = one_bad_gradient(dtype, where, bad)
    for order in ORDERS:
        found_inf, norm, _ = ops.unscale_and_check(grads, None, None, order)
        assert found_inf == 1
        assert norm == abs(bad) or (norm.isnan() and math.isnan(bad))


def test_every_half_and_bfloat16_converts_as_torch_does():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    factor = torch.tensor(1.0009765625)  # not 1, because a factor of 1 computes nothing
    for dtype in (torch.float16, torch.bfloat16):
        expected = (bits.view(dtype).float() * factor).to(dtype)
        for operator in (ops.scale_, ops.unscale_and_check_):
            scaled = bits.clone().view(dtype)
            operator([scaled], factor)
            torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)
