"""``GraphedStep``: which batches are stepped eagerly, which are captured, and which replayed."""

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
from flatout.training.micro_batches import Part
from flatout.training.stepper import PhaseOf, Stepper

WARM_UP = 3
"""Eager steps of a signature before it is captured, as torch's own ``make_graphed_callables`` takes: libraries are
loaded, algorithms searched for and code compiled in the first two, all of which a capture forbids."""

MOST_GRAPHS = 4
"""Signatures that are captured; a graph keeps gradients and inputs of its own."""

MOST_SIGNATURES = 256
"""Signatures whose eager steps are counted: of unpadded text there are more than ever come again."""

PAYS_AFTER = 50
"""Replays that pay for a capture."""

MOST_CHANGES = 8
"""Changes of an optimizer's constants that came before their capture had paid, after which nothing is captured."""


@dataclass(frozen=True)
class _Graph:
    """A recorded step.

    Attributes:
        replay: does it again.
        inputs: the tensors that it reads its batch from.
        loss: where it leaves the loss.
        grads: where it leaves the gradients, in the order of ``CaptureGuards.trained``. They are kept also while
            ``p.grad`` is another tensor or None: replays write there.
        skipped: where it leaves whether the loss scaler skipped the update.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    loss: Tensor
    grads: list[Tensor | None]
    skipped: Tensor | None


class GraphedStep:
    """Stands in the place of a job's step: replays the batches' signatures that it has captured, steps others eagerly.

    A signature is everything about a batch but the numbers in its tensors. ``WARM_UP`` real steps of one come before
    its capture, which runs nothing, so the replay of the same batch follows at once. While ``learning`` all that
    happens in one call, and what it raises is raised to the caller; later an error means eager steps for good.

    What a graph has as constants is compared before every replay, at C speed: 10 us for a few layers, 0.1 ms for 600
    tensors of parameters and state, while the device is busy with the replay before, which takes longer the more
    there are. Where something has changed, all graphs are dropped, and the next step, an eager one, shows what holds
    from then on.

    ``p.grad`` shows the gradients of the latest step, whichever way it went. Eager steps begin with gradients of None,
    so that they write over no graph's; a graph's own are put back after its replay.

    Batches come from the prefetcher on the device already, in memory that torch's allocator hands out anew. They are
    copied into the graph's inputs from there: a launch per dtype, and microseconds for megabytes, where a GPU copies
    hundreds of gigabytes a second and more. A graph for each place that a batch may lie in would save that copy, and
    take a capture and gradients for each; nor are those places a few where a caller holds on to batches.

    Attributes:
        learning: whether every signature is captured when it comes.
        failure: why all steps are eager for good; empty while they need not be.
        replays: steps replayed so far.
        eager_steps: steps that were not.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.learning = True
        self.failure = ""
        self.replays = 0
        self.eager_steps = 0
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._constants: CaptureGuards | None = None
        self._replays_before = 0
        self._changes = 0

    def __call__(self, stepper: Stepper, batch: Any, phase: PhaseOf) -> Tensor:
        """One step, in the way that serves; with the arguments and the result of ``Stepper.step``."""
        signed = None if self.failure or _is_under_a_mode(stepper.spec.device) else sign(batch, stepper.spec.device)
        if signed is None:
            self.eager_steps += 1
            return stepper.eager_step([Part(batch)], phase)
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
        """Free the memory of all graphs; gradients that lie in it are copied out."""
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
        """Drop the graphs whose constants are no longer true."""
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
        """Whether a signature may be captured: warm, and the step before has shown what its constants are."""
        return (
            not self.failure
            and self._seen[key] >= WARM_UP
            and self._constants is not None
            and not self._constants.hooked
            and len(self._graphs) < MOST_GRAPHS
        )

    def _eager(self, stepper: Stepper, key: Hashable, batch: Any, phase: PhaseOf) -> Tensor:
        """A real step, which warms up its signature."""
        if key in self._seen or len(self._seen) < MOST_SIGNATURES:
            self._seen[key] += 1
        self.eager_steps += 1
        loss = self._recorder.aside(lambda: stepper.eager_step([Part(batch)], phase))
        self._note(stepper)
        return loss

    def _note(self, stepper: Stepper) -> None:
        if self._constants is None:
            self._constants = CaptureGuards(stepper)
        self._constants.note_writes()

    def _learn(self, stepper: Stepper, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Warm up and capture at once. Training state moves by several steps: only trials learn, and they put it back.

        Raises:
            Unsuitable: the step cannot be replayed.
        """
        for _ in range(WARM_UP - 1):
            self._eager(stepper, key, batch, phase)
        self._seen[key] += 1
        loss = self._recorder.strictly(lambda: stepper.eager_step([Part(batch)], phase))
        self._compare(stepper)
        self._note(stepper)
        return self._graphed(stepper, key, batch, tensors, phase) if self._is_ready(key) else loss

    def _graphed(self, stepper: Stepper, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Replay, after a capture where there is none; an eager step where either fails."""
        try:
            graph = self._graphs.get(key) or self._capture(stepper, key, batch)
            return self._replayed(stepper, graph, tensors)
        except Exception as error:
            if self.learning:
                raise
            reason = formatting.first_line(error)
        loss = self._eager(stepper, key, batch, phase)  # what is wrong with the step itself raises here as well
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
        stepper.zero_grad()  # the memory of the last gradients is the graph's to take

        def work() -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            with constants.rates.lent(optimizer):
                loss = stepper.eager_step([Part(inputs)], _unheard)
            return loss, [p.grad for p in constants.trained], None if scaler is None else scaler.last_step_skipped

        state = {p: (entry, dict(entry)) for p, entry in optimizer.state.items()}
        try:
            replay, (loss, grads, skipped) = self._recorder.record(work)
            if constants.changed(stepper):  # state that nothing has begun: each replay would begin it again
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
            loss = torch.empty_like(graph.loss)  # before the replay: what fails behind it would be done twice
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
        """Step eagerly from here on, and say so once."""
        self._drop()
        self.failure = reason
        warnings.warn(f"whole-step CUDA graphs are off from here on: {reason}", RuntimeWarning, stacklevel=5)


def _is_under_a_mode(device: torch.device) -> bool:
    """No backward can follow; or the user's own autocast may hold weights that were cast before a capture."""
    return not torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)


@contextlib.contextmanager
def _unheard(phase: str) -> Iterator[None]:
    """A capture is no step: whoever times phases would record events into it."""
    yield
