"""Shorter garbage collections within an epoch, in which long-lived objects are not visited again."""

from __future__ import annotations

import gc
import time

WORTH_SECONDS = 0.01
"""Shortest duration of a full collection that causes a freeze, in seconds."""


class LongLived:
    """Context manager that hides long-lived objects from Python's garbage collector after a long full collection.

    A full collection visits every object of the process. With torch and a tokenizer loaded, it takes half a second, in
    which the host queues no GPU work. Right after a full collection every remaining object is in use. ``between_steps``
    then excludes these objects with ``gc.freeze``, which takes no time and keeps no garbage. Later collections visit
    only newer objects. The end of the block reverts the exclusion.

    If other code has already frozen objects, nothing is frozen. Objects that other code freezes later stay frozen.
    """

    def __init__(self) -> None:
        self._begun = 0.0
        self._seconds = 0.0
        self._made_since: list[object] | None = None
        self._others_froze = False

    def __enter__(self) -> LongLived:
        gc.callbacks.append(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._heard)
        if self._made_since is not None and any(each is self._made_since for each in gc.get_objects()):
            gc.unfreeze()  # no other code has frozen objects since, because newer objects are still listed

    def between_steps(self) -> None:
        """Freeze all live objects if a full collection since the last call took long."""
        if self._seconds < WORTH_SECONDS:
            return
        self._seconds = 0.0
        if self._made_since is None and not self._others_froze:
            self._others_froze = gc.get_freeze_count() > 0  # counting takes time in proportion to the count
            if not self._others_froze:
                gc.freeze()
                self._made_since = []

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self._seconds = time.perf_counter() - self._begun
