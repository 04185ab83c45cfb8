"""Blocks and threads of the CUDA step, played on the host over the functions that the kernel calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.optim  # noqa: F401  (loads the operators)
from tests.chunks import CHUNK, at_offset, sizes
from tests.optim.rules import VARIANTS

# The weight's dtype, then those of gradient, states, average and 16-bit companion (None: there is none).
f64, f32, f16, bf16, i16 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int16
u8 = torch.uint8
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


def streams(variant, storage, sizes, offsets):
    """weights, grads, states, absmaxes, steps, averages, lows, ids: the tensor lists of ``step_``."""
    rule, options = VARIANTS[variant]
    weight, grad, state, average, low = storage
    generator = torch.Generator().manual_seed(0)

    def stream(dtype, i):
        if dtype is None:
            return []
        make = torch.zeros if dtype == i16 else lambda n: torch.rand(n, generator=generator)
        return [at_offset(make(n).to(dtype), offsets[i]) for n in sizes]

    weights, grads = stream(weight, 0), stream(grad, 1)
    states = [t for k in range(len(rule.states(options))) for t in stream(state, 2 + k)]
    steps = [torch.full((), float(i)) for i in range(len(sizes))]
    absmaxes = []
    if state == u8:
        for codes in states:
            codes.random_(0, 256, generator=generator)
        absmaxes = [torch.rand(-(-codes.numel() // 256), generator=generator) for codes in states]
    averages, lows = stream(average, 5), stream(low, 6)
    return [weights, grads, states, absmaxes, steps, averages, lows, [7 + i for i in range(len(sizes))]]


@settings(max_examples=150, deadline=None)
@given(
    sizes=sizes,
    variant=st.sampled_from(list(VARIANTS)),
    storage=st.sampled_from(STORAGES),
    offsets=st.lists(st.integers(0, 9), min_size=7, max_size=7),
    together=st.booleans(),
    stochastic=st.booleans(),
    unscale=st.booleans(),
    skipped=st.sampled_from([False, False, True]),
    threads=st.sampled_from([32, 128, 512]),
)
def test_blocks_and_threads_do_what_the_cpu_loop_does(
    sizes, variant, storage, offsets, together, stochastic, unscale, skipped, threads
):
    if together:
        offsets = offsets[:1] * 7
    lists = streams(variant, storage, sizes, offsets)
    copies, before = ([[t.clone() if isinstance(t, torch.Tensor) else t for t in ts] for ts in lists] for _ in "ab")
    seed = 3 if stochastic and bf16 in storage else None
    rule, chosen = VARIANTS[variant]
    options = dict(lr=0.1, weight_decay=0.1, maximize=variant == "adam, amsgrad", ema_decay=0.9, seed=seed)
    options |= dict(grad_factor=torch.tensor(0.7), found_inf=torch.tensor(float(skipped)), unscale_grads=unscale)
    launches = torch.ops.flatout_testing.step_(rule.operator, *lists, rule.numbers(chosen), **options, threads=threads)
    assert launches == -(-len(sizes) // 3)
    torch.ops.flatout.step_(rule.operator, *copies, rule.numbers(chosen), **options, lr_tensor=None)
    for played, expected in zip(lists[:7], copies[:7], strict=True):
        for a, b in zip(played, expected, strict=True):
            # The CPU's loops may fuse multiplications and additions that the played code does not.
            if a.dtype == i16:
                continue  # the low halves of weights that agree to float32: seen in the weights
            if a.dtype == u8:  # a number that differs in its last bit may be nearest to the next code
                apart = (a.int() - b.int()).abs()
                assert (apart <= 1).all()
                assert (apart != 0).sum() <= 1 + a.numel() // 500
                continue
            bound = {f64: 1e-13, f32: 1e-6}.get(a.dtype, 8e-3)
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)
    factor = 0.7 if unscale else 1.0
    for g, once in zip(lists[1], before[1], strict=True):
        expected = once.double() * torch.tensor(factor).double()
        assert torch.equal(g, (expected if g.dtype == f64 else expected.float()).to(g.dtype)), (
            "rounded to nearest, once"
        )
    if skipped:
        for played, once in zip(lists[:1] + lists[2:7], before[:1] + before[2:7], strict=True):
            assert all(map(torch.equal, played, once))


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage[2] == u8], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_codes_are_played_exactly(storage, offset):
    """Halves and eighths: with or without fused multiply-adds every number is rounded once, to the same bits."""
    lists = streams(
        "sgd, momentum", storage, [CHUNK + 300, 70, 0, 256, 255, 4097], [offset, 3 * offset, 5 * offset] + [0] * 4
    )
    copies = [[t.clone() if isinstance(t, torch.Tensor) else t for t in ts] for ts in lists]
    numbers = dict(lr=0.125, weight_decay=0.0, maximize=False, ema_decay=0.5, seed=4 if storage[0] == bf16 else None)
    torch.ops.flatout_testing.step_("sgd", *lists, [0.5, 0.0, 0.0], **numbers, threads=256)
    torch.ops.flatout.step_(
        "sgd", *copies, [0.5, 0.0, 0.0], **numbers, lr_tensor=None, grad_factor=None, found_inf=None
    )
    for played, expected in zip(lists[:7], copies[:7], strict=True):
        for a, b in zip(played, expected, strict=True):
            assert torch.equal(a, b)


def test_remainders_are_played_exactly():
    """The weight is the parameter and its remainder together: compared as float32, which the test above cannot."""
    for offsets in ([0] * 7, [1] * 7, [0, 1, 2, 3, 4, 5, 6]):
        lists = streams("sgd, momentum", (bf16, bf16, f32, None, i16), [CHUNK + 13, 70, 0], offsets)
        copies = [[t.clone() if isinstance(t, torch.Tensor) else t for t in ts] for ts in lists]
        options = dict(lr=0.1, weight_decay=0.1, maximize=False, ema_decay=0.0, seed=None)
        torch.ops.flatout_testing.step_("sgd", *lists, [0.9, 0.0, 0.0], **options, threads=64)
        torch.ops.flatout.step_(
            "sgd", *copies, [0.9, 0.0, 0.0], **options, lr_tensor=None, grad_factor=None, found_inf=None
        )
        for high, low, other_high, other_low in zip(lists[0], lists[6], copies[0], copies[6], strict=True):
            played, expected = (
                ((h.view(i16).int() << 16) + r.int()).view(f32) for h, r in ((high, low), (other_high, other_low))
            )
            torch.testing.assert_close(played, expected, rtol=1e-6, atol=1e-7)


def test_random_bits_are_philox():
    """Counter and key of the first element, against the generator as its authors define it (SC 2011)."""

    def philox(counter, key):
        c, k = list(counter), list(key)
        for _ in range(10):
            even, odd = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [odd >> 32 ^ c[1] ^ k[0], odd & 0xFFFFFFFF, even >> 32 ^ c[3] ^ k[1], even & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return c

    # Random123's known answer.
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    seed, tensor, step, n = 0x123456789AB, 5, 4, 2 * CHUNK + 40
    start = torch.full((n,), 1.0)
    for low_half in (0x0001, 0x7FFF, 0x8000, 0xFFFF):
        # A weight between two bfloat16 values goes up when its low half and the random bits carry.
        weight = torch.tensor([(0x3F80 << 16) + low_half], dtype=torch.int32).view(f32).item()
        p = start.to(bf16)
        torch.ops.flatout.step_(
            "sgd", [p], [torch.full((n,), -(weight - 1.0)).to(f32)], [], [], [torch.tensor(float(step - 1))], [], [],
            [tensor], [0.0, 0.0, 0.0], lr=1.0, lr_tensor=None, weight_decay=0.0, maximize=False, ema_decay=0.0,
            seed=seed, grad_factor=None, found_inf=None,
        )  # fmt: skip
        for i in (0, 1, 2, 7, 8, 511, 512, CHUNK, CHUNK + 9, n - 1):
            words = philox([i // 8, 0, tensor, step], [seed & 0xFFFFFFFF, seed >> 32])
            bits = words[i % 8 // 2] >> (16 * (i % 2)) & 0xFFFF
            assert (p[i].item() > 1) == (low_half + bits > 0xFFFF), (low_half, i)


@pytest.mark.parametrize("where", ["weights", "states", "grads"])
def test_two_16_bit_types_are_refused(where):
    kinds = {"weights": (bf16, bf16, f16, None, None), "states": (f32, f32, bf16, None, f16)}
    lists = streams("adam", kinds.get(where, (f32, f16, f32, None, bf16)), [5], [0] * 7)
    message = "grads" if where == "grads" else "float16.*bfloat16"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.flatout.step_(
            "adam", *lists, [0.9, 0.99, 1e-8, 1.0], lr=0.1, lr_tensor=None, weight_decay=0.0, maximize=False,
            ema_decay=0.0, seed=None, grad_factor=None, found_inf=None,
        )  # fmt: skip
