"""torch's debug mode for calls that make the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def sync_debug_mode(mode: Literal["warn", "error"]) -> Iterator[None]:
    """Let torch warn or raise inside the block when a call waits for the GPU.

    torch warns once that the mode does not find all such calls. This warning is not shown.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
