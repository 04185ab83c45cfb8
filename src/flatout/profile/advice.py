"""What costs most and what to do about it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.core import formatting
from flatout.core.machine import usable_cores
from flatout.optim.fuse import FUSABLE
from flatout.profile.in_use import techniques_in_use
from flatout.profile.profile_data import Cause, Phase, ProfileData
from flatout.profile.sections import ms
from flatout.profile.trace import Trace
from flatout.report.model import Row
from flatout.report.remedies import untried

_WORTH = 0.05
"""Share of a step below which nothing is said."""

_LINES: dict[str, str] = {
    "batch_size": "larger batches",
    "channels_last": "model.to(memory_format=torch.channels_last)",
    "compile": "torch.compile(model)",
    "cuda_graph": "a CUDA graph",
    "in_memory": "a cache of the samples",
    "pinned_memory": "pinned memory with non_blocking=True",
    "precision": "torch.autocast with bfloat16",
    "prefetch": "flatout.data.Prefetcher",
    "workers": f"DataLoader(..., num_workers={min(4, usable_cores())}, persistent_workers=True)",
}
"""What tries a technique in a loop that flatout does not tune, by the technique's name."""

Advice = Iterator[tuple[float, str]]
"""Seconds per step that are at stake, and the sentence."""


def advise(profile: ProfileData, trace: Trace | None, rows: Sequence[Row] = ()) -> tuple[str, ...]:
    """Return sentences, the costliest matter first.

    Args:
        profile: all of it but this.
        trace: of its profiled steps; None if there were none.
        rows: of the report on this training. What they decide is not advised, and neither is what the trace shows in
            use.
    """
    adviser = _Adviser(profile, trace, rows)
    found = [item for item in adviser.matters() if item[0] >= _WORTH * profile.seconds]
    found.sort(key=lambda item: -item[0])
    sentences = [sentence for _, sentence in found]
    if trace is not None and trace.on_cuda and not trace.device:
        refused = (
            "The trace has no kernels: the driver refused them (another profiler, or no right to). "
            "What follows is the host's view, in which waits for the GPU count as work."
        )
        sentences.insert(0, refused)
    elif not profile.device_phases:
        sentences += _would_wait(profile)
    elif profile.syncs and not any(gap.cause == "sync" for gap in profile.gaps):
        sentences.append("The syncs below cost nothing yet: the GPU has enough queued to bridge them.")
    return tuple(sentences) or ("Nothing sticks out: the time goes into many small things.",)


class _Adviser:
    """Sentences about a profile, with the techniques that are left to try."""

    def __init__(self, profile: ProfileData, trace: Trace | None, rows: Sequence[Row]) -> None:
        self._profile, self._trace, self._rows = profile, trace, rows
        self._in_use = set() if trace is None else techniques_in_use(trace)

    def matters(self) -> Advice:
        """Yield every matter of the profile."""
        yield self._loader()
        yield self._own_code()
        yield self._update()
        yield from self._idling()
        yield from self._operator()

    def _to_try(self, *techniques: str) -> str:
        """Return a sentence that names those of ``techniques`` that are left to try; empty if there is none."""
        left = [name for name in techniques if name not in self._in_use]
        lines = untried(self._rows, left) if self._rows else [_LINES[name] for name in left]
        return f" To try: {', '.join(lines)}." if lines else ""

    def _loader(self) -> tuple[float, str]:
        cost = self._cost("loader", self._profile.phases["loader_wait"])
        line = next(iter(self._hot_lines("loader_wait")), "")
        if line:  # samples are made on this thread
            remedy = f"Most of that is {line}: make that code cheaper.{self._to_try('workers', 'in_memory')}"
        elif self._rows:
            remedy = f"Make the samples cheaper.{self._to_try('workers', 'in_memory')}"
        else:
            remedy = "Make the samples cheaper. flatout.data.tune finds the workers and the cache that pay."
        return cost, f"Waiting for data takes {self._of_a_step(cost)}. {remedy}"

    def _own_code(self) -> tuple[float, str]:
        cost = self._cost("own code", self._profile.phases["host_idle"])
        line, most = next(iter(self._hot_lines("host_idle").items()), ("", 0.0))
        where = f" Most of it is {line}." if most > (self._profile.distortion or 1.0) * cost / 4 else ""
        return (
            cost,
            "The loop's own code, outside loading, forward, backward and update, takes "
            f"{self._of_a_step(cost)}.{where} Evaluate, log, print and save less often, or from another thread.",
        )

    def _update(self) -> tuple[float, str]:
        # An update is memory traffic, cheap beside forward and backward: what exceeds a tenth of them is at stake.
        phases = self._profile.phases
        names = set() if self._trace is None else {event.name for event in self._trace.host}
        remedy = "."
        if "fused_optimizer" in self._in_use:
            remedy = " in one fused pass: only fewer of them help, with gradients accumulated over more batches."
        elif self._rows:
            remedy = f".{self._to_try('fused_optimizer')}"
        elif any(f"Optimizer.step#{name}.step" in names for name in FUSABLE):
            remedy = (
                ". One fused pass does it in a fraction: flatout.optim.AdamW (or fused=True of torch's), or "
                "flatout.optim.fuse(optimizer)."
            )
        excess = phases["update"] - 0.1 * (phases["forward"] + phases["backward"])
        return excess, f"The optimizer's update takes {ms(phases['update'])} of a step{remedy}"

    def _idling(self) -> Advice:
        """What the gaps of a GPU tell, besides the loader's and the loop's own."""
        for gap in self._profile.gaps:
            if gap.cause == "sync":
                yield (
                    gap.seconds,
                    f"The wait for the GPU at {gap.where} lets it run dry: it idles for "
                    f"{self._of_a_step(gap.seconds)} afterwards. Keep the value on the GPU (loss.detach()), and look "
                    "at it every 100 steps; torch's GradScaler waits in every step, flatout.amp's does not.",
                )
        cost = self._idle("launch")
        phases = sorted({gap.phase for gap in self._profile.gaps if gap.cause == "launch"})
        yield (
            cost,
            f"The GPU finishes kernels faster than Python launches them ({', '.join(phases)}): it idles for "
            f"{self._of_a_step(cost)}.{self._to_try('compile', 'cuda_graph', 'batch_size')}",
        )
        cost = self._idle("copy")
        remedy = "" if self._rows else self._to_try("pinned_memory", "prefetch")
        yield cost, f"Copying batches to the GPU keeps it idle for {self._of_a_step(cost)}.{remedy}"

    def _operator(self) -> Advice:
        # Custom operators, optimizers' and what torch.compile wrote are as they are.
        top = next(iter(self._profile.operators), None)
        if (
            top is None
            or not top.name.startswith("aten::")
            or top.name.startswith(("aten::_fused_", "aten::_foreach_"))
        ):
            return
        where = f", most of it for {top.where}" if top.where else ""
        formats = ("channels_last",) if "convolution" in top.name else ()
        remedy = self._to_try("precision", *formats, "compile")
        yield (
            0.5 * top.share * self._profile.seconds,  # half of it at the best: computing is what the step is for
            f"The costliest operator is {top.name} with {formatting.share(top.share)} of a profiled step{where}."
            f"{remedy}",
        )

    def _cost(self, cause: Cause, on_host: float) -> float:
        """Return the seconds that a cause takes: idle time of a GPU, else time of the host."""
        return self._idle(cause) if self._profile.device_phases else on_host

    def _idle(self, cause: Cause) -> float:
        return sum(gap.seconds for gap in self._profile.gaps if gap.cause == cause)

    def _hot_lines(self, phase: Phase) -> dict[str, float]:
        return {} if self._trace is None else self._trace.hot_lines(phase)

    def _of_a_step(self, cost: float) -> str:
        return f"{formatting.share(cost / self._profile.seconds)} of a step ({ms(cost)})"


def _would_wait(profile: ProfileData) -> list[str]:
    here = [f"{sync.where} ({sync.what})" for sync in profile.syncs if sync.where]
    if not here:
        return []
    more = f" and {len(here) - 3} more" if len(here) > 3 else ""
    return [f"On a GPU these would make Python wait for it, for free on this CPU: {', '.join(here[:3])}{more}."]
