"""Optimizer steps over buckets of any sizes, dtypes and offsets: CUDA operators compared with CPU operators."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunks import CHUNK, at_offset, sizes
from tests.optim.buckets import step_once
from tests.optim.random_bits import assert_rounding_is_philox
from tests.optim.rules import VARIANTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
i16, u8 = torch.int16, torch.uint8
STORAGES = [
    (f32, f32, f32, None, None),
    (f32, f32, f32, f32, None),
    (f32, f32, f16, None, f16),
    (f32, bf16, f32, f32, bf16),
    (f32, f16, f32, None, f16),
    (f64, f64, f64, f64, None),
    (f16, f16, f16, f32, None),
    (f16, f16, f32, None, None),
    (bf16, bf16, bf16, None, None),
    (bf16, f32, f32, f32, None),
    (bf16, bf16, f32, f32, i16),
    (bf16, bf16, bf16, None, i16),
    (f32, f32, u8, None, None),
    (f32, bf16, u8, f32, bf16),
    (f16, f16, u8, None, None),
    (bf16, bf16, u8, f32, None),
    (bf16, f32, u8, None, i16),
]
"""Dtypes of weights, gradients, states, averages and 16-bit companions. None means no such tensors."""


def streams(variant, storage, sizes, offsets, device):
    """Return weights, grads, states, absmaxes, steps, averages, lows and ids."""
    rule, options = VARIANTS[variant]
    weight, grad, state, average, low = storage
    generator = torch.Generator().manual_seed(0)

    def stream(dtype, i):
        if dtype is None:
            return []
        make = torch.zeros if dtype == i16 else lambda n: torch.rand(n, generator=generator)
        return [at_offset(make(n).to(dtype), offsets[i], device) for n in sizes]

    def codes(i):
        made = [torch.randint(0, 256, (n,), generator=generator, dtype=u8) for n in sizes]
        return [at_offset(each, offsets[i], device) for each in made]

    weights, grads = stream(weight, 0), stream(grad, 1)
    states = [
        t for k in range(len(rule.states(options))) for t in (codes(2 + k) if state == u8 else stream(state, 2 + k))
    ]
    blocks = [-(-t.numel() // 256) for t in states if state == u8]
    absmaxes = [torch.rand(n, generator=generator).to(device) for n in blocks]
    steps = [torch.full((), float(i), device=device) for i in range(len(sizes))]
    return [
        weights,
        grads,
        states,
        absmaxes,
        steps,
        stream(average, 5),
        stream(low, 6),
        [7 + i for i in range(len(sizes))],
    ]


def both(variant, storage, sizes, offsets, options, **numbers):
    """Return the tensor lists after a step on the CPU and on a GPU."""
    rule, _ = VARIANTS[variant]
    results = []
    for device in ("cpu", "cuda"):
        lists = streams(variant, storage, sizes, offsets, device)
        here = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in numbers.items()}
        step_once(rule.operator, *lists, options, **here)
        results.append([[t.cpu() for t in tensors] for tensors in lists[:7]])
    return results


@settings(max_examples=60)
@given(
    sizes=sizes,
    variant=st.sampled_from(list(VARIANTS)),
    storage=st.sampled_from(STORAGES),
    offsets=st.lists(st.integers(0, 9), min_size=7, max_size=7),
    together=st.booleans(),
    stochastic=st.booleans(),
    unscale=st.booleans(),
    skipped=st.sampled_from([False, False, True]),
)
def test_any_bucket_steps_as_on_the_cpu(sizes, variant, storage, offsets, together, stochastic, unscale, skipped):
    if together:
        offsets = offsets[:1] * 7
    rule, chosen = VARIANTS[variant]
    expected, found = both(
        variant, storage, sizes, offsets, rule.numbers(chosen),
        lr=0.1, weight_decay=0.1, maximize=variant == "adam, amsgrad", ema_decay=0.9,
        seed=3 if stochastic and bf16 in storage else None,
        grad_factor=torch.tensor(0.7), found_inf=torch.tensor(float(skipped)), unscale_grads=unscale,
    )  # fmt: skip
    before = streams(variant, storage, sizes, offsets, "cpu")
    for a, b in zip(chain(*found), chain(*expected), strict=True):
        if a.dtype == f64:  # powers in double differ by their last bit
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        else:
            assert torch.equal(a, b)
    for g, old in zip(found[1], before[1], strict=True):  # rounded to nearest, once
        exact = old.double() * torch.tensor(0.7 if unscale else 1.0).double()
        assert torch.equal(g, (exact if g.dtype == f64 else exact.float()).to(g.dtype))
    if skipped:
        for a, old in zip(chain(found[0], *found[2:]), chain(before[0], *before[2:7]), strict=True):
            assert torch.equal(a, old)


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage[2] == u8], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_codes_have_the_bits_of_the_cpu(storage, offset):
    """All factors are powers of two, so products are exact, and fused operations give the same bits."""
    expected, found = both(
        "sgd, momentum", storage, [CHUNK + 300, 70, 0, 256, 255, 4097],
        [offset, 3 * offset, 5 * offset, 0, 0, 0, 0], [0.5, 0.0, 0.0],
        lr=0.125, ema_decay=0.5, seed=4 if storage[0] == bf16 else None,
    )  # fmt: skip
    for a, b in zip(chain(*found), chain(*expected), strict=True):
        assert torch.equal(a, b)


def test_random_bits_are_philox():
    assert_rounding_is_philox("cuda")
