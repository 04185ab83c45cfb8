"""Checkpoints that are written atomically, verified when read, and resumed bit-exactly."""

from flatout.training.checkpoint.file import CorruptCheckpointError, read, write
from flatout.training.checkpoint.folder import Folder, newest_in
from flatout.training.checkpoint.termination import Termination
from flatout.training.checkpoint.writer import Writer

__all__ = ["CorruptCheckpointError", "Folder", "Termination", "Writer", "newest_in", "read", "write"]
