"""Additional technique: the whole step, from forward to update, replayed as one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from flatout.core import dtensor
from flatout.core.step_hooks import is_patched
from flatout.guards import HOST_RANDOM, PYTHON_STATE
from flatout.optim import why_not_fusable
from flatout.optim.native_step import NativeStep
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.calls import routed_calls
from flatout.techniques.candidate import Candidate
from flatout.training.capture_guards import sign
from flatout.training.graph_recorder import CudaRecorder, Recorder
from flatout.training.graphed_step import GraphedStep
from flatout.training.stepper import Stepper

if TYPE_CHECKING:
    from flatout.training.job import Job


class GraphCandidate(Candidate):
    """Candidate that makes a :class:`GraphedStep` the runner of a training's steps.

    The candidate holds the runner only while it is off, so that it does not keep the model alive.
    """

    label = "whole step"
    value = True
    steps_to_record = 2  # a restore of the optimizer's state drops graphs: an eager step and a capture follow

    def __init__(self, stepper: Stepper, recorder: Recorder) -> None:
        self._stepper = weakref.ref(stepper)
        self._parked: GraphedStep | None = GraphedStep(recorder)

    @property
    def runner(self) -> GraphedStep | None:
        """Runner of the steps, on or off; None if the training is gone."""
        stepper = self._stepper()
        installed = None if stepper is None else stepper.runner
        return self._parked or (installed if isinstance(installed, GraphedStep) else None)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Reason why all steps are eager; empty without a failure."""
        return "" if self.runner is None else self.runner.failure

    def _turn_on(self) -> None:
        stepper = self._stepper()
        if stepper is not None and self._parked is not None:
            stepper.runner, self._parked = self._parked, None

    def _turn_off(self) -> None:
        stepper = self._stepper()
        if stepper is not None:
            self._parked, stepper.runner = self.runner, None

    def end_warmup(self) -> None:
        """Treat all later steps as real training steps."""
        if self.runner is not None:
            self.runner.learning = False

    def release(self) -> None:
        """Free the graphs' memory."""
        if self.runner is not None:
            self.runner.release()


class CudaGraph(StepTechnique):
    """Replays forward, backward and update as one CUDA graph: one launch instead of hundreds.

    When it helps: the GPU waits for kernel launches, as in steps of many small kernels. When it hurts: a graph has its
    own memory for a step, and copies each batch. Large kernels gain nothing.

    Learning rates are in device memory, so schedules work. Only the fused optimizer reads learning rates there, so the
    technique requires this optimizer. Other constants of a graph (weight decay, dropout's p, train or eval mode,
    tensors that were moved) cause a new capture if their change is visible. A replay runs no Python. A forward that
    counts its calls or prints does so only at its capture. A tensor from outside the model must keep its address. So
    hooks, and steps that wait for the device or draw random numbers on the host, exclude the technique.

    Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; for "often 1.2-3x"
    https://docs.nvidia.com/dl-cuda-graph/torch-cuda-graph/torch-integration.html.
    """

    name = "cuda_graph"
    title = "whole-step CUDA graph"
    rationale = "a step is one launch, where launching its kernels one by one took the time"
    expected = "1.2 to 3×"
    effect = "reseeded"
    assumes = (HOST_RANDOM, PYTHON_STATE)
    requires = "fused_optimizer"
    optimistic_gain = 3.0

    def check(self, job: Job) -> None:
        """Require a training step that runs on a CUDA device as a whole, without hooks."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU, which replays no graphs")
        reason = why_not_captured(job)
        if reason:
            raise NotApplicable(reason)

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the only candidate."""
        return [GraphCandidate(job.stepper, CudaRecorder(job.spec.device))]


def why_not_captured(job: Job) -> str:
    """Return why a job's step cannot be captured on any device; empty if no reason is known."""
    if job.why_no_step or job.spec.optimizer is None:
        return f"{job.why_no_step}: flatout cannot tell where a step ends"
    if job.spec.ranks.size > 1:
        return "the gradients of several ranks are averaged in the middle of a step"
    if job.spec.accumulate > 1:
        return "accumulate > 1: gradients would have to outlive the graph of one batch in the memory of another's"
    reason = _why_not_this_optimizer(job.spec.optimizer)
    if reason:
        return reason
    if any(map(job.stepper.micro_batches.splits, job.data.batches)):
        return "batches are computed in parts, one by one: together in a graph they would take more memory"
    modules = [m for root in job.spec.modules for m in root.modules()]
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        return "the model is a ScriptModule, which does not show when its parts are replaced"
    if any(isinstance(m, (nn.parallel.DistributedDataParallel, nn.DataParallel)) for m in modules):
        return "the model is spread over several devices or processes"
    if any(getattr(call, "_reuses_outputs", False) for call in routed_calls(job)):
        return "torch.compile replays the model as CUDA graphs already"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules):
        return "the model has hooks, and a replay runs no Python"
    signatures = [sign(batch, job.spec.device) for batch in job.data.batches]
    if any(signed is None for signed in signatures):
        return "the batches hold more than tensors and plain values: a graph cannot be fed with that"
    if len(signatures) > 2 and len({signed[0] for signed in signatures if signed is not None}) == len(signatures):
        return "no two batches are of the same shapes: a graph replays one"
    return ""


def _why_not_this_optimizer(optimizer: torch.optim.Optimizer) -> str:
    if not isinstance(optimizer, NativeStep) and (why_not := why_not_fusable(optimizer)):
        return (
            "a graph would fix the learning rate, because only flatout's fused optimizer reads it from the device. "
            f"{why_not}"
        )
    if is_patched(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks or a patched step, and a replay runs no Python"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(dtensor.is_distributed, parameters)):
        return "the parameters are spread over several processes"
    if any("base_momentum" in group for group in optimizer.param_groups):
        return "the schedule changes momentum with each step, which a graph has as a constant"
    return ""
