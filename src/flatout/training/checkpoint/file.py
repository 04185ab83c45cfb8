"""File with one state, written atomically and verified when read."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from flatout.core.cache_folder import is_special
from flatout.core.errors import ran_out_of_memory
from flatout.core.formatting import first_line

_NAME, _VERSION = b"flatout", 1
_HEAD = struct.Struct("<7sBQ")
_CHECKSUM = struct.Struct("<I")
_TRAILER_SIZE = _HEAD.size + _CHECKSUM.size
_BLOCK = 1 << 20
_ZIP = b"PK\x03\x04"


class CorruptCheckpointError(ValueError):
    """Error of a file that is corrupt, or was not written by ``write``."""


def write(path: str | Path, state: Any) -> None:
    """Write ``state`` to ``path``. Readers find the old file or the new file, even after a power failure.

    The file is a file of ``torch.save`` with a trailer, which ``torch.load`` ignores. The trailer is little-endian:

    - 7 bytes: name of the format
    - 1 byte: version of the format
    - 8 bytes: size of the file without the trailer
    - 4 bytes: CRC-32 of all bytes before this field

    Args:
        path: the file, in an existing folder. An existing file is replaced.
        state: tensors, numbers, strings, and lists, tuples and dicts of these.
    """
    path = Path(path)
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            summed = _Summed(file)
            try:
                torch.save(state, summed)  # type: ignore[arg-type]  # it needs no more than to write
            except RuntimeError:  # torch could not close the zip file, for example because the disk was full
                raise summed.failed or RuntimeError(f"{path} was not written") from None
            summed.write(_HEAD.pack(_NAME, _VERSION, summed.size))
            file.write(_CHECKSUM.pack(summed.crc))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read(path: str | Path) -> Any:
    """Return the state that ``write`` wrote to ``path``, with tensors on the CPU.

    Loading uses ``weights_only``, so no code of the file runs.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file cannot be read.
        CorruptCheckpointError: the file is corrupt, was not written by ``write``, or is not a regular file.
        ValueError: the file is intact, but has another version, or holds objects that are not safe to load.
    """
    _check(Path(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except UnpicklingError as error:
        raise ValueError(f"{path} holds objects that cannot be read safely: {error}") from error
    except Exception as error:
        if isinstance(error, MemoryError) or ran_out_of_memory(error):
            raise
        raise CorruptCheckpointError(f"{path} was not written by flatout: {first_line(error)}") from error


def temporary_of(path: Path) -> Path:
    """Return the path of the temporary file for ``path``. The next write replaces a file that remains after a crash."""
    return path.with_name(f".{path.name}.tmp")


def _check(path: Path) -> None:
    if is_special(path):
        raise CorruptCheckpointError(f"{path} is not a regular file")
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP  # torch.load also reads older formats, which `write` never writes
        file.seek(0)
        size = os.fstat(file.fileno()).st_size - _TRAILER_SIZE
        crc = 0
        for begin in range(0, size, _BLOCK):
            crc = zlib.crc32(file.read(min(_BLOCK, size - begin)), crc)
        trailer = file.read(_TRAILER_SIZE)
    head = trailer[: _HEAD.size]
    if not is_zip or len(trailer) < _TRAILER_SIZE or not head.startswith(_NAME):
        raise CorruptCheckpointError(f"{path} is no checkpoint of flatout, or it was cut short")
    _, version, written = _HEAD.unpack(head)
    if size != written or trailer[_HEAD.size :] != _CHECKSUM.pack(zlib.crc32(head, crc)):
        raise CorruptCheckpointError(f"{path} is damaged: its {size} bytes are not the {written} that were written")
    if version != _VERSION:
        raise ValueError(f"{path} is a checkpoint of version {version}, this flatout reads version {_VERSION}")


class _Summed:
    """File that counts the size and the CRC-32 of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.crc = 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it is on disk."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
