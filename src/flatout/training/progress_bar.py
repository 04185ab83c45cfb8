"""The progress bar of ``Run.fit``: loss, samples/s, MFU and loader stall, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from flatout.core.formatting import visible
from flatout.core.progress_setting import wants_progress
from flatout.mfu import MfuCounter
from flatout.training.logged_metrics import Logs

LOSS_EVERY = 20
"""Steps between two reads of the loss."""


class EpochProgress:
    """Progress bar with one line per epoch."""

    def __init__(self, epochs: int, loader: Iterable[Any], counter: MfuCounter, *, visible: bool) -> None:
        self._epochs = epochs
        self._loader = loader
        self._counter = counter
        self._losses = Logs(keep=1)
        self._steps = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            disable=not visible or wants_progress() is False,
        )

    def __enter__(self) -> EpochProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, epoch: int, steps: int = 0) -> None:
        """Start the line of an epoch, counted from 0, of which ``steps`` are already done."""
        try:
            total = len(self._loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # an IterableDataset has no length
            total = None
        self._task = self._bar.add_task(f"epoch {epoch + 1}/{self._epochs}", total=total, completed=steps, status="")

    def advance(self, loss: Tensor) -> None:
        """Count one step."""
        if self._steps % LOSS_EVERY == 0:
            self._losses.log("loss", loss, self._steps)
        self._steps += 1
        if self._steps % LOSS_EVERY == 0:
            self._bar.update(self._task, status=self._status())
        self._bar.advance(self._task)

    def end(self, values: dict[str, float]) -> None:
        """Show the epoch's results beside its line."""
        shown = "  ".join(f"{visible(name)} {value:.4g}" for name, value in values.items())
        self._bar.update(self._task, status=f"{shown}  {self._rates()}")

    def _status(self) -> str:
        loss = self._losses.latest("loss")
        return f"loss {math.nan if loss is None else loss:.4g}  {self._rates()}"

    def _rates(self) -> str:
        told = self._counter.window.told()
        return "  ".join(told[name] for name in ("samples_per_second", "mfu", "stall_fraction") if name in told)
