"""SameDraws: any memory format and 16 bits draw the numbers of contiguous float32 memory without the mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatout.tuning.numerics import SameDraws
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

torch.library.define(
    "flatout_tests::attention", "(Tensor x, float dropout_p) -> Tensor", tags=torch.Tag.nondeterministic_seeded
)
torch.library.impl("flatout_tests::attention", "CPU", functional.dropout)


def drawn(draw: Callable[[Tensor], Tensor], x: Tensor, mode: SameDraws | None) -> tuple[Tensor, Tensor]:
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
    draw, x, draws = DRAWS[name], torch.randn(2, 3, 4, 5), SameDraws()
    plain = drawn(draw, x, None)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        found = drawn(draw, x.to(memory_format=memory_format), draws)
        torch.testing.assert_close(found, plain, check_stride=False)
    assert draws.drew


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"bernoulli"}))  # 16 bits also round its probabilities
def test_16_bits_draw_the_numbers_of_float32(name: str, dtype: torch.dtype) -> None:
    draw, x, draws = DRAWS[name], torch.randn(2, 3, 4, 5).to(dtype), SameDraws()
    for found, plain in zip(drawn(draw, x, draws), drawn(draw, x.float(), None), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), plain, rtol=0.03, atol=0.03)
    assert draws.drew


def test_a_dtype_that_is_asked_for_stays() -> None:
    torch.manual_seed(0)
    plain = torch.rand(64)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        with SameDraws():
            found = torch.rand(64, dtype=dtype), torch.rand_like(plain.bfloat16(), dtype=dtype)
        assert [f.dtype for f in found] == [dtype, dtype]
        torch.testing.assert_close(found[0], plain.to(dtype))


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_numbers_that_attention_draws_are_not_the_same(probability: float) -> None:
    x = torch.randn(8, 4)
    with SameDraws() as draws:
        functional.dropout(x)
        torch.ops.flatout_tests.attention(x, probability)
    assert draws.drew == (probability == 0)


def test_dropout_without_the_mode_draws_in_the_order_of_memory() -> None:
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    assert not torch.equal(drawn(DRAWS["dropout"], x, None)[0], drawn(DRAWS["dropout"], last, None)[0])


def test_operators_in_place_return_their_argument() -> None:
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with SameDraws():
        assert x.bernoulli_(0.5).data_ptr() == x.data_ptr()
        assert torch.ops.aten.uniform_(x).data_ptr() == x.data_ptr()


def test_operators_that_are_not_random_draw_nothing() -> None:
    with SameDraws() as draws:
        torch.ones(2, 3).sum()
    assert not draws.drew


def test_compiled_code_runs_under_the_mode(compiler: Compiler) -> None:
    double = compiler.compile(lambda x: 2 * x)
    with SameDraws():
        double(torch.ones(3))
    assert compiler.runs == 1
