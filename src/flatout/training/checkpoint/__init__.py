"""Training that comes back after a crash: states written whole, read safely, and gone on from bit for bit."""

from flatout.training.checkpoint.file import CorruptCheckpointError, read, write
from flatout.training.checkpoint.folder import Folder, newest_in
from flatout.training.checkpoint.termination import Termination
from flatout.training.checkpoint.writer import Writer

__all__ = ["CorruptCheckpointError", "Folder", "Termination", "Writer", "newest_in", "read", "write"]
