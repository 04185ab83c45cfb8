"""GPUs of NVML that the watched process may use, with torch's numbers for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """Device to sample.

    Attributes:
        index: NVML's number of the GPU; None for a MIG device, which is found by its UUID.
        cuda_index: torch's number; None if unknown.
        mig_uuid: UUID of a MIG device.
    """

    index: int | None
    cuda_index: int | None
    mig_uuid: str | None = None


UNKNOWN_ORDER = "the GPUs differ and CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID"


def visible_devices(
    environment: Mapping[str, str], uuids: Sequence[str | None], names: Sequence[str | None]
) -> tuple[Wanted, ...]:
    """Return the devices of ``CUDA_VISIBLE_DEVICES``, as CUDA does, up to the first entry that names no GPU.

    NVML numbers the GPUs by PCI bus. CUDA numbers the fastest GPU first, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. On a
    machine with different GPUs, CUDA's numbers are therefore unknown. If the variable is not set or begins with such a
    number, the result is all GPUs, without ``cuda_index``.

    Args:
        environment: environment variables of the watched process.
        uuids: UUIDs of NVML's GPUs, in order; None for a UUID that could not be read.
        names: names of NVML's GPUs, in order; None for a name that could not be read.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({*names} - {None}) <= 1
    everything = tuple(Wanted(index, index if ordered else None) for index in range(len(uuids)))
    if listed is None:
        return everything
    entries = [entry.strip() for entry in listed.split(",")]
    if not ordered and entries and _is_number(entries[0]):
        return everything
    found: list[Wanted] = []
    for entry in entries:
        wanted = _one(entry, len(found), uuids)
        if wanted is None:
            break
        if any((wanted.index, wanted.mig_uuid) == (other.index, other.mig_uuid) for other in found):
            return ()  # CUDA shows no GPU if one GPU is named twice
        found.append(wanted)
    return tuple(found)


def _one(entry: str, cuda_index: int, uuids: Sequence[str | None]) -> Wanted | None:
    if entry.startswith("MIG-"):
        return Wanted(None, cuda_index, entry)
    if _is_number(entry):
        return Wanted(int(entry), cuda_index) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return Wanted(matches[0], cuda_index) if len(matches) == 1 else None


def _is_number(entry: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", entry) is not None
