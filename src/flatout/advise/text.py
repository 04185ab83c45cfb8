"""Sentences of ``flatout advise``, by code."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.advise.batch_trial import TIMES
from flatout.advise.causes import BoxName, Cause, Code

BOXES: Mapping[BoxName, str] = {
    "device": "tensors moved to the GPU",
    "loading": "loader workers and pinned memory",
    "precision": "mixed precision",
    "evaluation": "evaluation without gradients",
}

MARKS: Mapping[bool | None, tuple[str, str]] = {
    True: ("[x]", "green"),
    False: ("[ ]", "bold red"),
    None: ("[-]", "dim"),
}
"""Mark and style of a box that is ticked, crossed, or not applicable."""

_EXPLANATIONS: Mapping[Code, str] = {
    "on_cpu": 'the model trains on the CPU beside a GPU. Move it: model.to("cuda")',
    "starved_loader": "{share} of a step waits for data, with {workers} workers. {remedy}",
    "sync_in_loop": "on a GPU, {call} in every step waits for all earlier work. Keep the tensor, and read it every "
    "100 steps",
    "fp32_matmuls": "fp32 products take {share} of a step. {remedy}",
    "tiny_batches": f"batches {{batch}} are small: {TIMES} times the samples take {{times}} times as long. "
    "Raise the batch size",
    "evaluation_with_gradients": "{module} records gradients that no backward uses. Use torch.no_grad()",
}

_REMEDIES: Mapping[str, str] = {
    "more_workers": "Add workers",
    "cheaper_samples": "More workers would not help. Make samples cheaper, or keep them in memory",
    "autocast": "Use torch.autocast",
    "no_bf16": "bf16 is not faster on this device",
}
"""Remedies of causes that have several possible remedies."""


def explanation(cause: Cause) -> str:
    """Return a sentence on a cause and its remedy."""
    values = {**cause.values, "remedy": _REMEDIES.get(cause.values.get("remedy", ""), "")}
    return " ".join(_EXPLANATIONS[cause.code].format_map(values).split())
