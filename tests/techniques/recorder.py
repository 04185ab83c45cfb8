"""Emulation of CUDA graphs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flatout.core.snapshot import Snapshot


class Rerun:
    """Recorder that keeps a step as a function. Recording changes no state. Replaying writes to the same tensors.

    Attributes:
        recorded: recordings made so far.
        replayed: replays so far.
        eager: eager steps whose signatures may be recorded later.
        given_back: number of times that the memory of all recordings was freed.
        is_replaying: True inside a replay.
        error: error that recordings and replays raise, or None.
    """

    def __init__(self, job: Any) -> None:
        self.job = job
        self.recorded = self.replayed = self.eager = self.given_back = 0
        self.is_replaying = False
        self.error: Exception | None = None

    def aside(self, work: Callable[[], Any]) -> Any:
        self.eager += 1
        return work()

    strictly = aside

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        scaler = self.job.stepper.scaler
        scales = [] if scaler is None else [(t, t.clone()) for t in (scaler._scale, scaler._growth_tracker)]
        optimizer = self.job.spec.optimizer
        known = set(optimizer.state)
        state = Snapshot.capture(self.job.spec.modules, optimizer)
        try:
            result = work()
        finally:
            begun = {p: entry for p, entry in optimizer.state.items() if p not in known}
            state.restore()
            optimizer.state.update(begun)  # entries that the host has created stay, with their values reset
            for scale, value in scales:
                scale.copy_(value)
        if self.error is not None:
            raise self.error
        written = pytree.tree_leaves(result)
        self.recorded += 1

        def replay() -> None:
            if self.error is not None:
                raise self.error
            self.is_replaying = True
            try:
                again = pytree.tree_leaves(self.unseen(work))
            finally:
                self.is_replaying = False
            for to, value in zip(written, again, strict=True):
                assert (to is None) == (value is None)
                if to is not None:
                    to.copy_(value)
            self.replayed += 1

        return replay, result

    def unseen(self, work: Callable[[], Any]) -> Any:
        """Do the work as a device does: the host's own state of a step is unchanged.

        The scaler's ``last_step_skipped`` has no public setter, and only the host may change it.
        """
        model, scaler = self.job.spec.model, self.job.stepper.scaler
        parameters: tuple[Tensor, ...] = tuple(model.parameters())
        grads, skipped = [p.grad for p in parameters], None if scaler is None else scaler.last_step_skipped
        with torch.enable_grad(), torch.autograd._unsafe_preserve_version_counter(parameters):
            result = work()
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        if scaler is not None:
            scaler._last_step_skipped = skipped
        return result

    def wait(self) -> None:
        pass

    def give_back(self) -> None:
        self.given_back += 1
