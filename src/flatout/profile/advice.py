"""What costs most and what to do about it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flatout.data.machine import usable_cores
from flatout.profile import wording
from flatout.profile.summary import Gaps, Operator, Phase, Sync
from flatout.profile.trace import Trace

_WORTH = 0.05
"""Share of a step below which nothing is said."""

Advice = tuple[float, str]
"""Seconds per step that are at stake, and the sentence."""


def advise(
    trace: Trace,
    seconds: float,
    phases: Mapping[Phase, float],
    operators: tuple[Operator, ...],
    gaps: tuple[Gaps, ...],
    syncs: tuple[Sync, ...],
) -> tuple[str, ...]:
    """Sentences, the costliest matter first.

    Args:
        trace: what was recorded.
        seconds: per step.
        phases: seconds per step and part.
        operators: costliest first.
        gaps: why a GPU idled; empty without one.
        syncs: where the host waits, or would wait for one.
    """
    on_gpu = bool(trace.device)
    told = [*_loader(trace, phases, gaps, on_gpu), *_own_code(trace, phases, gaps, on_gpu), *_update(trace, phases)]
    told += [*_waits(gaps), *_launches(gaps), *_copies(gaps)] if on_gpu else []
    told += _operator(operators, on_gpu)
    worth = sorted((item for item in told if item[0] >= _WORTH * seconds), key=lambda item: -item[0])
    sentences = [sentence.format(share=wording.share(cost, seconds), time=wording.ms(cost)) for cost, sentence in worth]
    if not on_gpu and trace.on_cuda:
        sentences.insert(
            0,
            "The trace has no kernels: the driver refused them (another profiler, or no right to). "
            "What follows is the host's view, in which waits for the GPU count as work.",
        )
    elif not on_gpu:
        sentences += _would_wait(syncs)
    elif syncs and not any(gap.cause == "sync" for gap in gaps):
        sentences.append("The syncs below cost nothing yet: the GPU has enough queued to bridge them.")
    return tuple(sentences) or ("Nothing sticks out: the time goes into many small things.",)


def _loader(trace: Trace, phases: Mapping[Phase, float], gaps: tuple[Gaps, ...], on_gpu: bool) -> Iterator[Advice]:
    cost = _idle(gaps, "loader") if on_gpu else phases["loader_wait"]
    line = next(iter(trace.hot_lines("loader_wait")), "")
    if line:  # samples are made on this thread
        remedy = (
            f"Most of that is {_text(line)}: load in worker processes (DataLoader(..., "
            f"num_workers={min(4, usable_cores())}, persistent_workers=True)), make that code cheaper, or cache what "
            "it returns."
        )
    else:
        remedy = (
            "Give the DataLoader more workers, make its samples cheaper, or cache them: flatout.data.tune finds out."
        )
    yield cost, "Waiting for data takes {share} of a step ({time}). " + remedy


def _own_code(trace: Trace, phases: Mapping[Phase, float], gaps: tuple[Gaps, ...], on_gpu: bool) -> Iterator[Advice]:
    cost = _idle(gaps, "own code") if on_gpu else phases["host_idle"]
    lines = trace.hot_lines("host_idle")
    line = next(iter(lines), "")
    where = f" Most of it is {_text(line)} ({wording.ms(lines[line])})." if line and lines[line] > cost / 4 else ""
    yield (
        cost,
        "The loop's own code, outside loading, forward, backward and update, takes {share} of a step ({time})."
        + where
        + " Evaluate, log, print and save less often, or from another thread.",
    )


def _update(trace: Trace, phases: Mapping[Phase, float]) -> Iterator[Advice]:
    # An update is memory traffic, cheap beside forward and backward: only what is beyond a tenth of them is at stake.
    excess = phases["update"] - 0.1 * (phases["forward"] + phases["backward"])
    names = {event.name for event in trace.host}
    if any(name.startswith(("aten::_fused_", "flatout::step")) for name in names):
        remedy = " in one fused pass: only fewer of them help, with gradients accumulated over more batches."
    elif any(f"Optimizer.step#{name}.step" in names for name in ("Adam", "AdamW", "SGD")):
        remedy = (
            ". One fused pass does it in a fraction: flatout.optim.AdamW (or fused=True of torch's), or "
            "flatout.optim.fuse(optimizer)."
        )
    else:
        remedy = "."
    yield excess, f"The optimizer's update takes {wording.ms(phases['update'])} of a step{remedy}"


def _waits(gaps: tuple[Gaps, ...]) -> Iterator[Advice]:
    for gap in gaps:
        if gap.cause == "sync":
            yield (
                gap.seconds,
                f"The wait for the GPU at {_text(gap.where)} lets it run dry: it idles for {{share}} of a step "
                "({time}) afterwards. Keep the value on the GPU (loss.detach()), and look at it every 100 steps; "
                "torch's GradScaler waits in every step, flatout.amp's does not.",
            )


def _launches(gaps: tuple[Gaps, ...]) -> Iterator[Advice]:
    cost = _idle(gaps, "launch")
    phases = sorted({gap.phase for gap in gaps if gap.cause == "launch"})
    yield (
        cost,
        f"The GPU finishes kernels faster than Python launches them ({', '.join(phases)}): it idles for {{share}} of a "
        "step ({time}). Larger batches, torch.compile(model, mode='reduce-overhead') or a CUDA graph help.",
    )


def _copies(gaps: tuple[Gaps, ...]) -> Iterator[Advice]:
    yield (
        _idle(gaps, "copy"),
        "Copying batches to the GPU keeps it idle for {share} of a step ({time}). Pinned memory and "
        "non_blocking=True, or flatout.data.Prefetcher, copy while it computes.",
    )


def _operator(operators: tuple[Operator, ...], on_gpu: bool) -> Iterator[Advice]:
    # Custom operators, optimizers' and what torch.compile wrote are as they are.
    top = next(iter(operators), None)
    if top is None or not top.name.startswith("aten::") or top.name.startswith(("aten::_fused_", "aten::_foreach_")):
        return
    where = f", most of it for {_text(top.where)}" if top.where else ""
    means = "bf16 autocast, channels_last (convolutions) and torch.compile" if on_gpu else "torch.compile and bf16"
    # Half of it at the best: computing is what the step is for.
    cost = 0.5 * (top.device_seconds if on_gpu else top.host_seconds)
    yield (
        cost,
        f"The costliest operator is {_text(top.name)} with {wording.share(top.share, 1)} of a step{where}. {means} may "
        "speed it up; flatout.optimize measures whether they do.",
    )


def _would_wait(syncs: tuple[Sync, ...]) -> list[str]:
    here = [f"{sync.where} ({sync.what})" for sync in syncs if sync.where]
    if not here:
        return []
    more = f" and {len(here) - 3} more" if len(here) > 3 else ""
    return [f"On a GPU these would make Python wait for it, for free on this CPU: {', '.join(here[:3])}{more}."]


def _idle(gaps: tuple[Gaps, ...], cause: str) -> float:
    return sum(gap.seconds for gap in gaps if gap.cause == cause)


def _text(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
