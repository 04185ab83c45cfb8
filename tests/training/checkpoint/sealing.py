"""Trailer of a checkpoint file by its documented format, independent of flatout's writer."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

TRAILER = struct.Struct("<7sBQI")
"""Format name, format version, length of the content, and CRC-32 of everything before the CRC."""


def sealed(path: Path, content: bytes, version: int = 1) -> Path:
    """Write the content followed by a valid trailer."""
    head = struct.pack("<7sBQ", b"flatout", version, len(content))
    path.write_bytes(content + head + struct.pack("<I", zlib.crc32(content + head)))
    return path


def content_of(path: Path) -> bytes:
    """Return the content of a file without its trailer."""
    return path.read_bytes()[: -TRAILER.size]


def of_a_later_version(path: Path) -> None:
    """Replace the trailer by one with the next format version."""
    sealed(path, content_of(path), version=2)
