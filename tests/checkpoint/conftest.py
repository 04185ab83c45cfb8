"""A disk that can be made to wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
import torch


class HeldDisk:
    """Holds every write, once its thread has come to it, until it is let go.

    Attributes:
        reached: set when a write has come here.
        let_go: set to let it, and all that follow, go on.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        self._save = torch.save
        patch.setattr(torch, "save", self._held)

    def _held(self, *args: Any) -> None:
        self.reached.set()
        assert self.let_go.wait(60)
        self._save(*args)

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Inside the block somebody who waits for a write is interrupted."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Future, "exception", Mock(side_effect=KeyboardInterrupt))
            yield


@pytest.fixture
def held_disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    return HeldDisk(monkeypatch)
