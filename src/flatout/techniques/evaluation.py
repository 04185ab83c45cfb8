"""Technique 6 of the checklist: no gradients in evaluation."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.core.batches import tensors_of
from flatout.core.instance_class import class_change, instance_class
from flatout.profile.syncs import of_frame
from flatout.techniques.base import Rule
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

SURE_AFTER = 3
"""Number of consecutive forwards in eval mode with unused graphs before a warning."""


class _AutogradGraph:
    """Object with the lifetime of a forward's autograd graph."""

    def __init__(self, watch: _CallWatch) -> None:
        self._watch = watch
        self._used = False

    def use(self, *_: object) -> None:
        """Mark the graph as used by a backward."""
        self._used = True

    def __del__(self) -> None:
        self._watch.wasted = 0 if self._used else self._watch.wasted + 1


class _CallWatch:
    """Observer of a model in eval mode, which detects outputs that no backward uses.

    Attributes:
        wasted: number of consecutive forwards with an unused graph.
        said: True after the warning.
    """

    def __init__(self) -> None:
        self.wasted = 0
        self.said = False

    def saw(self, output: Any, frame: FrameType) -> None:
        """Observe ``output`` of a forward in eval mode with gradients on, called from ``frame``."""
        ends = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        if not ends:
            return
        if self.wasted >= SURE_AFTER:
            self._say(frame)
            return
        graph = _AutogradGraph(self)
        for node in ends:
            node.register_prehook(graph.use)

    def _say(self, frame: FrameType) -> None:
        self.said = True
        where, _ = of_frame(frame)
        file, _, line = where.rpartition(":")
        warnings.warn_explicit(
            "this evaluates the model with gradients on, and nothing goes backward from it: every activation is kept "
            "for nothing. Evaluate within `with torch.inference_mode():`",
            UserWarning,
            file or __file__,
            int(line or 0),
        )


def _watched_class(base: type[nn.Module]) -> type[nn.Module]:
    watch = _CallWatch()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super(watched, self).__call__(*args, **kwargs)
        if torch.compiler.is_compiling() or self.training or watch.said or not torch.is_grad_enabled():
            return output
        watch.saw(output, sys._getframe(1))
        return output

    watched = instance_class(base, __call__=__call__)
    return watched


class Evaluation(Rule):
    """Evaluates without recording what only training needs, in eval mode, and restores every module's mode.

    In the user's own loop, the outputs of a model in eval mode are observed. If gradients are on and no backward
    follows, one warning names the line.

    When it helps: an evaluation loop that records gradients keeps every activation and is about a third slower. A loop
    without ``eval()`` gives wrong numbers with BatchNorm or Dropout. When it hurts: the observation costs a microsecond
    per call of the model.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html for "less memory".
    """

    name = "evaluation"
    number = 6
    title = "no gradients in evaluation"
    expected = "less memory"
    rationale = (
        "run.evaluate and run.fit record nothing for a backward pass that never comes, which saves time and memory; a "
        "loop of your own that evaluates with gradients on gets a warning with its line"
    )
    depends_on_loop = True

    def candidate(self, job: Job) -> Candidate | None:
        """Return the observer for a user's own training loop; None for all other jobs."""
        if not job.why_no_step or job.spec.inference or isinstance(job.spec.model, torch.jit.ScriptModule):
            return None
        return ChangeCandidate("watched", "watched", class_change([(job.spec.model, _watched_class)]))
