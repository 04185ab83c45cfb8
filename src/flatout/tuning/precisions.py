"""Names of precisions in flatout, torch, Lightning, accelerate and transformers."""

from __future__ import annotations

from typing import Any

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")

OTHER_NAMES = {
    "fp32": ("float32", "float", "32", "32-true", "no"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16", "bf16-mixed"),
    "fp16": ("float16", "half", "16", "16-mixed"),
}
"""Names of the precision of products in other libraries.

Names of a precision of the parameters, such as "bf16-true", are not accepted.
"""

_BY_NAME = {name: own for own in PRECISIONS for name in (own, *OTHER_NAMES.get(own, ()))}


def precision_of(value: Any) -> str:
    """Return flatout's name of a precision, such as ``"bf16"`` for ``torch.bfloat16`` and ``"bf16-mixed"``.

    Raises:
        ValueError: ``value`` names no precision.
    """
    own = _BY_NAME.get(str(value).removeprefix("torch.").lower())
    if own is None:
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {value!r}")
    return own
