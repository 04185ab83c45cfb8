"""Watch over a dataset whose samples are kept in memory."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from flatout.core.contents import Contents
from flatout.core.random_state import RandomState, generators_in

FileState = tuple[int, ...] | None
SHARE = 0.01
"""Limit for the checks at an epoch's start, relative to the time of the epoch."""
FIRST_SECONDS = 0.1
"""Seconds for the checks before an epoch has been timed."""
LEAST_READ, MOST_READ = 2, 16
"""Numbers of samples that are read again at the start of each epoch."""

_opened: dict[int, dict[str, FileState]] = {}
"""Files that each active ``files_opened`` has seen, by the identity of its result."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])  # a relative path may be another file in another working directory
        state = state_of(path)  # before the file is read, so that a change after this is seen
        for files in list(_opened.values()):
            files.setdefault(path, state)


_is_auditing = False


@contextmanager
def files_opened() -> Iterator[dict[str, FileState]]:
    """Collect the files that Python opens in this block, and their states before. Libraries in C may open others."""
    global _is_auditing
    if not _is_auditing:
        sys.addaudithook(_audit)
        _is_auditing = True
    files: dict[str, FileState] = {}
    _opened[id(files)] = files
    try:
        yield files
    finally:
        del _opened[id(files)]


class Watch:
    """Comparison of a dataset with its state at the time of the call, in little time.

    Args:
        dataset: a dataset of which no sample is in memory yet.
        holds: makes the sample of an index again, and returns False if another sample is in memory.
    """

    def __init__(self, dataset: Any, holds: Callable[[int], bool]) -> None:
        self._dataset = dataset
        self._holds = holds
        self._process = os.getpid()
        self._length = len(dataset)
        self._files: dict[str, FileState] = {}
        self._begun: float | None = None
        self._was_read = False  # since contents were compared as a whole
        self._contents = Contents(dataset)

    @property
    def opaque(self) -> str:
        """Object that can change without being seen, as a clause; empty if there is none."""
        return self._contents.opaque

    def samples_were_read(self, files: Iterable[str]) -> None:
        """Ignore changes that reading samples has made, as of counters and caches, and watch the files it has opened.

        Args:
            files: paths.
        """
        if self._contents.changed():
            self._contents.ignore_changes()
        self._was_read = False
        self._files |= {path: state_of(path) for path in files if path not in self._files}

    def begins_in_worker(self) -> bool:
        """Return True once in each forked process. From then on, this process watches its own copy of the dataset."""
        if os.getpid() == self._process:
            return False
        self._process = os.getpid()
        return True

    def sample_was_read(self) -> None:
        """Ignore changes that reading a sample has made, as ``samples_were_read`` does, but in less time."""
        self._was_read = True
        if self._contents.changed_nearby():
            self._contents.ignore_changes()

    def changed_by_samples(self, files: Mapping[str, FileState], *, nearby: bool) -> str:
        """Return a change that making samples has made, as a clause.

        A handle that was opened for the samples is no such change. It is watched from now on, and so are ``files``.

        Args:
            files: files that were opened for the samples.
            nearby: True to look for changes that are seen in about 2 microseconds.
        """
        if os.getpid() != self._process or (nearby and not self._contents.changed_nearby()):
            return ""
        for text, before, now in self._contents.differences():
            if not (before is None or type(before) is object) or not _is_handle(now):
                return text
        self._contents = Contents(self._dataset)
        self._files |= files
        return ""

    def seen_nearby(self) -> str:
        """Return a change that is seen in about 2 microseconds, as a clause. Empty if there is none."""
        if os.getpid() != self._process:  # this process has a copy of the dataset
            return ""
        try:
            if len(self._dataset) != self._length:
                return "the length of the dataset has changed"
        except Exception as error:
            return f"the length of the dataset raises {type(error).__name__}"
        return self._contents.changed_nearby()

    def seen(self) -> str:
        """Return a change of contents, files or samples, as a clause. Call this at the start of an epoch.

        All contents are compared. Files are compared and samples read again in random choices, which together take at
        most ``SHARE`` of the last epoch, but at least ``LEAST_READ`` samples.
        """
        if os.getpid() != self._process:
            return ""
        now = time.perf_counter()
        seconds = FIRST_SECONDS if self._begun is None else SHARE * (now - self._begun)
        self._begun = now
        return self.seen_in_contents() or self._changed_file(now + seconds / 2) or self._read(now + seconds)

    def seen_in_contents(self) -> str:
        """Return a change of the contents, as a clause."""
        if os.getpid() != self._process:
            return ""
        if self._was_read and not self.seen_nearby():
            self.samples_were_read(())
        return self.seen_nearby() or self._contents.changed()

    def _changed_file(self, deadline: float) -> str:
        files = list(self._files.items())
        first = _choice.randrange(len(files)) if files else 0
        for number, (path, state) in enumerate(files[first:] + files[:first]):
            if number % 64 == 63 and time.perf_counter() > deadline:
                break
            if state_of(path) != state:
                return f"file {path} has changed"
        return ""

    def _read(self, deadline: float) -> str:
        """Read some samples again, and compare them with those in memory."""
        with RandomState.capture(self._dataset).restored():
            for number in range(min(MOST_READ, self._length)):
                if number >= LEAST_READ and time.perf_counter() > deadline:
                    break
                index = _choice.randrange(self._length)
                try:
                    is_same = self._holds(index)
                except Exception as error:  # of the user's code
                    return f"reading sample {index} raises {type(error).__name__}"
                if not is_same:
                    return f"sample {index} was read again, and differs"
        if self._contents.changed_nearby():
            self._contents.ignore_changes()
        return ""


def _is_handle(value: Any) -> bool:
    """Return True for an open file or archive, in contrast to numbers, containers, and what holds a generator."""
    if isinstance(value, np.memmap):
        return True
    kinds = (int, float, complex, str, bytes, Tensor, np.ndarray, np.generic, list, tuple, dict, set)
    return not isinstance(value, kinds) and not generators_in(value)


_choice = random.Random()
"""Separate generator, so that the script's random numbers stay the same."""


def state_of(path: str) -> FileState:
    """Return the device, inode, size and times of change of a file. None without the file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    # Copies may keep the time of the contents (mtime), but not the time of the inode's change (ctime).
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
