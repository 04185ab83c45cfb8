"""Checklist of techniques. Each technique is one file and one line in ``REGISTRY``."""

from flatout.techniques.activation_checkpointing import ActivationCheckpointing
from flatout.techniques.allocator import Allocator
from flatout.techniques.base import (
    Advice,
    LoaderTechnique,
    Measured,
    NotApplicable,
    NothingBetter,
    Rule,
    StepTechnique,
    Technique,
)
from flatout.techniques.batch_size import BatchSize
from flatout.techniques.built_in import BUILT_IN
from flatout.techniques.candidate import (
    Candidate,
    LoaderCandidate,
    PairCandidate,
)
from flatout.techniques.channels_last import ChannelsLast
from flatout.techniques.compile import Compile
from flatout.techniques.cpu_threads import CpuThreads
from flatout.techniques.criterion import Criterion
from flatout.techniques.cuda_graph import CudaGraph
from flatout.techniques.cudnn_benchmark import CudnnBenchmark
from flatout.techniques.data_parallel import DataParallel
from flatout.techniques.decode import Decode
from flatout.techniques.determinism import Determinism
from flatout.techniques.evaluation import Evaluation
from flatout.techniques.fused_optimizer import FusedOptimizer
from flatout.techniques.gradient_buckets import GradientBuckets
from flatout.techniques.gradient_compression import GradientCompression
from flatout.techniques.in_memory import InMemory
from flatout.techniques.loading_stages import LoadingStages
from flatout.techniques.malloc import Malloc
from flatout.techniques.multiples import MultiplesOf8
from flatout.techniques.precision import Precision
from flatout.techniques.prefix_cache import PrefixCaching
from flatout.techniques.sdpa_backend import SdpaBackend
from flatout.techniques.static_graph import StaticGraph
from flatout.techniques.sync_points import SyncPoints
from flatout.techniques.tf32 import Tf32
from flatout.techniques.torchscript import TorchScript
from flatout.techniques.workers import Workers

REGISTRY: tuple[Technique, ...] = (
    Determinism(),
    Criterion(),
    DataParallel(),
    Evaluation(),
    *BUILT_IN,
    Malloc(),
    Precision(),
    Tf32(),
    ChannelsLast(),
    CudnnBenchmark(),
    SdpaBackend(),
    CpuThreads(),
    FusedOptimizer(),
    ActivationCheckpointing(),
    BatchSize(),
    Compile(),
    TorchScript(),
    CudaGraph(),
    StaticGraph(),
    GradientBuckets(),
    GradientCompression(),
    InMemory(),
    Decode(),
    PrefixCaching(),
    Workers(),
    LoadingStages(),
    SyncPoints(),
    MultiplesOf8(),
    Allocator(),
)
"""Every technique, in the order in which they are tried.

The order is placement and data parallel, precision, memory format, backends, threads, optimizer, batch size, compile,
and the graph of the whole step. The averaging of gradients follows, because it must overlap with the tuned backward.
The loader is next, because it must reach the rate of the tuned step. Advice comes last.

The batch size comes before code that is compiled or captured for the shapes of a batch. Threads come before compile,
whose kernels depend on their number, and before the loader, whose workers use the remaining cores.
"""

__all__ = [
    "REGISTRY",
    "Advice",
    "BatchSize",
    "Candidate",
    "LoaderCandidate",
    "LoaderTechnique",
    "Measured",
    "NotApplicable",
    "NothingBetter",
    "PairCandidate",
    "Rule",
    "StepTechnique",
    "Technique",
]
