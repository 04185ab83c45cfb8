"""Random numbers in logical order: both memory formats draw the numbers of contiguous memory without the mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatout.tuning.logical_order import LogicalOrder
from tests.compiler import Compiler

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout of channels": lambda x: functional.dropout2d(x, 0.5),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x + x.detach().clone().uniform_(),
    "exponential": lambda x: x + x.detach().clone().exponential_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
}


def drawn(draw: Callable[[Tensor], Tensor], x: Tensor, mode: LogicalOrder | None) -> tuple[Tensor, Tensor]:
    """Return the output of ``draw`` and the gradient of its input. Each call uses the same seed."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    with mode or nullcontext():
        output = draw(x)
        weights = torch.arange(output.numel()).reshape(output.shape)
        (gradient,) = torch.autograd.grad((output * weights).sum(), x)
    return output.detach(), gradient


@pytest.mark.parametrize("name", DRAWS)
def test_both_memory_formats_draw_the_same_numbers(name: str) -> None:
    draw, x, order = DRAWS[name], torch.randn(2, 3, 4, 5), LogicalOrder()
    plain = drawn(draw, x, None)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        found = drawn(draw, x.to(memory_format=memory_format), order)
        torch.testing.assert_close(found, plain, check_stride=False)
    assert order.drew


def test_dropout_without_the_mode_draws_in_the_order_of_memory() -> None:
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    assert not torch.equal(drawn(DRAWS["dropout"], x, None)[0], drawn(DRAWS["dropout"], last, None)[0])


def test_operators_in_place_return_their_argument() -> None:
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with LogicalOrder():
        assert x.bernoulli_(0.5).data_ptr() == x.data_ptr()
        assert torch.ops.aten.uniform_(x).data_ptr() == x.data_ptr()


def test_operators_that_are_not_random_draw_nothing() -> None:
    with LogicalOrder() as order:
        torch.ones(2, 3).sum()
    assert not order.drew


def test_compiled_code_runs_under_the_mode(compiler: Compiler) -> None:
    double = compiler.compile(lambda x: 2 * x)
    with LogicalOrder():
        double(torch.ones(3))
    assert compiler.runs == 1
