"""What costs most and what to do about it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core import formatting
from flatout.core.machine import usable_cores
from flatout.optim.fuse import FUSABLE
from flatout.profile.profile_data import Cause, ProfileData
from flatout.profile.sections import ms
from flatout.profile.trace import Trace

_WORTH = 0.05
"""Share of a step below which nothing is said."""

Advice = Iterator[tuple[float, str]]
"""Seconds per step that are at stake, and the sentence."""


def advise(profile: ProfileData, trace: Trace) -> tuple[str, ...]:
    """Sentences, the costliest matter first.

    Args:
        profile: all of it but this.
        trace: that it was made of.
    """
    on_gpu = bool(trace.device)
    told = [*_loader(profile, trace), *_own_code(profile, trace), *_update(profile, trace)]
    told += [*_idling(profile), *_operator(profile)]
    told.sort(key=lambda item: -item[0])
    sentences = [sentence for cost, sentence in told if cost >= _WORTH * profile.seconds]
    if not on_gpu and trace.on_cuda:
        refused = (
            "The trace has no kernels: the driver refused them (another profiler, or no right to). "
            "What follows is the host's view, in which waits for the GPU count as work."
        )
        sentences.insert(0, refused)
    elif not on_gpu:
        sentences += _would_wait(profile)
    elif profile.syncs and not any(gap.cause == "sync" for gap in profile.gaps):
        sentences.append("The syncs below cost nothing yet: the GPU has enough queued to bridge them.")
    return tuple(sentences) or ("Nothing sticks out: the time goes into many small things.",)


def _loader(profile: ProfileData, trace: Trace) -> Advice:
    cost = _idle(profile, "loader") if trace.device else profile.phases["loader_wait"]
    line = next(iter(trace.hot_lines("loader_wait")), "")
    if line:  # samples are made on this thread
        remedy = (
            f"Most of that is {line}: load in worker processes (DataLoader(..., "
            f"num_workers={min(4, usable_cores())}, persistent_workers=True)), make that code cheaper, or cache what "
            "it returns."
        )
    else:
        remedy = (
            "Give the DataLoader more workers, make its samples cheaper, or cache them: flatout.data.tune finds out."
        )
    yield cost, f"Waiting for data takes {_of_a_step(profile, cost)}. {remedy}"


def _own_code(profile: ProfileData, trace: Trace) -> Advice:
    cost = _idle(profile, "own code") if trace.device else profile.phases["host_idle"]
    line, most = next(iter(trace.hot_lines("host_idle").items()), ("", 0.0))
    where = f" Most of it is {line} ({ms(most)})." if most > cost / 4 else ""
    yield (
        cost,
        "The loop's own code, outside loading, forward, backward and update, takes "
        f"{_of_a_step(profile, cost)}.{where} Evaluate, log, print and save less often, or from another thread.",
    )


def _update(profile: ProfileData, trace: Trace) -> Advice:
    # An update is memory traffic, cheap beside forward and backward: only what is beyond a tenth of them is at stake.
    excess = profile.phases["update"] - 0.1 * (profile.phases["forward"] + profile.phases["backward"])
    names = {event.name for event in trace.host}
    if any(name.startswith(("aten::_fused_", "flatout::step")) for name in names):
        remedy = " in one fused pass: only fewer of them help, with gradients accumulated over more batches."
    elif any(f"Optimizer.step#{name}.step" in names for name in FUSABLE):
        remedy = (
            ". One fused pass does it in a fraction: flatout.optim.AdamW (or fused=True of torch's), or "
            "flatout.optim.fuse(optimizer)."
        )
    else:
        remedy = "."
    yield excess, f"The optimizer's update takes {ms(profile.phases['update'])} of a step{remedy}"


def _idling(profile: ProfileData) -> Advice:
    """What the gaps of a GPU tell, besides the loader's and the loop's own."""
    for gap in profile.gaps:
        if gap.cause == "sync":
            yield (
                gap.seconds,
                f"The wait for the GPU at {gap.where} lets it run dry: it idles for "
                f"{_of_a_step(profile, gap.seconds)} afterwards. Keep the value on the GPU (loss.detach()), and look "
                "at it every 100 steps; torch's GradScaler waits in every step, flatout.amp's does not.",
            )
    cost = _idle(profile, "launch")
    phases = sorted({gap.phase for gap in profile.gaps if gap.cause == "launch"})
    yield (
        cost,
        f"The GPU finishes kernels faster than Python launches them ({', '.join(phases)}): it idles for "
        f"{_of_a_step(profile, cost)}. Larger batches, torch.compile(model, mode='reduce-overhead') or a CUDA graph "
        "help.",
    )
    cost = _idle(profile, "copy")
    yield (
        cost,
        f"Copying batches to the GPU keeps it idle for {_of_a_step(profile, cost)}. Pinned memory and "
        "non_blocking=True, or flatout.data.Prefetcher, copy while it computes.",
    )


def _operator(profile: ProfileData) -> Advice:
    # Custom operators, optimizers' and what torch.compile wrote are as they are.
    top = next(iter(profile.operators), None)
    if top is None or not top.name.startswith("aten::") or top.name.startswith(("aten::_fused_", "aten::_foreach_")):
        return
    where = f", most of it for {top.where}" if top.where else ""
    on_gpu = bool(profile.device_phases)
    means = "bf16 autocast, channels_last (convolutions) and torch.compile" if on_gpu else "torch.compile and bf16"
    yield (
        0.5 * top.share * profile.seconds,  # half of it at the best: computing is what the step is for
        f"The costliest operator is {top.name} with {formatting.share(top.share)} of a step{where}. {means} may "
        "speed it up; flatout.optimize measures whether they do.",
    )


def _would_wait(profile: ProfileData) -> list[str]:
    here = [f"{sync.where} ({sync.what})" for sync in profile.syncs if sync.where]
    if not here:
        return []
    more = f" and {len(here) - 3} more" if len(here) > 3 else ""
    return [f"On a GPU these would make Python wait for it, for free on this CPU: {', '.join(here[:3])}{more}."]


def _idle(profile: ProfileData, cause: Cause) -> float:
    return sum(gap.seconds for gap in profile.gaps if gap.cause == cause)


def _of_a_step(profile: ProfileData, cost: float) -> str:
    return f"{formatting.share(cost / profile.seconds)} of a step ({ms(cost)})"
