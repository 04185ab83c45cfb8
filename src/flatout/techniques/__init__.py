"""The checklist: one file for each technique, one line here to add it."""

from flatout.techniques.base import (
    LoaderTechnique,
    Measured,
    NotApplicable,
    Rule,
    Source,
    StepTechnique,
    Switch,
    Technique,
)
from flatout.techniques.channels_last import ChannelsLast
from flatout.techniques.compile import Compile
from flatout.techniques.criterion import Criterion
from flatout.techniques.determinism import Determinism
from flatout.techniques.evaluation import Evaluation
from flatout.techniques.fused_optimizer import FusedOptimizer
from flatout.techniques.in_memory import InMemory
from flatout.techniques.pinned_memory import PinnedMemory
from flatout.techniques.precision import Precision
from flatout.techniques.prefetch import Prefetch
from flatout.techniques.workers import Workers

REGISTRY: tuple[Technique, ...] = (
    Determinism(),
    Criterion(),
    Evaluation(),
    PinnedMemory(),
    Prefetch(),
    Precision(),
    ChannelsLast(),
    FusedOptimizer(),
    Compile(),
    InMemory(),
    Workers(),
)
"""Every technique, in the order in which they are tried: placement, precision, memory format, optimizer, compile,
and the loader last, because the rate that it must reach is the tuned step's."""

PLANNED: tuple[tuple[int | None, str, str], ...] = (
    (3, "batch_size", "batch size"),
    (4, "cudnn_benchmark", "cudnn.benchmark"),
    (7, "profiler", "profiler"),
    (11, "torchscript", "TorchScript"),
    (12, "monitoring", "live monitoring"),
    (None, "tf32", "TF32"),
    (None, "sdpa_backend", "SDPA backend"),
    (None, "cuda_graph", "whole-step CUDA graph"),
    (None, "cpu_threads", "CPU threads"),
    (None, "gc_pauses", "garbage-collector pauses"),
    (None, "allocator", "allocator settings"),
    (None, "sync_points", "sync points"),
    (None, "multiples_of_8", "dimensions in multiples of 8"),
    (None, "oom_recovery", "out-of-memory recovery"),
    (None, "distributed", "DDP / FSDP2"),
)
"""Rows of the checklist that have no technique yet: (number, name, title)."""

__all__ = [
    "PLANNED",
    "REGISTRY",
    "LoaderTechnique",
    "Measured",
    "NotApplicable",
    "Rule",
    "Source",
    "StepTechnique",
    "Switch",
    "Technique",
]
