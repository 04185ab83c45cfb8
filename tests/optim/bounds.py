"""Arithmetic of the update path in float64. Each number has a bound on its float32 error.

The expressions follow the papers and torch's documentation line by line, and share no code with the library. A float32
kernel may compute the expressions in any order, with or without fused multiply-adds, and rounds once when it stores.
The stored value must be the rounding of some number within the bounds. :func:`assert_rounded_once` accepts no other
value, in any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Four half-units in the last place for every operation, because kernels fold constants (lr / bias correction) that
# are separate here. One operation of a kernel is then several operations here, in another order.
UNIT = {torch.float32: 4 * 2.0**-24, torch.float64: 4 * 2.0**-53}
TINY = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}


class Near:
    """Number or tensor in float64, with the possible error of arithmetic in ``dtype``."""

    def __init__(self, value: Any, error: Any = 0.0, dtype: torch.dtype = torch.float32):
        self.value = torch.as_tensor(value, dtype=torch.float64)
        self.error = torch.as_tensor(error, dtype=torch.float64)
        self.dtype = dtype

    def _result(self, value: Tensor, error: Tensor) -> Near:
        return Near(value, error + value.abs() * UNIT[self.dtype] + TINY[self.dtype], self.dtype)

    def _other(self, other: Any) -> Near:
        """Convert a given number, which is exact in float64 and rounded once in ``dtype``."""
        return other if isinstance(other, Near) else Near(other, abs(other) * UNIT[self.dtype], self.dtype)

    def __add__(self, other: Any) -> Near:
        other = self._other(other)
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Any) -> Near:
        return self + self._other(other) * -1

    def __mul__(self, other: Any) -> Near:
        other = self._other(other)
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return self._result(self.value * other.value, error)

    def __truediv__(self, other: Any) -> Near:
        other = self._other(other)
        smallest = (other.value.abs() - other.error).clamp(min=0)
        quotient = self.value / other.value
        return self._result(quotient, (self.error + quotient.abs() * other.error) / smallest)

    def sqrt(self) -> Near:
        low, high = ((self.value + sign * self.error).clamp(min=0).sqrt() for sign in (-1, 1))
        return self._result(self.value.sqrt(), high - low)

    def maximum(self, other: Near) -> Near:
        return Near(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error), self.dtype)

    @property
    def low(self) -> Tensor:
        return self.value - self.error

    @property
    def high(self) -> Tensor:
        return self.value + self.error


def assert_rounded_once(actual: Tensor, expected: Near, what: str = "") -> None:
    """Check that ``actual`` is the rounding to nearest of some number within the bounds of ``expected``.

    Rounding is monotone, so ``actual`` lies between the two rounded bounds. In 16-bit dtypes these bounds are mostly
    equal. They differ if the float64 result is within float32 error of a boundary.
    """
    low, high = expected.low.to(actual.dtype), expected.high.to(actual.dtype)
    right = (low <= actual) & (actual <= high)
    assert right.all(), _complaint(actual, expected, low, high, right, what)


def assert_rounded_either_way(actual: Tensor, expected: Near, what: str = "") -> None:
    """Check that ``actual`` (bfloat16) is a neighbor of a number within the bounds, as stochastic rounding may give."""
    low, high = _truncated(expected.low, torch.floor), _truncated(expected.high, torch.ceil)
    right = (low <= actual.double()) & (actual.double() <= high)
    assert right.all(), _complaint(actual, expected, low, high, right, what)


def _truncated(value: Tensor, direction: Any) -> Tensor:
    """Return ``value`` rounded to bfloat16 down (floor) or up (ceil), in float64."""
    _, exponent = torch.frexp(value)
    unit = torch.exp2(exponent.clamp(min=-125).double() - 8)  # 8 significant bits, and subnormals share the last unit
    return direction(value / unit) * unit


def _complaint(actual: Tensor, expected: Near, low: Tensor, high: Tensor, right: Tensor, what: str) -> str:
    i = int((~right).flatten().nonzero()[0])
    at = [t.expand(right.shape).flatten()[i].item() for t in (actual, expected.value, expected.error, low, high)]
    return f"{what}[{i}] of {right.shape}: {at[0]!r}, want {at[1]!r} ± {at[2]:.2g}: between {at[3]!r} and {at[4]!r}"


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 weight of a bfloat16 parameter and its int16 remainder.

    The bits of the weight are (bfloat16 bits << 16) + remainder. If other code has written a zero or an infinity to the
    parameter, these bits may be a NaN. The weight then equals the parameter.
    """
    upper = high.contiguous().view(torch.int16).to(torch.int32) << 16
    weight = (upper + remainder.to(torch.int32)).view(torch.float32)
    return torch.where(weight.isnan(), upper.view(torch.float32), weight)


def away_from_zero(weight: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16, ties away from zero."""
    bits = weight.contiguous().view(torch.int32).long() + 0x8000
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


# ---- moments in 8 bits: Dettmers et al. 2022 ---------------------------------------------------------------


def dynamic_map(has_sign: bool) -> Tensor:
    """Return the dynamic tree map of the paper, decade by decade: [256] float64, ascending."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, (2**i if has_sign else 2 ** (i + 1)) + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        numbers += middles + [-number for number in middles if has_sign]
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def nearest_code(ratio: Tensor, has_sign: bool) -> Tensor:
    """Return the codes of the nearest numbers. Ties round away from 0. Without sign no positive number becomes 0."""
    numbers = dynamic_map(has_sign)
    halfway = (numbers[:-1] + numbers[1:]) / 2
    codes = torch.where(ratio < 0, torch.bucketize(ratio, halfway), torch.bucketize(ratio, halfway, right=True))
    return codes if has_sign else torch.where(ratio > 0, codes.clamp(min=1), codes)


def in_memory_order(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements of a dense tensor in the order of memory of this tensor, or of ``like``."""
    if like is not None:
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def decoded(codes: Tensor, absmax: Tensor, has_sign: bool) -> Tensor:
    """Return the numbers of the codes in float64, with the shape and strides of the codes."""
    scale = absmax.double().repeat_interleave(256)[: codes.numel()]
    result = torch.empty_like(codes, dtype=torch.float64)
    in_memory_order(result).copy_(dynamic_map(has_sign)[in_memory_order(codes).long()] * scale)
    return result


SMALLEST_SCALE = 2.0**-100


def assert_encoded(codes: Tensor, absmax: Tensor, expected: Near, has_sign: bool, what: str = "") -> None:
    """Check that codes and absmaxes are the 8-bit encoding of some numbers within the bounds of ``expected``.

    Encoding is monotone, so each code lies between the codes of both bounds, divided by the block's absmax. In float32,
    the quotient and the middle between two codes are known to a few units in the last place.
    """
    low, high = (in_memory_order(bound.expand(codes.shape), codes) for bound in (expected.low, expected.high))
    assert codes.dtype == torch.uint8
    assert (absmax.dtype, absmax.shape) == (torch.float32, (-(-codes.numel() // 256),)), what
    greatest = torch.maximum(low.abs(), high.abs())
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    for bound, holds in ((least, torch.ge), (greatest, torch.le)):
        blocks = torch.nn.functional.pad(bound, (0, -bound.numel() % 256)).view(-1, 256).amax(1).float()
        blocks = torch.where(blocks > 0, blocks.clamp(min=SMALLEST_SCALE), blocks)
        assert holds(absmax, blocks).all(), what
    scale = absmax.double().repeat_interleave(256)[: codes.numel()]
    scale = torch.where(scale > 0, scale, 1.0)
    slack = 4 * 2.0**-24
    first = nearest_code(low / scale - slack * (low / scale).abs(), has_sign)
    last = nearest_code(high / scale + slack * (high / scale).abs(), has_sign)
    found = in_memory_order(codes).long()
    right = (first <= found) & (found <= last)
    if not right.all():
        i = int((~right).nonzero()[0])
        raise AssertionError(f"{what}[{i}]: code {found[i]}, want {first[i]} to {last[i]}")
