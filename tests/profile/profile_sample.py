"""Invented profiles of a training on a GPU and on a CPU, with hostile text."""

from __future__ import annotations

from dataclasses import replace

from flatout.profile import Operator, Profile, Step, Sync
from flatout.profile.advice import advise
from flatout.profile.profile_data import PHASES, Phase

HOSTILE = 'train<b>&"\x1b[31m.py'


def profile_of(seconds: float = 0.01, **phases: float) -> Profile:
    """Return a profile of three equal steps that ended before the profiler began.

    Args:
        seconds: time of a step.
        phases: shares of a step, by phase. The rest is the loop's own code.
    """
    shares: dict[Phase, float] = dict.fromkeys(PHASES, 0.0) | {"host_idle": 1 - sum(phases.values())} | phases  # type: ignore[assignment]
    step = Step(seconds, {phase: seconds * share for phase, share in shares.items()})
    return Profile((step,) * 3, seconds, 5, 32, step.phases, (), {})


def ended_early() -> Profile:
    """Return the profile of a loop that ended before the profiler began."""
    profile = profile_of(loader_wait=0.6, forward=0.1, backward=0.2, update=0.1)
    return replace(profile, advice=advise(profile))


def sync_bound() -> Profile:
    profile = replace(
        profile_of(1e-3, loader_wait=0.05, forward=0.1, backward=0.1, update=0.02),
        profiled_steps=3,
        profiled_seconds=1.1e-3,
        operators=(
            Operator("aten::mm", 2.0, 3e-5, 3e-4, 0.3),
            Operator(HOSTILE, 1.0, 1e-5, 2.25e-4, 0.225),
            Operator("aten::view", 12.0, 2e-6, 0.0, 0.0),
        ),
        device_busy=0.525,
        syncs=(
            Sync("item", f"{HOSTILE}:12", "if loss.item() < 1 & True:", "host_idle", 1.0),
            Sync("synchronize", "", "", "update", 0.5, is_in_every_step=False),
        ),
        memory_peak=2048,
        verdict="MFU 12 % <of> the peak.",
        environment={"device": "cuda (NVIDIA H100)", "torch": "2.14.1"},
        trace=b"",
    )
    return replace(profile, advice=advise(profile))
