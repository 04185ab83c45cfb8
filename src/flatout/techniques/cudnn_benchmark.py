"""4: cuDNN times its convolution algorithms and keeps the fastest for each shape."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.backends import cudnn
from torch.nn.modules.conv import _ConvNd

from flatout.core.batches import tensors_within
from flatout.core.process_flags import process_flag
from flatout.native._host import signature
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ObservingCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

MOST_NEW = 8
"""New shapes within ``WITHIN`` batches from which on shapes are said to vary."""

WITHIN = 100


@process_flag
class CudnnFlags:
    """The present choice of cuDNN's algorithms."""

    def __init__(self) -> None:
        self._flags = cudnn.benchmark, cudnn.deterministic

    def restore(self) -> None:
        """Restore both flags."""
        cudnn.benchmark, cudnn.deterministic = self._flags


class ShapeWatch:
    """Tells when batches go on coming in shapes that they have not come in before.

    A shape that comes back costs nothing: what was found for it is kept. Two microseconds a batch.
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._batches = 0
        self._news: deque[int] = deque(maxlen=MOST_NEW)
        """When the latest new shapes came."""

    def varies(self, batch: Any) -> bool:
        """Whether with this batch the latest ``WITHIN`` have brought ``MOST_NEW`` new shapes."""
        self._batches += 1
        key = signature(batch, Tensor, tensors_within)
        if key in self._known:
            return False
        self._known.add(key)
        self._news.append(self._batches)
        return len(self._news) == MOST_NEW and self._batches - self._news[0] < WITHIN


class BenchmarkCandidate(ObservingCandidate):
    """``torch.backends.cudnn.benchmark``, with deterministic algorithms, until shapes turn out to vary.

    torch keeps the algorithm that a convolution's shape ran with first and asks no flag again; ``deterministic`` is
    part of the key that it is kept by, and ``benchmark`` is not (pytorch #45372). Turned on alone it would find every
    shape of a trial, and of the training behind it, settled by the steps before. Deterministic algorithms have keys of
    their own, so that the search takes place; hardly one of cuDNN's fast algorithms is not among them.

    What was found for a shape serves on when the search is turned off, for as long as the switch is on.
    """

    label = "on"
    value = True

    def __init__(self) -> None:
        self._before = (False, False)
        self._watch: ShapeWatch | None = ShapeWatch()

    def _turn_on(self) -> None:
        self._before = cudnn.benchmark, cudnn.deterministic
        cudnn.benchmark, cudnn.deterministic = self._watch is not None, True

    def _turn_off(self) -> None:
        cudnn.benchmark, cudnn.deterministic = self._before

    def on_batch(self, batch: Any) -> None:
        """Turn the search off for good, with a warning, once shapes vary."""
        if self._is_on and self._watch is not None and self._watch.varies(batch):
            self._watch = None
            cudnn.benchmark = False
            warnings.warn(
                f"batches came in {MOST_NEW} new shapes within {WITHIN} steps, and cuDNN searches for the fastest "
                "convolution algorithms anew for each: torch.backends.cudnn.benchmark is off from here on",
                RuntimeWarning,
                stacklevel=2,
            )


class CudnnBenchmark(StepTechnique):
    """Lets cuDNN, NVIDIA's library, time its algorithms for every shape of convolution, and keep the fastest.

    When it helps: convolutions whose shapes stay as they are; speechbrain #294 tells of epochs of 17 minutes that
    took 12 on a V100. When it hurts: every new shape is searched for, up to two seconds long for a ResNet
    (pytorch #2759); so it is not tried where batches vary, and turned off when they come to. Dilated convolutions
    leave cuDNN for torch's own slower ones while algorithms are held to be deterministic, which a trial finds out.
    RNNs do not use it.

    A flag that the user has turned on stays on, unwatched: no trial can tell what it is worth, because its search is
    over when trials begin; where batches vary, the row says that it is worth turning off.

    Source: pytorch's Performance Tuning Guide, "Enable cuDNN auto-tuner"; pytorch #2759, #45372.
    """

    name = "cudnn_benchmark"
    number = 4
    title = "cudnn.benchmark"
    rationale = "cuDNN has timed its convolution algorithms for these shapes, and the fastest are used"
    expected = "up to 1.4×"

    def check(self, job: Job) -> None:
        """Convolutions on CUDA, with cuDNN's flags as torch has them by default."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU: cuDNN is NVIDIA's library for GPUs")
        if job.spec.deterministic:
            raise NotApplicable("deterministic=True: which algorithm is the fastest may differ from run to run")
        if not _convolves(job):
            raise NotApplicable("the model has no convolutions, and cuDNN searches for nothing else")
        if not cudnn.enabled:
            raise NotApplicable("torch.backends.cudnn.enabled is off")
        if cudnn.benchmark:
            raise NotApplicable(
                "torch.backends.cudnn.benchmark is on already, and batches come in several shapes, for each of which "
                "cuDNN searches anew: try without"
                if job.data.varies
                else "torch.backends.cudnn.benchmark is on already, and stays on"
            )
        if cudnn.deterministic:
            raise NotApplicable(
                "torch.backends.cudnn.deterministic is on: which algorithm is the fastest may differ from run to run"
            )

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """On, where the trial's batches come in one shape."""
        if job.data.varies:
            raise NotApplicable("batches come in several shapes, and cuDNN would search anew for each")
        return [BenchmarkCandidate()]

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate, which also watches the shapes."""
        return BenchmarkCandidate()

    def is_so(self, job: Job, value: Any) -> bool:
        """Return whether ``cudnn.benchmark`` is already on."""
        return job.spec.device.type == "cuda" and cudnn.enabled and cudnn.benchmark


def _convolves(job: Job) -> bool:
    """Whether a step convolves, by its modules or by the operators that were counted."""
    return any(isinstance(m, _ConvNd) for m in job.spec.model.modules()) or any(
        "convolution" in name for count in job.work.counts for name in count.by_op
    )
