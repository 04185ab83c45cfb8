"""How fast a training loop runs, and how much of the hardware that is (MFU: model FLOPs utilisation)."""

from flatout.mfu.counter import MfuCounter, Reading
from flatout.mfu.peaks import clock_peak_flops, measured_peak_flops, peak_flops
from flatout.mfu.ranges import range

__all__ = ["MfuCounter", "Reading", "clock_peak_flops", "measured_peak_flops", "peak_flops", "range"]
