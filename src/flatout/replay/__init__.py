"""Steps recorded once and replayed: the machinery of whole-step CUDA graphs."""

from flatout.replay.constants import sign
from flatout.replay.recorder import CudaRecorder, Recorder
from flatout.replay.whole_step import WholeStep

__all__ = ["CudaRecorder", "Recorder", "WholeStep", "sign"]
