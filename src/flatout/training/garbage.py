"""Full garbage collections within an epoch of training, which look at everything but once."""

from __future__ import annotations

import gc
import time

WORTH_SECONDS = 0.01
"""Full collections that take less are left as they are."""


class LongLived:
    """Within ``with LongLived() as objects``, what a long full collection has left alive is looked at no more.

    Python's collector visits every object of the process in a full collection: with torch and a tokenizer loaded, half
    a second, in which nothing is queued on the GPU. When one has just ended, everything that is left is in use, so that
    ``between_steps`` can set it aside (``gc.freeze``, which takes no time) without keeping garbage. Collections go on
    as Python or the user wants them, and see what has been made since. At the end of the block all is as before.

    Does nothing where somebody else has frozen objects already, and leaves what they freeze later.
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
            gc.unfreeze()  # nobody has frozen more, else what was made since would not be in sight

    def between_steps(self) -> None:
        """Set aside what is alive, if a full collection since the last call took long."""
        if self._seconds < WORTH_SECONDS:
            return
        self._seconds = 0.0
        if self._made_since is None and not self._others_froze:
            self._others_froze = gc.get_freeze_count() > 0  # counting takes as long as there is something to count
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
