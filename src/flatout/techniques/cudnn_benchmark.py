"""Technique 4 of the checklist: choice of cuDNN's fastest convolution algorithm for each shape, by timing."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.backends import cudnn
from torch.nn.modules.conv import _ConvNd

from flatout.core.batches import tensors_within
from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.native._host import signature
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

MOST_NEW = 8
"""Number of new shapes within ``WITHIN`` batches at which shapes count as varying."""

WITHIN = 100


@process_flag
def cudnn_flags() -> Saved:
    """Return the part for the choice of cuDNN's algorithms."""

    def write(flags: tuple[bool, bool]) -> None:
        cudnn.benchmark, cudnn.deterministic = flags

    return Saved(lambda: (cudnn.benchmark, cudnn.deterministic), write)


class ShapeWatch:
    """Detector of batches that keep arriving in new shapes.

    A known shape costs nothing, because its algorithm is stored. One check takes two microseconds per batch.

    Attributes:
        is_on: True while batches are checked.
        has_varied: True after ``on_batch`` has found that shapes vary.
    """

    def __init__(self) -> None:
        self.is_on = self.has_varied = False
        self._known: set[bytes] = set()
        self._batches = 0
        self._news: deque[int] = deque(maxlen=MOST_NEW)
        """Batch numbers of the latest new shapes."""

    def varies(self, batch: Any) -> bool:
        """Return True if the last ``WITHIN`` batches, including this one, had ``MOST_NEW`` new shapes."""
        self._batches += 1
        key = signature(batch, Tensor, tensors_within)
        if key in self._known:
            return False
        self._known.add(key)
        self._news.append(self._batches)
        return len(self._news) == MOST_NEW and self._batches - self._news[0] < WITHIN

    def on_batch(self, batch: Any) -> None:
        """Turn cuDNN's search off, with a warning, once shapes vary."""
        if self.is_on and not self.has_varied and self.varies(batch):
            self.has_varied = True
            cudnn.benchmark = False
            warnings.warn(
                f"batches came in {MOST_NEW} new shapes within {WITHIN} steps, and cuDNN searches for the fastest "
                "convolution algorithms for each of them: torch.backends.cudnn.benchmark is off from here on",
                RuntimeWarning,
                stacklevel=2,
            )


def benchmark_candidate() -> Candidate:
    """Return the candidate that turns on ``torch.backends.cudnn.benchmark``, until shapes vary.

    torch stores the algorithm of a convolution's first run and then ignores the flag. ``deterministic`` is part of the
    storage key, and ``benchmark`` is not (pytorch #45372). So ``benchmark`` alone would find every shape already stored
    by earlier steps. Deterministic algorithms have their own keys, so the search runs. Almost all of cuDNN's fast
    algorithms are deterministic.

    After the search is turned off, its results stay in use while the candidate is on.
    """
    watch = ShapeWatch()

    def change() -> Callable[[], None]:
        before = cudnn_flags()
        cudnn.benchmark, cudnn.deterministic = not watch.has_varied, True
        watch.is_on = True

        def revert() -> None:
            watch.is_on = False
            before.restore()

        return revert

    candidate = ChangeCandidate("on", True, change)
    candidate.on_batch = watch.on_batch
    return candidate


class CudnnBenchmark(StepTechnique):
    """Lets cuDNN, NVIDIA's library, time its algorithms for every shape of convolution, and keep the fastest.

    When it helps: convolutions with constant shapes. speechbrain #294 reports epochs of 12 instead of 17 minutes on a
    V100. When it hurts: every new shape starts a search, of up to two seconds for a ResNet (pytorch #2759). So the
    technique is not tried if batches vary, and is turned off if they start to vary. Dilated convolutions with
    deterministic algorithms use torch's slower kernels instead of cuDNN, which a trial detects. RNNs do not use the
    flag.

    A flag that the user has set stays on without observation. No trial can measure it, because its search is over
    before trials begin. If batches vary, the row recommends turning it off.

    Source: pytorch's Performance Tuning Guide, "Enable cuDNN auto-tuner"; pytorch #2759, #45372.
    """

    name = "cudnn_benchmark"
    number = 4
    title = "cudnn.benchmark"
    rationale = "cuDNN has timed its convolution algorithms for these shapes, and the fastest are used"
    is_combinable = True
    expected = "up to 1.4×"

    def check(self, job: Job) -> None:
        """Require convolutions on CUDA, with torch's default cuDNN flags."""
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
                "torch.backends.cudnn.benchmark is on already, and batches come in several shapes. cuDNN searches for "
                "each of them: try without"
                if job.data.varies
                else "torch.backends.cudnn.benchmark is on already, and stays on"
            )
        if cudnn.deterministic:
            raise NotApplicable(
                "torch.backends.cudnn.deterministic is on: which algorithm is the fastest may differ from run to run"
            )

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the candidate if the trial's batches have one shape."""
        if job.data.varies:
            raise NotApplicable("batches come in several shapes, and cuDNN would search for each of them")
        return [benchmark_candidate()]

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate. It watches the shapes, so a forced candidate needs no constant shapes."""
        return benchmark_candidate()

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if ``cudnn.benchmark`` is already on."""
        return job.spec.device.type == "cuda" and cudnn.enabled and cudnn.benchmark


def _convolves(job: Job) -> bool:
    """Return True if a step contains convolutions, by its modules or by its counted operators."""
    return any(isinstance(m, _ConvNd) for m in job.spec.model.modules()) or any(
        "convolution" in name for count in job.work.counts for name in count.by_op
    )
