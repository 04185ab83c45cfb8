"""Neighbour: lines of the step that make Python wait for the GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flatout.profile.places import of_frame
from flatout.profile.profile_data import Sync
from flatout.profile.syncs import watching
from flatout.techniques.base import Advice, NotApplicable

if TYPE_CHECKING:
    from flatout.training.job import Job

_VALUES = {"item", "cpu", "to", "tolist", "numpy", "print", "equal", "synchronize"}
"""What needs a value; the others need the size of a result, which the data decide."""


class SyncPoints(Advice):
    """Names the lines of model and loss that make Python wait for the GPU, and how often in a step.

    When it helps: while Python waits it queues nothing, and behind the wait the GPU idles until there is work again;
    reading the loss in every step made Python wait for 40 to 50 ms of it (pytorch/torchtune, pull request 522), and
    Lightning's progress bar did so even while nobody saw it (Lightning-AI/pytorch-lightning, issue 21232). It also
    breaks the graph that ``torch.compile`` makes, on a CPU as well. When it hurts: never; it takes a few steps, once.

    On a GPU torch's own sync debug mode tells; on a CPU the operators that would wait are watched. The loop around the
    step is seen by ``flatout profile script.py`` and ``run.profile``, which run it.
    """

    name = "sync_points"
    title = "sync points"

    def findings(self, job: Job, seconds: float) -> Sequence[str]:
        """Lines of the user's code, most frequent first, and what to do about them."""
        steps, deadline = 0, time.perf_counter() + seconds
        with watching(job.spec.device.type == "cuda") as seen:
            for batch in job.data.batches:
                job.stepper.step(batch)
                steps += 1
                if time.perf_counter() > deadline:
                    break
        outside, _ = of_frame(sys._getframe())  # to whom falls what torch does, and what flatout does
        syncs = (Sync(*found, count / steps) for found, count in seen.most_common())
        lines = _by_line(sync for sync in syncs if sync.where not in ("", outside))
        if not lines:
            raise NotApplicable(
                "no line of the model or the loss makes Python wait for the GPU "
                "(`flatout profile script.py` looks at the loop around them)"
            )
        wait = "makes Python wait for the GPU" if job.spec.device.type == "cuda" else "would make Python wait for a GPU"
        return [
            *(f"{where} {wait} {_often(syncs)} ({_calls(syncs)}): {syncs[0].code}" for where, syncs in lines.items()),
            *_remedies({sync.what for syncs in lines.values() for sync in syncs}),
        ]


def _by_line(syncs: Iterable[Sync]) -> dict[str, list[Sync]]:
    lines: dict[str, list[Sync]] = {}
    for sync in syncs:
        lines.setdefault(sync.where, []).append(sync)
    return lines


def _calls(syncs: Sequence[Sync]) -> str:
    return ", ".join(dict.fromkeys(sync.what for sync in syncs))


def _often(syncs: Sequence[Sync]) -> str:
    times = sum(sync.per_step for sync in syncs)
    return "once in a step" if times == 1 else f"{times:.3g} times in a step"


def _remedies(calls: set[str]) -> list[str]:
    remedies = []
    if calls & _VALUES:
        remedies.append(
            "What to do: leave the value where it is (torch.where in place of an if), and give what you want to see to "
            "run.log(name, tensor), which never waits."
        )
    if calls - _VALUES:
        remedies.append(
            "What to do: compute with all elements and a mask (torch.where, or a product with it): the host has to be "
            "told the size of a result that the data decide."
        )
    return remedies
