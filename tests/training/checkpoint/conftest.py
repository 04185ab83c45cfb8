"""Disk whose writes tests can block."""

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
    """Disk that blocks every write in its thread until the test releases the write.

    Attributes:
        reached: event that a blocked write sets.
        let_go: event that releases this and all later writes.
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
        """Raise KeyboardInterrupt in every wait for a write inside the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Future, "exception", Mock(side_effect=KeyboardInterrupt))
            yield


@pytest.fixture
def held_disk(monkeypatch: pytest.MonkeyPatch) -> HeldDisk:
    return HeldDisk(monkeypatch)
