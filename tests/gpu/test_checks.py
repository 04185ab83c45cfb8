"""Checks of gradients of any sizes, dtypes and offsets: CUDA operators compared with CPU operators."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp  # noqa: F401  (loads the operators)
from tests.chunks import BAD_PLACES, DTYPES, ORDERS, mixed_gradients, one_bad_gradient, sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ops = torch.ops.flatout
lists = dict(sizes=sizes, dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3), offset=st.integers(0, 9))


@settings(max_examples=40)
@given(**lists, order=st.sampled_from(ORDERS))
def test_any_gradients_have_the_verdict_of_the_cpu(sizes, dtypes, offset, order):
    here, there = (mixed_gradients(sizes, dtypes, offset, device) for device in ("cpu", "cuda"))
    scale = torch.tensor(0.5)
    expected = ops.unscale_and_check(here, scale, 1.0, order)
    found, again = (ops.unscale_and_check(there, scale.cuda(), 1.0, order) for _ in range(2))
    torch.testing.assert_close([t.cpu() for t in found], list(expected), rtol=1e-6, atol=0)
    assert all(map(torch.equal, found, again)), "the same bits in any order of blocks"


@settings(max_examples=25)
@given(**lists, inv_scale=st.sampled_from([0.7, 1.0]))
def test_any_gradients_are_rewritten_to_the_bits_of_the_cpu(sizes, dtypes, offset, inv_scale):
    here, there = (mixed_gradients(sizes, dtypes, offset, device) for device in ("cpu", "cuda"))
    scale = torch.tensor(inv_scale)
    ops.unscale_and_check_(here, scale)
    ops.unscale_and_check_(there, scale.cuda())
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(there, here, strict=True))


@settings(max_examples=25)
@given(**lists, order=st.sampled_from(ORDERS))
def test_any_gradients_have_the_norms_of_the_cpu(sizes, dtypes, offset, order):
    here, there = (mixed_gradients(sizes, dtypes, offset, device) for device in ("cpu", "cuda"))
    expected, found = ops.grad_norms(here, None, order), ops.grad_norms(there, None, order)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_gradient_is_found_at_any_place(dtype, bad):
    for where in BAD_PLACES:
        grads = one_bad_gradient(dtype, where, bad, "cuda")
        for order in ORDERS:
            found_inf, norm, _ = ops.unscale_and_check(grads, None, None, order)
            assert found_inf == 1
            assert norm == abs(bad) or (norm.isnan() and math.isnan(bad))
