"""Call of an operator and its cost in FLOPs, as the formulas take and return them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True)
class Cost:
    """FLOPs of one call.

    Attributes:
        needed: FLOPs of the model's mathematics, without the pairs that a causal mask removes.
        dense: FLOPs of the model's mathematics, with all pairs of causal attention.
        again: FLOPs that the kernel recomputes to save memory, such as the scores in a fused attention's backward.
    """

    needed: int
    dense: int
    again: int = 0

    def scaled(self, numerator: int, denominator: int) -> Cost:
        """Return the cost with ``needed`` reduced to the share ``numerator / denominator``."""
        return Cost(self.needed * numerator // denominator, self.dense, self.again)


@dataclass(frozen=True)
class Call:
    """Call of an operator.

    Attributes:
        arguments: arguments by their names in the operator's schema, defaults included.
        result: the operator's result.
    """

    arguments: Mapping[str, Any]
    result: Any

    @classmethod
    def of(cls, op: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Call:
        """Return the call of an operator with these arguments and this result."""
        names = op._schema.arguments
        arguments = {a.name: a.default_value for a in names if a.has_default_value()}
        arguments.update((a.name, value) for a, value in zip(names, args, strict=False))
        return cls({**arguments, **keywords}, result)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return the argument, or None if the operator has no argument of that name."""
        return self.arguments.get(name)


Formula = Callable[[Call], Cost]


def exactly(flops: int) -> Cost:
    """Return the cost of a call without masked pairs and without recomputation."""
    flops = int(flops)  # sizes may be symbolic
    return Cost(flops, flops)


def is_abstract(tensor: Tensor) -> bool:
    """Return True if a tensor has a shape but no entries."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)
