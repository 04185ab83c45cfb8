"""Advice of a profile: sentences on the largest costs and their remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatout.core import formatting
from flatout.optim.fuse import FUSABLE
from flatout.profile.shown_profile import Profile, ms
from flatout.report.model import Row, untried

_WORTH = 0.05
"""Smallest share of a step that advice mentions."""

_LIMITS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "loader": ("Waiting for data takes {cost}. Make the samples cheaper.", ("workers", "in_memory")),
    "copy": ("Copying batches to the GPU takes {cost}.", ("pinned_memory", "prefetch")),
    "own code": (
        "The loop's own code, outside loading, forward, backward and update, takes {cost}. "
        "Evaluate, log, print and save less often, or from another thread.",
        (),
    ),
    "update": ("The optimizer's update takes {update}.", ("fused_optimizer",)),
    "launch": (
        "The GPU idles for {cost} during forward, backward and update. "
        "Python launches kernels too slowly, or waits at a sync point.",
        ("compile", "cuda_graph", "batch_size"),
    ),
    "operator": (
        "The costliest operator is {operator} of a profiled step.",
        ("precision", "channels_last", "compile"),
    ),
}
"""Sentence on each limit, and the techniques against the limit."""

_LINES: Mapping[str, str] = {
    "batch_size": "larger batches",
    "channels_last": "model.to(memory_format=torch.channels_last)",
    "compile": "torch.compile(model)",
    "cuda_graph": "a CUDA graph",
    "fused_optimizer": f"flatout.optim.fuse(optimizer) for {', '.join(FUSABLE)}",
    "pinned_memory": "pinned memory with non_blocking=True",
    "precision": "torch.autocast with bfloat16",
    "prefetch": "flatout.data.Prefetcher",
    "workers": "flatout.data.tune, which finds the workers and the cache that pay",
}
"""Code that tries a technique in a loop that flatout does not tune, by the technique's name."""


def advise(profile: Profile, rows: Sequence[Row] = ()) -> tuple[str, ...]:
    """Return the advice as sentences, the largest cost first.

    Args:
        profile: a profile without advice.
        rows: rows of the report on this training. Techniques that the report has decided are not advised.
    """
    costs = sorted(_costs(profile).items(), key=lambda item: -item[1])
    sentences = [_sentence(profile, rows, limit, cost) for limit, cost in costs if cost >= _WORTH * profile.seconds]
    if profile.profiled_steps and profile.device_busy is None and profile.on_gpu:
        refused = (
            "The profiler recorded no kernels, so times of operators are those of the host. Either the training runs "
            "on the CPU, or the driver refused to record: another profiler runs, or permission is missing."
        )
        return refused, *sentences
    return (*sentences, *_syncs(profile)) or ("Nothing sticks out: the time goes into many small things.",)


def _costs(profile: Profile) -> dict[str, float]:
    """Return the seconds per step that a remedy against each limit could save."""
    phases = profile.phases
    costs = {"loader": phases["loader_wait"], "copy": phases["h2d"], "own code": phases["host_idle"]}
    if profile.device_busy is not None:
        costs["launch"] = (1 - profile.device_busy) * profile.seconds - sum(costs.values())
    # An update only moves memory, so the update should cost at most a tenth of forward and backward.
    costs["update"] = phases["update"] - 0.1 * (phases["forward"] + phases["backward"])
    # The remedies do not apply to custom operators, operators of optimizers, and code of torch.compile.
    top = profile.operators[0] if profile.operators else None
    if top and top.name.startswith("aten::") and not top.name.startswith(("aten::_fused_", "aten::_foreach_")):
        costs["operator"] = 0.5 * top.share * profile.seconds  # assume that at best half of the time can be saved
    return costs


def _sentence(profile: Profile, rows: Sequence[Row], limit: str, cost: float) -> str:
    text, techniques = _LIMITS[limit]
    top = profile.operators[0] if limit == "operator" else None
    if top and "convolution" not in top.name:
        techniques = tuple(name for name in techniques if name != "channels_last")
    lines = [_LINES[name] for name in techniques if name in _LINES]
    if rows:
        lines = untried(rows, techniques)
    sentence = text.format(
        cost=f"{formatting.share(cost / profile.seconds)} of a step ({ms(cost)})",
        update=f"{ms(profile.phases['update'])} of a step",
        operator=top and f"{top.name} with {formatting.share(top.share)}",
    )
    return f"{sentence} {'To try' if rows else 'If not in use yet'}: {', '.join(lines)}." if lines else sentence


def _syncs(profile: Profile) -> list[str]:
    here = [f"{sync.where} ({sync.what})" for sync in profile.syncs if sync.where]
    if not here:
        return []
    lines = ", ".join(here[:3]) + (f" and {len(here) - 3} more" if len(here) > 3 else "")
    if not profile.on_gpu:
        return [f"On a GPU these lines would make Python wait, which costs nothing on this CPU: {lines}."]
    return [
        f"These lines make Python wait for the GPU: {lines}. Keep the value on the GPU (loss.detach()), and read it "
        "every 100 steps. torch's GradScaler waits in every step, flatout.amp's does not."
    ]
