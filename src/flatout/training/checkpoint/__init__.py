"""Training that comes back after a crash: states written whole, read safely, and gone on from bit for bit."""

from flatout.checkpoint.file import DamagedCheckpoint, read, write
from flatout.checkpoint.folder import Folder, newest_in
from flatout.checkpoint.termination import Termination
from flatout.checkpoint.writer import Writer

__all__ = ["DamagedCheckpoint", "Folder", "Termination", "Writer", "newest_in", "read", "write"]
