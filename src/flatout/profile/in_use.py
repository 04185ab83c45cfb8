"""Techniques that a training already uses, by its trace."""

from __future__ import annotations

from flatout.profile.events import Event
from flatout.profile.trace import Trace

_SIGNS: dict[str, tuple[str, ...]] = {
    "compile": ("Torch-Compiled Region", "CompiledFunction"),
    "cuda_graph": ("cudaGraphLaunch",),
    "fused_optimizer": ("aten::_fused_", "flatout::step"),
    "workers": ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter",),
}
"""Prefixes of event names that show a technique in use, by the technique's name."""
_LOW = {"c10::BFloat16", "c10::Half"}


def techniques_in_use(trace: Trace) -> set[str]:
    """Return the names of techniques of ``flatout.optimize`` that the steps of a trace use."""
    events = trace.within(trace.host)
    names = {event.name for event in events}
    found = {technique for technique, signs in _SIGNS.items() if any(name.startswith(signs) for name in names)}
    if any(_LOW & set(event.args.get("Input type", ())) for event in events):
        found.add("precision")
    if any(_is_channels_last(event) for event in events):
        found.add("channels_last")
    return found


def _is_channels_last(event: Event) -> bool:
    """Return True if an event is a convolution with a weight in channels_last."""
    if event.name != "aten::convolution":
        return False
    weight = event.args.get("Input Strides", ())[1:2]
    return any(len(strides) == 4 and strides[1] == 1 and strides[3] > 1 for strides in weight)
