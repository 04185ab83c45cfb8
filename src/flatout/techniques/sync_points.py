"""Additional technique: lines of the step that make Python wait for the GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flatout.profile.profile_data import Sync
from flatout.profile.syncs import of_frame, watching
from flatout.techniques.base import Advice, NotApplicable

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

_VALUES = {"item", "cpu", "to", "tolist", "numpy", "print", "equal", "synchronize"}
"""Operators that need a value. All others need the size of a result, which depends on the data."""


class SyncPoints(Advice):
    """Names the lines of model and loss that make Python wait for the GPU, and how often in a step.

    When it helps: while Python waits, it queues nothing, and the GPU then idles until there is work again. Reading the
    loss in every step made Python wait for 40 to 50 ms per step (pytorch/torchtune, pull request 522). Lightning's
    progress bar did so even while it was hidden (Lightning-AI/pytorch-lightning, issue 21232). A sync point also breaks
    the graph of ``torch.compile``, even on a CPU. When it hurts: never. The search takes a few steps, once.

    On a GPU, torch's sync debug mode finds the lines. On a CPU, operators that would wait on a GPU are observed.
    ``flatout profile script.py`` and ``run.profile`` cover the loop around the step, which they run.
    """

    name = "sync_points"
    title = "sync points"
    expected = "40–50 ms per wait"

    def findings(self, job: Job, pace: Pace, seconds: float) -> Sequence[str]:
        """Return lines of the user's code, most frequent first, with advice."""
        ranks = job.spec.ranks
        steps, deadline = 0, ranks.now() + seconds
        with watching(job.spec.device.type == "cuda") as seen:
            for batch in job.data.batches:
                job.stepper.step(batch)
                steps += 1
                if ranks.now() > deadline:
                    break
        outside, _ = of_frame(sys._getframe())  # place of calls that torch and flatout make
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
