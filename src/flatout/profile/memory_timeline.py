"""Memory of tensors over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flatout.profile.profile_data import Memory
from flatout.profile.trace import Trace

_POINTS = 400
_CPU = 0  # c10::DeviceType


def memory(trace: Trace) -> Memory | None:
    """Return the memory timeline of the device with the highest peak. A GPU precedes the CPU.

    Return None if the trace has no memory events in the steps.
    """
    timelines: dict[tuple[bool, int], list[tuple[float, int]]] = defaultdict(list)
    for event in trace.memory:
        told = event["args"]
        if told.keys() >= {"Device Type", "Device Id", "Total Allocated"} and trace.start <= event["ts"] < trace.end:
            key = (told["Device Type"] != _CPU, int(told["Device Id"]))
            timelines[key].append((event["ts"], int(told["Total Allocated"])))
    if not timelines:
        return None
    (on_gpu, index), timeline = max(timelines.items(), key=lambda item: (item[0][0], max(b for _, b in item[1])))
    at, peak = max(timeline, key=lambda point: point[1])
    seconds = [(1e-6 * (time - trace.start), allocated) for time, allocated in timeline]
    return Memory(f"cuda:{index}" if on_gpu else "cpu", _thinned(seconds), peak, trace.parts.at(at).phase)


def _thinned(timeline: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return at most ``_POINTS`` points. Each point is the highest of its stretch, so that no peak is lost."""
    stride = -(-len(timeline) // _POINTS)
    stretches = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    return tuple(max(stretch, key=lambda point: point[1]) for stretch in stretches)
