"""Additional options of flatout's optimizers, and the state that a parameter has under these options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from flatout.core import dtensor
from flatout.optim.dynamic8 import SMALLEST

NEUTRAL: dict[str, Any] = {
    "master_weights": None,
    "moment_dtype": None,
    "stochastic_rounding": False,
    "seed": 0,
    "ema_decay": None,
    "low_precision_copy": None,
}
"""Additional options, with the values that change nothing.

A param group has only the options with other values, so that a group without additional options equals torch's.
"""

EXTRA_STATE = ("master", "remainder", "copy", "ema")
"""State keys that torch's classes do not have."""

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = ("moment_dtype", "low_precision_copy")
"""Options that are dtypes."""


@dataclass(frozen=True)
class StateLayout:
    """State of parameters of one dtype under the options of their group."""

    moments: torch.dtype
    extras: dict[str, torch.dtype]
    """Dtypes of the entries of :data:`EXTRA_STATE` that parameters have."""

    @property
    def has_master(self) -> bool:
        """True if the parameter is a rounded form of the weight that is updated."""
        return "master" in self.extras or "remainder" in self.extras


def form(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options that determine the state of a parameter, without numbers that may change between steps."""
    get = group.get
    return (
        get("master_weights"),
        get("moment_dtype"),
        bool(get("stochastic_rounding")),
        get("ema_decay") is not None,
        get("low_precision_copy"),
    )


def in_8_bits(group: dict[str, Any], p: Tensor) -> bool:
    """Return True if the group requests moments in 8 bits, and the parameter's size and dtype allow them.

    Raises:
        ValueError: the parameter is a DTensor.
    """
    wanted: bool = (
        group.get("moment_dtype") == torch.uint8
        and not is_lazy(p)
        and p.numel() >= SMALLEST
        and (p.dtype in _HALF or p.dtype == torch.float32)
    )
    if wanted and dtensor.is_distributed(p):
        # The absmaxes would have to be sharded over the ranks like the blocks.
        raise ValueError("moment_dtype=torch.uint8 is not for DTensors: use torch.bfloat16")
    return wanted


def layout(group: dict[str, Any], dtype: torch.dtype, in_8_bits: bool = False) -> StateLayout:
    """Return the state of parameters under the options of their group.

    Args:
        group: the param group.
        dtype: dtype of the parameters.
        in_8_bits: result of :func:`in_8_bits` for the parameters.

    Raises:
        ValueError: the options contradict each other for this dtype.
    """
    half = dtype in _HALF
    master = group.get("master_weights") if half else None
    if master == "remainder" and dtype != torch.bfloat16:
        raise ValueError(f"master_weights='remainder' is for bfloat16 parameters, got {dtype}: use 'float32'")
    extras = {}
    if master == "float32":
        extras["master"] = torch.float32
    elif master == "remainder":
        extras["remainder"] = torch.int16
    if dtype == torch.float32 and group.get("low_precision_copy") is not None:
        extras["copy"] = group["low_precision_copy"]
    if group.get("ema_decay") is not None:
        extras["ema"] = compute_dtype(dtype)
    moments = dtype
    if half or dtype == torch.float32:
        moments = group.get("moment_dtype") or (torch.float32 if master else dtype)
        if moments == torch.uint8 and not in_8_bits:
            moments = torch.float32
    halves = {d for d in (dtype, moments, *extras.values()) if d in _HALF}
    if len(halves) > 1:
        kept = ", ".join(f"{name} of {d}" for name, d in {"moments": moments, **extras}.items())
        raise ValueError(
            f"moment_dtype and low_precision_copy must use one 16-bit dtype with each other and with the parameter, "
            f"got a parameter of {dtype} with {kept}"
        )
    return StateLayout(moments, extras)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of ``dtype`` are computed and averaged."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_dtype(group: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which torch's optimizers create the step counts of ``group``."""
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if wide else torch.float32


def saved(group: dict[str, Any]) -> dict[str, Any]:
    """Return ``group`` for ``state_dict``: dtypes are names, because torch.distributed.checkpoint gathers no dtypes."""
    return {**group, **{name: str(group[name]) for name in _DTYPES if isinstance(group.get(name), torch.dtype)}}


def normalize(group: dict[str, Any]) -> None:
    """Check the additional options of ``group``, convert dtypes from names, and drop options that change nothing.

    Raises:
        ValueError: an option has an invalid value, or the options contradict each other for a parameter of the group.
    """
    for name in _DTYPES:
        if isinstance(group.get(name), str):
            group[name] = getattr(torch, group[name].removeprefix("torch."), group[name])
    check(group)
    for p in group.get("params", ()):
        layout(group, p.dtype, in_8_bits(group, p))
    for name, neutral in NEUTRAL.items():
        if name in group and group[name] == neutral:
            del group[name]


def check(options: dict[str, Any]) -> None:
    """Refuse invalid values of additional options.

    Raises:
        ValueError: the message has the option, its value and the valid values.
    """
    allowed: dict[str, tuple[Any, ...]] = {
        "master_weights": (None, "float32", "remainder"),
        "moment_dtype": (None, torch.float32, *_HALF, torch.uint8),
        "stochastic_rounding": (False, True),
        "low_precision_copy": (None, *_HALF),
    }
    for name, values in allowed.items():
        if options.get(name, values[0]) not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {options[name]!r}")
    seed, decay = options.get("seed", 0), options.get("ema_decay")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an int from 0 to 2**63 - 1, got {seed!r}")
    if decay is not None and not 0.0 <= decay <= 1.0:
        raise ValueError(f"ema_decay must be None or from 0 to 1, got {decay!r}")


def additions_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the additional options that ``group`` sets."""
    return {name: group[name] for name, neutral in NEUTRAL.items() if group.get(name, neutral) not in (neutral, None)}
