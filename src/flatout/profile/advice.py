"""Advice of a profile: sentences on the largest costs and their remedies."""

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
"""Smallest share of a step that advice mentions."""

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
"""Code that tries a technique in a loop that flatout does not tune, by the technique's name."""

Advice = Iterator[tuple[float, str]]
"""Sentences, each with the seconds per step that its remedy could save."""


def advise(profile: ProfileData, trace: Trace | None, rows: Sequence[Row] = ()) -> tuple[str, ...]:
    """Return the advice as sentences, the largest cost first.

    Args:
        profile: a profile without advice.
        trace: trace of the profiled steps; None if there were none.
        rows: rows of the report on this training. Techniques that the report has decided, or that the trace shows in
            use, are not advised.
    """
    adviser = _Adviser(profile, trace, rows)
    found = [item for item in adviser.findings() if item[0] >= _WORTH * profile.seconds]
    found.sort(key=lambda item: -item[0])
    sentences = [sentence for _, sentence in found]
    if trace is not None and trace.on_cuda and not trace.device:
        refused = (
            "The trace has no kernels: the driver refused to record them (another profiler runs, or permission is "
            "missing). The advice below uses times of the host, in which waits for the GPU count as work."
        )
        sentences.insert(0, refused)
    elif not profile.device_phases:
        sentences += _would_wait(profile)
    elif profile.syncs and not any(gap.cause == "sync" for gap in profile.gaps):
        sentences.append("The syncs below cost nothing yet: the GPU has enough queued to bridge them.")
    return tuple(sentences) or ("Nothing sticks out: the time goes into many small things.",)


class _Adviser:
    """Writer of sentences about a profile. The sentences name only techniques that are left to try."""

    def __init__(self, profile: ProfileData, trace: Trace | None, rows: Sequence[Row]) -> None:
        self._profile, self._trace, self._rows = profile, trace, rows
        self._in_use = set() if trace is None else techniques_in_use(trace)

    def findings(self) -> Advice:
        """Yield a sentence for each cost, small ones included."""
        yield self._loader()
        yield self._own_code()
        yield self._update()
        yield from self._idling()
        yield from self._operator()

    def _to_try(self, *techniques: str) -> str:
        """Return a sentence that names the techniques that are left to try; empty if there is none."""
        left = [name for name in techniques if name not in self._in_use]
        lines = untried(self._rows, left) if self._rows else [_LINES[name] for name in left]
        return f" To try: {', '.join(lines)}." if lines else ""

    def _loader(self) -> tuple[float, str]:
        cost = self._cost("loader", self._profile.phases["loader_wait"])
        line = next(iter(self._hot_lines("loader_wait")), "")
        if line:  # the training thread makes the samples
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
        # An update only moves memory, so the update should cost at most a tenth of forward and backward.
        phases = self._profile.phases
        names = set() if self._trace is None else {event.name for event in self._trace.host}
        remedy = "."
        if "fused_optimizer" in self._in_use:
            remedy = ". It is fused already. Fewer updates help: accumulate gradients over more batches."
        elif self._rows:
            remedy = f".{self._to_try('fused_optimizer')}"
        elif any(f"Optimizer.step#{name}.step" in names for name in FUSABLE):
            remedy = (
                ". A fused update takes a fraction of that: flatout.optim.AdamW, torch's with fused=True, or "
                "flatout.optim.fuse(optimizer)."
            )
        excess = phases["update"] - 0.1 * (phases["forward"] + phases["backward"])
        return excess, f"The optimizer's update takes {ms(phases['update'])} of a step{remedy}"

    def _idling(self) -> Advice:
        """Yield sentences on gaps of the GPU, other than those of the loader and the loop's own code."""
        for gap in self._profile.gaps:
            if gap.cause == "sync":
                yield (
                    gap.seconds,
                    f"The wait for the GPU at {gap.where} empties the GPU's queue: the GPU then idles for "
                    f"{self._of_a_step(gap.seconds)}. Keep the value on the GPU (loss.detach()), and read it every "
                    "100 steps. torch's GradScaler waits in every step, flatout.amp's does not.",
                )
        cost = self._idle("launch")
        phases = sorted({gap.phase for gap in self._profile.gaps if gap.cause == "launch"})
        yield (
            cost,
            f"The GPU finishes kernels faster than Python launches them ({', '.join(phases)}): the GPU idles for "
            f"{self._of_a_step(cost)}.{self._to_try('compile', 'cuda_graph', 'batch_size')}",
        )
        cost = self._idle("copy")
        remedy = "" if self._rows else self._to_try("pinned_memory", "prefetch")
        yield cost, f"Copying batches keeps the GPU idle for {self._of_a_step(cost)}.{remedy}"

    def _operator(self) -> Advice:
        # The remedies do not apply to custom operators, operators of optimizers, and code of torch.compile.
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
            0.5 * top.share * self._profile.seconds,  # assume that at best half of the operator's time can be saved
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
    return [f"On a GPU these would make Python wait, which costs nothing on this CPU: {', '.join(here[:3])}{more}."]
