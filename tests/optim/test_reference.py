"""The native step against the reference, one step at a time: every rule, every way of storing what it updates."""

from __future__ import annotations

import pytest
import torch

import flatout.optim  # noqa: F401  (loads the operators)
from tests.optim import reference

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
RULES = {
    "adam": (2, [0.9, 0.99, 1e-8, 1.0]),
    "adam coupled, amsgrad": (3, [0.9, 0.99, 1e-8, 0.0]),
    "sgd": (0, [0.0, 0.0, 0.0]),
    "sgd with momentum": (1, [0.9, 0.0, 0.0]),
    "sgd with dampening": (1, [0.9, 0.3, 0.0]),
    "sgd nesterov": (1, [0.9, 0.0, 1.0]),
    "lion": (1, [0.9, 0.99]),
}
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
# Of one rounding to the stored dtype, and of float32 arithmetic before it.
TOLERANCE = {F64: 1e-14, F32: 1e-6, F16: 2e-3, BF16: 1e-2}


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
@pytest.mark.parametrize("rule", RULES)
def test_a_native_step_equals_the_reference(rule, storage):
    n_states, options = RULES[rule]
    numbers = dict(lr=0.01, weight_decay=0.1, maximize=True, ema_decay=0.9)
    ours, theirs = make(*storage, n_states), make(*storage, n_states)
    name = rule.split()[0]
    torch.ops.flatout.step_(
        name, *ours, [], options, **numbers, lr_tensor=None, seed=None, grad_factor=torch.tensor(0.5), found_inf=None
    )
    reference.step_(name, *theirs, options, **numbers, grad_factor=0.5)
    for kind, mine, other in zip("wgsnal", ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            if a.dtype == torch.int16:
                continue  # compared with the weights they complete
            tolerance = TOLERANCE[a.dtype]
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10, msg=lambda m, k=kind: f"{k}: {m}")
    if storage[3] == torch.int16:
        for w, low, v, rest in zip(ours[0], ours[5], theirs[0], theirs[5], strict=True):
            a, b = reference.join(w, low), reference.join(v, rest)
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            assert torch.equal(reference.split(a)[0], w), "the parameter is the weight rounded"
