"""One native step compared with float64 bounds, for every rule and every storage of updated values."""

from __future__ import annotations

import pytest
import torch

from tests.optim.bounds import Near, assert_rounded_once, away_from_zero, join
from tests.optim.buckets import step_once
from tests.optim.rules import VARIANTS

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# weights, gradients, states, 16-bit companions
STORAGES = [
    (F64, F64, F64, None),
    (F32, F32, F32, None),
    (F32, F32, BF16, None),
    (F32, F32, F32, F16),
    (F32, BF16, F32, BF16),
    (F32, BF16, BF16, BF16),
    (F32, F16, F32, F16),
    (F16, F16, F16, None),
    (BF16, BF16, BF16, None),
    (BF16, BF16, F32, None),
    (BF16, BF16, F32, torch.int16),
    (BF16, F32, BF16, torch.int16),
]
SHAPES = [(1,), (7,), (0,), (3, 5), (129, 33), (16385,), (0, 4)]


def make(weight, grad, state, low, n_states, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(dtype, positive=False):
        made = [torch.randn(s, generator=generator) for s in SHAPES]
        return [(t.abs() if positive else t).to(dtype) for t in made]

    weights, grads = random(weight), random(grad)
    states = [t for i in range(n_states) for t in random(state, positive=i > 0)]
    averages = random(F64 if weight == F64 else F32)
    lows = (
        [torch.randint(-(2**15), 2**15, s, generator=generator, dtype=low) for s in SHAPES]
        if low == torch.int16
        else []
    )
    if low in (F16, BF16):
        lows = [w.to(low) for w in weights]
    return weights, grads, states, [torch.full((), 3.0) for _ in SHAPES], averages, lows


@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: "-".join(str(d).removeprefix("torch.") for d in s))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_native_step_is_float64s_rounded_once(variant, storage):
    rule, options = VARIANTS[variant]
    compute = F64 if storage[0] == F64 else F32
    remainder = storage[3] == torch.int16
    weights, grads, states, steps, averages, lows = lists = make(*storage, len(rule.states(options)))
    starts = [[t.clone() for t in tensors] for tensors in lists]
    step_once(
        rule.operator, *lists[:3], [], *lists[3:], [], rule.numbers(options),
        lr=0.01, weight_decay=0.1, maximize=True, ema_decay=0.9, grad_factor=torch.tensor(0.5),
    )  # fmt: skip
    n = len(SHAPES)
    for i in range(n):
        weight, grad, average = (tensors[i] for tensors in (starts[0], starts[1], starts[4]))
        if remainder:
            weight = join(weight, starts[5][i])
        new, moments = rule.reference(
            Near(weight.double(), 0, compute),
            Near(grad.double() * -0.5, 0, compute),
            [Near(state.double(), 0, compute) for state in starts[2][i::n]],
            4,
            lr=0.01,
            weight_decay=0.1,
            **options,
        )
        now = join(weights[i], lows[i]) if remainder else weights[i]
        assert_rounded_once(now, new, f"weight {i}")
        for state, moment in zip(states[i::n], moments, strict=True):
            assert_rounded_once(state, moment, f"state of {i}")
        begun = Near(average.double(), 0, compute)
        assert_rounded_once(averages[i], begun + (new - begun) * (1 - 0.9), f"average {i}")
        if remainder:
            assert torch.equal(away_from_zero(now), weights[i]), "the parameter is the weight rounded"
        elif lows:
            assert torch.equal(lows[i], weights[i].to(lows[i].dtype)), "the copy is the weight rounded"
        assert torch.equal(grads[i], starts[1][i])
        assert steps[i] == 4
