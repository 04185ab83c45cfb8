"""Samples of GPUs, and their JSON lines. Names contain units. A value that could not be read is None, in JSON null."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class GpuSample:
    """Sample of one GPU or one MIG device.

    Attributes:
        index: NVML's number of the GPU, in order of the PCI bus; -1 if unknown.
        cuda_index: torch's number of the GPU (``cuda:N``).
        name: name of the product.
        uuid: NVML's ``GPU-...``, or ``MIG-...`` of a MIG device.
        util_percent: share of time in which a kernel ran, on any number of SMs. A GPU at 100 may have idle SMs.
        memory_used_bytes: memory of processes, without the driver's own share if NVML reports the share.
        memory_total_bytes: device memory.
        power_watts: present power draw.
        power_limit_watts: limit that the driver enforces.
        sm_clock_mhz: present SM clock.
        sm_clock_max_mhz: highest SM clock.
        temperature_celsius: temperature of the die.
        throttle: reasons why the clocks are lowered, in words; empty if there is no reason.
        sm_active_percent: SMs with at least one warp, averaged over time and SMs.
        tensor_active_percent: share of time in which the tensor cores worked.
        dram_active_percent: used bandwidth of device memory, relative to the maximum.
        gpm: ``NVML GPM``, the source of the three attributes above, or the reason why they are None.
        missing: reasons by the names of the other fields that could not be read.
    """

    index: int
    cuda_index: int | None = None
    name: str | None = None
    uuid: str | None = None
    util_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    temperature_celsius: int | None = None
    throttle: tuple[str, ...] | None = None
    sm_active_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    gpm: str = ""
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Sample of all GPUs.

    Attributes:
        time: Unix time, seconds.
        gpus: GPUs that this process may use.
        no_gpu: reason why ``gpus`` is empty, in one sentence; None if ``gpus`` is not empty.
    """

    time: float
    gpus: tuple[GpuSample, ...]
    no_gpu: str | None


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

    def __exit__(self, *error: object) -> None:
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
                found = json.loads(line)
                for gpu in found["gpus"]:
                    gpu["throttle"] = None if gpu["throttle"] is None else tuple(gpu["throttle"])
                yield Sample(**{**found, "gpus": tuple(GpuSample(**gpu) for gpu in found["gpus"])})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is no sample: {error}") from error
