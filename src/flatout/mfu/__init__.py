"""Speed of a training loop, and its share of the hardware's peak, called MFU (model FLOPs utilization)."""

from flatout.core.deprecated import old_names
from flatout.mfu.cost import register_flops
from flatout.mfu.counter import MfuCounter
from flatout.mfu.flop_count import FlopCount, FlopNode, count_flops
from flatout.mfu.peaks import clock_peak_flops, measured_peak_flops, peak_flops
from flatout.mfu.ranges import nvtx_range
from flatout.mfu.timers import Phases, Reading, TensorCores
from flatout.mfu.verdict import Verdict

__all__ = [
    "FlopCount",
    "FlopNode",
    "MfuCounter",
    "Phases",
    "Reading",
    "TensorCores",
    "Verdict",
    "clock_peak_flops",
    "count_flops",
    "measured_peak_flops",
    "nvtx_range",
    "peak_flops",
    "register_flops",
]

__getattr__ = old_names("flatout.mfu", {"range": nvtx_range})
