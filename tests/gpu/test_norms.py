"""Norm of each gradient on a GPU: torch's norms, within rounding."""

from __future__ import annotations

import math

import pytest
import torch

from flatout.amp import grad_norms
from tests.chunks import DTYPES, norms_in_double, parameters_with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = [1, 3, 0, 35, 16383, 16384, 100_003, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 3.0])
@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in DTYPES), DTYPES], ids=str)
def test_norms_are_torchs_in_the_order_of_parameters(dtypes: list[torch.dtype], order: float) -> None:
    params = parameters_with_gradients(dtypes, SIZES, "cuda")
    params[3].grad = None
    for _ in range(2):
        norms = grad_norms(params, order, inv_scale=torch.tensor(0.5, device="cuda"))
        assert norms.is_cuda
        rtol = 1e-5 if order != 3 else 1e-4  # torch computes order 3, with sums in float32
        torch.testing.assert_close(norms.cpu().double(), norms_in_double(params, order) / 2, rtol=rtol, atol=0)


def test_thousands_of_parameters_need_several_launches() -> None:
    params = parameters_with_gradients([torch.float32, torch.bfloat16], [1 + i % 50 for i in range(5000)], "cuda")
    torch.testing.assert_close(grad_norms(params).cpu().double(), norms_in_double(params, 2.0), rtol=1e-5, atol=0)


def test_a_graph_computes_the_norms_of_every_replay() -> None:
    params = parameters_with_gradients(DTYPES, [5, 70_000, 300], "cuda")
    grad_norms(params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = grad_norms(params)
    for factor in (2.0, 0.5):
        torch._foreach_mul_([p.grad for p in params], factor)
        graph.replay()
        torch.testing.assert_close(norms.cpu().double(), norms_in_double(params, 2.0), rtol=1e-5, atol=0)


def test_norms_and_checks_on_several_streams_are_independent() -> None:
    lists = [parameters_with_gradients([torch.float32], [300_000 + i, 5], "cuda") for i in range(3)]
    expected = [grad_norms(params).tolist() for params in lists]
    streams = [torch.cuda.Stream() for _ in lists]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream, params in zip(streams, lists, strict=True):
            with torch.cuda.stream(stream):
                torch.ops.flatout.unscale_and_check([p.grad for p in params], None, None)
                found.append(grad_norms(params))
    torch.cuda.synchronize()
    assert [norms.tolist() for norms in found] == expected * 5
