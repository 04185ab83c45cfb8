"""Invented profile of a sync-bound training, with hostile text."""

from __future__ import annotations

from flatout.profile import Profile, Step, Sync
from flatout.profile.profile_data import PHASES
from flatout.profile.summary import summarise
from tests.profile.events import AUTOGRAD, ProfileRecording, summary_of

HOSTILE = 'train<b>&"\x1b[31m.py'


def ended_early() -> Profile:
    """Return the profile of a loop that ended before the profiler began."""
    phases = dict.fromkeys(PHASES, 0.0) | {"loader_wait": 0.006, "forward": 0.001, "backward": 0.002, "update": 0.001}
    return summarise((Step(0.01, phases),) * 3, None, before=5, samples=32)


def sync_bound() -> Profile:
    r = ProfileRecording()
    for index in range(4):
        at = 1000.0 * index
        r.boundary(at)
        if index == 3:
            break
        r.phase("loader_wait", at, at + 50)
        r.phase("forward", at + 60, at + 160)
        r.function("model.py(3): forward", at + 65, at + 150)
        r.kernel(at + 70, at + 75, at + 300, name="void at::native::relu<4, float>(int, (anonymous namespace)::F)")
        r.phase("backward", at + 170, at + 280)
        r.kernel(at + 180, at + 300, at + 600, name="void gemm<float>(float*)", thread=AUTOGRAD)
        r.function("<built-in method item of Tensor object at 0x7f>", at + 290, at + 610, f"{HOSTILE}:12")
        r.wait(at + 300, at + 605)
        r.memory(at + 200, {"Device Type": 1, "Device Id": 0, "Total Allocated": 2048})
    return summary_of(
        r,
        before=5,
        samples=32,
        syncs=[Sync("item", f"{HOSTILE}:12", "if loss.item() < 1 & True:", "host_idle", 1.0)],
        commands=("ncu -k {kernel} train.py",),
        verdict="MFU 12 % <of> the peak.",
    )
