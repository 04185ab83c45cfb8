"""The step operators in plain torch: float64 arithmetic, rounded once to each stored dtype.

What the native operators are tested against. Equals ``torch.ops.flatout.step_`` up to the rounding of its compute
type, except for stochastic rounding, which only statistics can test.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adam(w, g, states, step, lr, weight_decay, beta1, beta2, eps, decoupled):
    exp_avg, exp_avg_sq, *largest = states
    if not decoupled:
        g = g + weight_decay * w
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    largest = [torch.maximum(exp_avg_sq, largest[0])] if largest else []
    denominator = ((largest or [exp_avg_sq])[0] / (1 - beta2**step)).sqrt() + eps
    w = w * (1 - lr * weight_decay if decoupled else 1) - lr / (1 - beta1**step) * exp_avg / denominator
    return w, [exp_avg, exp_avg_sq, *largest]


def sgd(w, g, states, step, lr, weight_decay, momentum, dampening, nesterov):
    g = g + weight_decay * w
    if not states:
        return w - lr * g, []
    buffer = g if step == 1 else momentum * states[0] + (1 - dampening) * g
    return w - lr * (g + momentum * buffer if nesterov else buffer), [buffer]


def lion(w, g, states, step, lr, weight_decay, beta1, beta2):
    (exp_avg,) = states
    w = w * (1 - lr * weight_decay) - lr * (beta1 * exp_avg + (1 - beta1) * g).sign()
    return w, [beta2 * exp_avg + (1 - beta2) * g]


RULES = {"adam": adam, "sgd": sgd, "lion": lion}


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """The float32 weight behind a bfloat16 parameter and its int16 remainder."""
    upper = high.view(torch.int16).to(torch.int32) << 16
    weight = (upper + remainder.to(torch.int32)).view(torch.float32)
    return torch.where(weight.isnan(), upper.view(torch.float32), weight)  # somebody wrote a zero or an infinity


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 parameter nearest to a float32 weight (ties away from zero), and what it lacks."""
    bits = weight.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


@torch.no_grad()
def step_(
    rule: str,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    averages: Sequence[Tensor],
    lows: Sequence[Tensor],
    options: Sequence[float],
    *,
    lr: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    ema_decay: float = 0.0,
    grad_factor: float = 1.0,
) -> None:
    """One step in place. Without step counts no step is the first."""
    n = len(weights)
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        own = states[i::n]
        low = lows[i] if lows else None
        remainder = low is not None and low.dtype == torch.int16
        if steps:
            steps[i] += 1
        new, updated = RULES[rule](
            (join(w, low) if remainder else w).double(),
            g.double() * grad_factor * (-1 if maximize else 1),
            [state.double() for state in own],
            steps[i].item() if steps else 2,
            lr,
            weight_decay,
            *options,
        )
        for state, value in zip(own, updated, strict=True):
            state.copy_(value)
        if averages:
            averages[i].copy_(averages[i].double() + (1 - ema_decay) * (new - averages[i].double()))
        if remainder:
            high, rest = split(new.float())
            w.copy_(high), low.copy_(rest)
        else:
            w.copy_(new)
            if low is not None:
                low.copy_(w)
