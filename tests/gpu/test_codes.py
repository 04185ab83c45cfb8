"""Conversion of 8-bit states on a GPU, with the bits of the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.optim as fo
from flatout.optim import dynamic8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NAMES = ["exp_avg", "exp_avg_sq"]
"""State with a sign, and state without a sign."""


def moments(count: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-12, 3, (count,), generator=generator)
    values[256:512] = 0
    values[700::1400] = math.inf
    values[1400::1400] = math.nan
    return values if dynamic8.has_sign(name) else values.abs()


def assert_codes_of_the_cpu(values: torch.Tensor, name: str) -> None:
    here = dynamic8.encode(values, name)
    there = dynamic8.encode(values.cuda(), name)
    assert all(tensor.is_cuda for tensor in there)
    for mine, others in zip(here, there, strict=True):
        torch.testing.assert_close(others.cpu(), mine, rtol=0, atol=0, equal_nan=True)
    decoded = dynamic8.decode(*there, name)
    assert decoded.is_cuda
    torch.testing.assert_close(decoded.cpu(), dynamic8.decode(*here, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sanitize
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000, 50_001])
def test_codes_have_the_bits_of_the_cpu(name: str, count: int) -> None:
    assert_codes_of_the_cpu(moments(count, name), name)


@settings(max_examples=40)
@given(count=st.integers(0, 40_000), name=st.sampled_from(NAMES))
def test_any_number_of_codes_has_the_bits_of_the_cpu(count: int, name: str) -> None:
    assert_codes_of_the_cpu(moments(count, name), name)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_in_the_order_of_memory(name: str) -> None:
    values = moments(4 * 6 * 10 * 10, name).view(4, 6, 10, 10).to(memory_format=torch.channels_last).bfloat16()
    codes, absmax = dynamic8.encode(values.cuda(), name)
    expected = dynamic8.encode(values, name)
    assert codes.stride() == values.stride()
    assert torch.equal(codes.cpu(), expected[0])
    torch.testing.assert_close(absmax.cpu(), expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_conversion_does_not_wait(name: str) -> None:
    values = moments(5000, name).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoded = dynamic8.decode(*dynamic8.encode(values, name), name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoded.is_cuda


def test_the_state_of_a_group_turns_to_8_bits_on_its_device() -> None:
    results = []
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 5000).to(device))
        optimizer = fo.SGD([p], lr=0.5, momentum=0.5)
        for dtype in (None, torch.uint8):
            optimizer.param_groups[0]["moment_dtype"] = dtype
            p.grad = torch.linspace(1, 3, 5000).to(device)
            optimizer.step()
        results.append((p.detach().cpu(), optimizer.state[p]["momentum_buffer"].cpu()))
    for there, here in zip(*results, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


def test_operators_pass_torchs_check() -> None:
    values, codes, absmax = torch.randn(300).cuda(), torch.zeros(300, dtype=torch.uint8).cuda(), torch.zeros(2).cuda()
    torch.library.opcheck(torch.ops.flatout.encode_.default, (values, codes, absmax, True))
    torch.library.opcheck(torch.ops.flatout.decode_.default, (values, codes, absmax, True))
