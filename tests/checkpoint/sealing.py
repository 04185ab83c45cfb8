"""The trailer of a checkpoint file, as its format is described: made here without the code that writes it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

TRAILER = struct.Struct("<7sBQI")
"""What the file is, the version of that, how long it is, and the CRC-32 of all before that."""


def sealed(path: Path, content: bytes, version: int = 1) -> Path:
    """Write the content with a valid trailer behind it."""
    head = struct.pack("<7sBQ", b"flatout", version, len(content))
    path.write_bytes(content + head + struct.pack("<I", zlib.crc32(content + head)))
    return path


def content_of(path: Path) -> bytes:
    """Return what a file holds before its trailer."""
    return path.read_bytes()[: -TRAILER.size]


def of_a_later_version(path: Path) -> None:
    """Seal a file anew, as the next version will."""
    sealed(path, content_of(path), version=2)
