"""``GraphedStep``, which chooses for each batch between an eager step, a capture and a replay."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.core import formatting
from flatout.core.batches import map_tensors
from flatout.core.errors import Unsuitable
from flatout.mfu.ranges import nvtx_range
from flatout.training.capture_guards import CaptureGuards, sign
from flatout.training.graph_recorder import Recorder
from flatout.training.stepper import PhaseOf, Stepper

WARM_UP = 3
"""Eager steps of a signature before its capture, as in torch's ``make_graphed_callables``.

The first two load libraries, search for algorithms and compile code, which a capture forbids.
"""

MOST_GRAPHS = 4
"""Limit of captured signatures, because each graph has its own gradients and inputs."""

MOST_SIGNATURES = 256
"""Limit of signatures whose eager steps are counted. Unpadded text has many signatures that do not repeat."""

PAYS_AFTER = 50
"""Number of replays that make up for the time of a capture."""

MOST_CHANGES = 8
"""Limit of successive changes of an optimizer's numbers, each before ``PAYS_AFTER`` replays. Then captures end."""


@dataclass(frozen=True)
class _Graph:
    """Recorded step.

    Attributes:
        replay: repeats the step.
        inputs: tensors from which the step reads its batch.
        loss: tensor to which the step writes the loss.
        grads: the gradients, in the order of ``CaptureGuards.trained``. The graph keeps these tensors even if
            ``p.grad`` is another tensor or None, because replays write to them.
        skipped: tensor that is true if the loss scaler skipped the update. None without a loss scaler.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    loss: Tensor
    grads: list[Tensor | None]
    skipped: Tensor | None


class GraphedStep:
    """Runner of training steps that replays captured signatures of batches, and runs other steps eagerly.

    A signature is everything about a batch except the numbers in its tensors. ``WARM_UP`` eager steps of a signature
    precede its capture. A capture computes nothing, so the replay of the same batch follows immediately. While
    ``learning``, one call does all of this, and errors reach the caller. Later, an error ends all captures and replays.

    The constants of a graph are compared before every replay, while the device runs the previous replay. The comparison
    takes 10 us for a few layers, and 0.1 ms for 600 tensors of parameters and state. A change drops all graphs. The
    next step is eager and records the new constants.

    ``p.grad`` holds the gradients of the latest step, eager or replayed. Eager steps start with gradients of None, so
    they overwrite no graph's gradients. A replay sets the gradients of its graph.

    Batches arrive on the device from the prefetcher, in newly allocated memory, and are copied into the graph's inputs.
    The copy takes a launch per dtype, and microseconds per megabyte. One graph per batch address would avoid the copy,
    but needs a capture and gradients for each address. The number of addresses is not bounded if a caller keeps
    batches.

    Attributes:
        learning: True to capture every signature at its first batch.
        failure: reason why all later steps are eager. Empty without a failure.
        replays: number of replayed steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.learning = True
        self.failure = ""
        self.replays = 0
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._constants: CaptureGuards | None = None
        self._replays_before = 0
        self._changes = 0

    def __call__(self, stepper: Stepper, batch: Any, phase: PhaseOf) -> Tensor:
        """Run one step by replay, capture or eagerly. Arguments and result are as for ``Stepper.step``."""
        signed = None if self.failure or _is_under_a_mode(stepper.spec.device) else sign(batch, stepper.spec.device)
        if signed is None:
            return stepper.eager_step(batch, phase)
        self._compare(stepper)
        key, tensors = signed
        if self._constants is not None and self._constants.written():
            return self._eager(stepper, key, batch, phase)
        if key in self._graphs or (self._is_ready(key) and not self.learning):
            return self._graphed(stepper, key, batch, tensors, phase)
        return (
            self._learn(stepper, key, batch, tensors, phase)
            if self.learning
            else self._eager(stepper, key, batch, phase)
        )

    def release(self) -> None:
        """Free the memory of all graphs. Gradients in this memory are copied first."""
        if not self._graphs:
            return
        if self._constants is not None:
            mine = {id(grad) for graph in self._graphs.values() for grad in graph.grads}
            for p in self._constants.trained:
                if p.grad is not None and id(p.grad) in mine:
                    p.grad = p.grad.clone()
        self._drop()
        self._recorder.give_back()

    def _compare(self, stepper: Stepper) -> None:
        """Drop the graphs if their constants have changed."""
        changed = "" if self._constants is None else self._constants.changed(stepper)
        if not changed:
            return
        if not self.learning and changed == CaptureGuards.NUMBERS:
            paid = self.replays - self._replays_before >= PAYS_AFTER
            self._changes = 0 if paid else self._changes + 1
        self._drop()
        if self._changes == MOST_CHANGES:
            self._give_up(f"{changed} change again and again, and a graph has them as constants")

    def _drop(self) -> None:
        if self._graphs:
            self._recorder.wait()
        self._graphs.clear()
        self._constants = None

    def _is_ready(self, key: Hashable) -> bool:
        """Return True if a signature is warm, and an eager step has recorded constants that allow a capture."""
        return (
            not self.failure
            and self._seen[key] >= WARM_UP
            and self._constants is not None
            and not self._constants.hooked
            and len(self._graphs) < MOST_GRAPHS
        )

    def _eager(self, stepper: Stepper, key: Hashable, batch: Any, phase: PhaseOf) -> Tensor:
        """Run an eager step, which warms up its signature."""
        if key in self._seen or len(self._seen) < MOST_SIGNATURES:
            self._seen[key] += 1
        loss = self._recorder.aside(lambda: stepper.eager_step(batch, phase))
        self._note(stepper)
        return loss

    def _note(self, stepper: Stepper) -> None:
        if self._constants is None:
            if stepper.scaler is not None:
                stepper.scaler.keeps_scale_in_place = True  # a graph reads the scale at a fixed address
            self._constants = CaptureGuards(stepper)
        self._constants.note_writes()

    def _learn(self, stepper: Stepper, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Warm up and capture in one call.

        The call runs several steps, so only trials may use it. Trials restore the training state.

        Raises:
            Unsuitable: the step cannot be replayed.
        """
        for _ in range(WARM_UP - 1):
            self._eager(stepper, key, batch, phase)
        self._seen[key] += 1
        loss = self._recorder.strictly(lambda: stepper.eager_step(batch, phase))
        self._compare(stepper)
        self._note(stepper)
        return self._graphed(stepper, key, batch, tensors, phase) if self._is_ready(key) else loss

    def _graphed(self, stepper: Stepper, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Replay, after a capture if needed. If either fails, run an eager step."""
        try:
            graph = self._graphs.get(key) or self._capture(stepper, key, batch)
            return self._replayed(stepper, graph, tensors)
        except Exception as error:
            if self.learning:
                raise
            reason = formatting.first_line(error)
        loss = self._eager(stepper, key, batch, phase)  # raises an error of the step itself again
        self._give_up(reason)
        return loss

    def _capture(self, stepper: Stepper, key: Hashable, batch: Any) -> _Graph:
        constants, optimizer, scaler = self._constants, stepper.spec.optimizer, stepper.scaler
        assert constants is not None
        assert optimizer is not None
        with torch.no_grad():
            inputs = map_tensors(torch.clone, batch)
        signed = sign(inputs, stepper.spec.device)
        assert signed is not None
        constants.rates.write(optimizer)
        stepper.zero_grad()  # the graph takes the memory of the last gradients

        def work() -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            with constants.rates.lent(optimizer):
                loss = stepper.eager_step(inputs, _unheard)
            return loss, [p.grad for p in constants.trained], None if scaler is None else scaler.last_step_skipped

        state = {p: (entry, dict(entry)) for p, entry in optimizer.state.items()}
        try:
            replay, (loss, grads, skipped) = self._recorder.record(work)
            if constants.changed(stepper):  # the step has created optimizer state, and each replay would repeat this
                raise Unsuitable(f"{constants.changed(stepper)} within a step")
        except BaseException:
            stepper.abandon()
            optimizer.state.clear()
            for p, (entry, saved) in state.items():
                entry.clear()
                entry.update(saved)
                optimizer.state[p] = entry
            stepper.zero_grad()
            raise
        self._replays_before = self.replays
        self._graphs[key] = graph = _Graph(replay, signed[1], loss, grads, skipped)
        return graph

    def _replayed(self, stepper: Stepper, graph: _Graph, tensors: list[Tensor]) -> Tensor:
        constants, scaler = self._constants, stepper.scaler
        assert constants is not None
        assert stepper.spec.optimizer is not None
        with nvtx_range("flatout.replay"), torch.no_grad():
            # allocated before the replay, because a failure after it would repeat the step
            loss = torch.empty_like(graph.loss)
            torch._foreach_copy_(graph.inputs, tensors)
            constants.rates.write(stepper.spec.optimizer)
            graph.replay()
            loss.copy_(graph.loss)
        constants.show(graph.grads)
        if scaler is not None:
            scaler._last_step_skipped = graph.skipped
        constants.note_replay()
        self.replays += 1
        return loss

    def _give_up(self, reason: str) -> None:
        """Run all later steps eagerly, and warn once."""
        self._drop()
        self.failure = reason
        warnings.warn(f"whole-step CUDA graphs are off from here on: {reason}", RuntimeWarning, stacklevel=7)


def _is_under_a_mode(device: torch.device) -> bool:
    """Return True if gradients are disabled, or the user's own autocast is on. Both forbid replays.

    The user's autocast may have cast weights before a capture.
    """
    return not torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)


@contextlib.contextmanager
def _unheard(phase: str) -> Iterator[None]:
    """Hide the phases of a captured step, because a phase timer would record events into the graph."""
    yield
