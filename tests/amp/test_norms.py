"""Norm of each gradient: torch's norms, within rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flatout.amp import grad_norms
from tests.chunks import CHUNK, DTYPES, norms_in_double, parameters_with_gradients

SIZES = [1, 3, 0, 35, CHUNK - 1, CHUNK, 2 * CHUNK + 77]


def check(params: list[torch.nn.Parameter], order: float = 2.0, dtype: torch.dtype = torch.float32, **how: Any) -> None:
    norms = grad_norms(params, order, **how)
    assert (norms.dtype, norms.shape) == (dtype, (len(params),))
    expected = norms_in_double(params, order) * how.get("inv_scale", 1)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 3.0])
@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in DTYPES), DTYPES], ids=str)
def test_norms_are_torchs_in_the_order_of_parameters(dtypes, order):
    check(
        parameters_with_gradients(dtypes, SIZES), order, torch.float64 if dtypes == [torch.float64] else torch.float32
    )


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_norms_without_kernels_are_the_same(order):
    check(parameters_with_gradients(DTYPES, SIZES), order)
    check(parameters_with_gradients(DTYPES, SIZES), order, inv_scale=0.25)


@pytest.mark.parametrize("inv_scale", [0.25, torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)])
def test_norms_of_scaled_gradients(inv_scale):
    check(parameters_with_gradients(DTYPES, SIZES), inv_scale=inv_scale)


def test_a_parameter_without_a_gradient_has_a_norm_of_zero():
    params = parameters_with_gradients([torch.bfloat16, torch.float32], SIZES)
    params[0].grad = params[4].grad = None
    check(params)
    for p in params:
        p.grad = None
    assert grad_norms(params).tolist() == [0] * len(params)
    assert grad_norms([]).shape == (0,)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_only_the_norm_of_a_bad_gradient_is_bad(bad):
    params = parameters_with_gradients(DTYPES, SIZES)
    params[4].grad[7] = bad
    for order in (1.0, 2.0, math.inf):
        assert grad_norms(params, order).isfinite().tolist() == [i != 4 for i in range(len(params))]


def test_gradients_of_any_layout():
    table = torch.nn.Embedding(9, 3, sparse=True)
    table(torch.tensor([2, 2, 5])).square().sum().backward()
    spread, waves = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    spread.grad = torch.randn(4, 8)[:, ::2]
    waves.grad = torch.randn(5, dtype=torch.complex64)
    norms = grad_norms([table.weight, spread, waves])
    expected = [torch.linalg.vector_norm(p.grad.to_dense()) for p in (table.weight, spread, waves)]
    torch.testing.assert_close(norms, torch.stack(expected))
    check([spread])


def test_the_operator_passes_torchs_check():
    grads = [p.grad for p in parameters_with_gradients(DTYPES, SIZES)]
    torch.library.opcheck(torch.ops.flatout.grad_norms.default, (grads, torch.tensor(0.5), 1.0))
    with pytest.raises(RuntimeError, match="norm_type"):
        torch.ops.flatout.grad_norms(grads, None, 3.0)
