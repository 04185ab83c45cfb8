"""Samples as JSON lines: one object per line, with fields and units of the dataclasses. Unknown values are null."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from flatout.monitor.sample import GpuSample, HostSample, ProcessSample, Sample


class JsonLines:
    """Writer of samples, for ``Sampler(write=JsonLines("run.jsonl"))``.

    The writer appends to an existing file. Each sample is one write, so a crash or a fork leaves whole lines.
    """

    def __init__(self, file: str | os.PathLike[str] | TextIO) -> None:
        """Open the file.

        Args:
            file: a path, or an open text file, which the caller closes.

        Raises:
            OSError: the file cannot be written.
        """
        self._own = open(file, "ab", buffering=0) if isinstance(file, (str, os.PathLike)) else None  # noqa: SIM115
        self._file = None if isinstance(file, (str, os.PathLike)) else file

    def __call__(self, sample: Sample) -> None:
        """Write one sample."""
        line = json.dumps(asdict(sample), allow_nan=False, separators=(",", ":")) + "\n"
        if self._own is not None:
            rest = line.encode()
            while rest:  # a full disk accepts a part of a line, and the next write raises
                rest = rest[self._own.write(rest) :]
        elif self._file is not None:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file if the writer opened it."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the samples of a file that ``JsonLines`` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a sample.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _sample(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is no sample: {error}") from error


def _sample(found: dict[str, Any]) -> Sample:
    host = found["host"]
    return Sample(
        **{
            **found,
            "gpus": tuple(GpuSample(**{**gpu, "throttle": _tuple(gpu["throttle"])}) for gpu in found["gpus"]),
            "host": HostSample(**{**host, "per_cpu_percent": _tuple(host["per_cpu_percent"])}),
            "processes": tuple(ProcessSample(**process) for process in found["processes"]),
        }
    )


def _tuple(found: list[Any] | None) -> tuple[Any, ...] | None:
    return None if found is None else tuple(found)
