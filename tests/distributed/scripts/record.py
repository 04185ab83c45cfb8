"""Record of a training, one file for each rank."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flatout


class Record:
    """Record of a training. ``end`` writes it to the file ``folder/RANK.pt``.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"{os.environ.get('RANK', '0')}.pt"
        self._losses: list[float] = []
        self._samples: list[list[str]] = [[]]
        self._weights: list[str] = []

    def step(self, batch: Any, loss: Tensor) -> None:
        """Record a step."""
        self._losses.append(loss.item())
        first = batch if isinstance(batch, Tensor) else batch[0]
        self._samples[-1] += [hashlib.sha1(sample.cpu().numpy().tobytes()).hexdigest() for sample in first]

    def epoch(self, model: nn.Module) -> None:
        """Record the end of an epoch."""
        self._weights.append(hash_of(model))
        self._samples.append([])

    def end(self, run: flatout.Run, model: nn.Module) -> None:
        """Undo the tuning, and write the record."""
        decisions = dict(run.plan.decisions)
        run.undo()
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters())
        state = {
            "losses": self._losses,
            "samples": self._samples[:-1],
            "weights": self._weights,
            "state": {name: value.cpu() for name, value in model.state_dict().items()},
            "class": type(model).__name__,
            "hooks": hooks,
            "decisions": repr(decisions),
        }
        torch.save(state, self._file)


def hash_of(model: nn.Module) -> str:
    """Return a hash of all weights."""
    parts = [value.detach().cpu().contiguous().numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha1(b"".join(parts)).hexdigest()
