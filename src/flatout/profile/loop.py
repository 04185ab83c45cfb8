"""``run.profile``: real training steps of a run, under the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flatout.data import batch_size_of
from flatout.profile import nsight
from flatout.profile.record import Session
from flatout.profile.summary import Profile


def profile_run(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    steps: int = 10,
    warmup: int = 3,
    *,
    verdict: Callable[[], str] = str,
) -> Profile:
    """Profiles a loop of ``step(batch)`` over ``loader``, which goes on from epoch to epoch.

    Args:
        loader: yields batches; iterated as often as needed.
        step: trains on a batch.
        steps: to time.
        warmup: steps before; two more look for syncs, and some more use up what loader workers have in store.
        verdict: for ``Profile.verdict``; asked for after the warm-up.

    Raises:
        ValueError: ``steps`` < 1, ``warmup`` < 0, or a loader that ends before a step could be timed.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    if warmup < 0:
        raise ValueError(f"warmup must be >= 0, got {warmup}")
    session = Session(steps, warmup, verdict)
    samples: list[int] = []
    try:
        session.boundary()
        for batch in _again_and_again(loader):
            step(batch)
            samples.append(batch_size_of(batch))
            session.boundary()
            if session.done:
                break
    finally:
        session.close()
    recent = samples[-steps:]
    commands = nsight.commands_of_main(steps, warmup) if torch.cuda.is_initialized() else ()
    return session.profile(sum(recent) / max(1, len(recent)), commands)


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch, until one is empty."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch
