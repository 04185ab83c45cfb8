"""Table of flatout's optimizers, with the arithmetic of each in float64.

The arithmetic is from the papers and from torch's documentation, and shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import flatout.optim as fo
from tests.optim.bounds import Near

Options = dict[str, Any]


def adam(
    weight: Near, grad: Near, states: list[Near], step: int, *, lr: float, betas: Any, eps: float, weight_decay: float,
    amsgrad: bool, decoupled: bool,
) -> tuple[Near, list[Near]]:  # fmt: skip
    """Step by Kingma & Ba 2015, algorithm 1, amsgrad by Reddi et al. 2018, decay by Loshchilov & Hutter 2019.

    ``states`` are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq. ``step`` is the number of this update, from 1.
    """
    beta1, beta2 = betas
    if decoupled:
        weight = weight * (1 - lr * weight_decay)
    else:
        grad = grad + weight * weight_decay
    first = states[0] * beta1 + grad * (1 - beta1)
    second = states[1] * beta2 + grad * grad * (1 - beta2)
    largest = states[2].maximum(second) if amsgrad else second
    update = first / (1 - beta1**step) / ((largest / (1 - beta2**step)).sqrt() + eps)
    return weight - update * lr, [first, second, *([largest] if amsgrad else [])]


def sgd(
    weight: Near, grad: Near, states: list[Near], step: int, *, lr: float, weight_decay: float,
    momentum: float = 0, dampening: float = 0, nesterov: bool = False,
) -> tuple[Near, list[Near]]:  # fmt: skip
    """Step by Sutskever et al. 2013 in torch's form. The first step sets the buffer to the gradient."""
    direction = grad + weight * weight_decay
    if not momentum:
        return weight - direction * lr, []
    buffer = direction if step == 1 else states[0] * momentum + direction * (1 - dampening)
    direction = direction + buffer * momentum if nesterov else buffer
    return weight - direction * lr, [buffer]


def lion(
    weight: Near, grad: Near, states: list[Near], step: int, *, lr: float, betas: Any, weight_decay: float
) -> tuple[Near, list[Near]]:
    """Step by Chen et al. 2023, algorithm 2.

    If float32 cannot determine the sign of a direction, both signs are allowed.
    """
    beta1, beta2 = betas
    direction = states[0] * beta1 + grad * (1 - beta1)
    unsure = direction.value.abs() <= direction.error
    # Exact zeros (no gradient, no momentum) stay zero, because they cannot be rounded.
    unsure &= (states[0].value != 0) | (grad.value != 0)
    sign = Near(direction.value.sign(), unsure.double() * 2, weight.dtype)
    momentum = states[0] * beta2 + grad * (1 - beta2)
    return weight * (1 - lr * weight_decay) - sign * lr, [momentum]


@dataclass(frozen=True)
class Rule:
    """Optimizer of flatout with its reference, and the options that tests give it.

    Attributes:
        torch_class: class of torch, or flatout's own loop for an optimizer that torch lacks.
        reference: one update of a weight in float64. Its keyword arguments are options of a param group.
        operator: name of the rule in csrc/optim/rules.h.
        numbers: numbers that the operator takes under the options of a variant, in its order.
        states: keys of the moments in ``optimizer.state[p]`` under some options, in the operator's order.
        variants: options of each form of the arithmetic, by name.
        options: options under which the rule keeps state.
        varied: options that add something, such as more state, dampening or decay.
    """

    torch_class: type[torch.optim.Optimizer]
    reference: Callable[..., tuple[Near, list[Near]]]
    operator: str
    numbers: Callable[[Options], list[float]]
    states: Callable[[Options], list[str]]
    variants: dict[str, Options]
    options: Options
    varied: Options

    @property
    def with_state(self) -> list[Options]:
        """Variants that keep state."""
        return [options for options in self.variants.values() if self.states(options)]


def _adam_states(options: Options) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]


_ADAM = {"betas": (0.9, 0.99), "eps": 1e-8}
_SGD = {"momentum": 0.9, "dampening": 0, "nesterov": False}

RULES = {
    "AdamW": Rule(
        torch_class=torch.optim.AdamW,
        reference=partial(adam, decoupled=True),
        operator="adam",
        numbers=lambda options: [*options["betas"], options["eps"], 1.0],
        states=_adam_states,
        variants={"adamw": _ADAM | {"amsgrad": False}, "adamw, amsgrad": _ADAM | {"amsgrad": True}},
        options={},
        varied={"amsgrad": True},
    ),
    "Adam": Rule(
        torch_class=torch.optim.Adam,
        reference=partial(adam, decoupled=False),
        operator="adam",
        numbers=lambda options: [*options["betas"], options["eps"], 0.0],
        states=_adam_states,
        # The order is not that of AdamW, so that tests of the last variants cover both forms.
        variants={"adam, amsgrad": _ADAM | {"amsgrad": True}, "adam": _ADAM | {"amsgrad": False}},
        options={},
        varied={"weight_decay": 0.1},
    ),
    "SGD": Rule(
        torch_class=torch.optim.SGD,
        reference=sgd,
        operator="sgd",
        numbers=lambda options: [options["momentum"], options["dampening"], float(options["nesterov"])],
        states=lambda options: ["momentum_buffer"] if options.get("momentum") else [],
        variants={
            "sgd": _SGD | {"momentum": 0},
            "sgd, momentum": _SGD,
            "sgd, dampening": _SGD | {"dampening": 0.3},
            "sgd, nesterov": _SGD | {"nesterov": True},
        },
        options={"momentum": 0.9},
        varied={"momentum": 0.9, "dampening": 0.3},
    ),
    "Lion": Rule(
        torch_class=fo.Lion._torch_class,
        reference=lion,
        operator="lion",
        numbers=lambda options: list(options["betas"]),
        states=lambda options: ["exp_avg"],
        variants={"lion": {"betas": (0.9, 0.99)}},
        options={},
        varied={"weight_decay": 0.1},
    ),
}
NAMES = list(RULES)
IN_TORCH = [name for name, rule in RULES.items() if rule.torch_class.__module__.startswith("torch.")]
"""Optimizers that ``fuse`` converts."""

VARIANTS = {label: (rule, options) for rule in RULES.values() for label, options in rule.variants.items()}
"""Rule and options of each variant of all rules."""
