"""Progress bar of ``Run.fit`` with loss, samples/s, MFU and loader stall, without waiting for the device."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from flatout.core.formatting import visible
from flatout.core.standard_error import can_replace_lines, wants_progress
from flatout.mfu import MfuCounter
from flatout.training.logged_metrics import Logs

LOSS_EVERY = 20
"""Steps between two reads of the loss."""


class EpochProgress:
    """Progress on standard error: a bar for the current epoch, and a line for each complete epoch.

    A notebook shows the bar if ipywidgets is installed, which rich requires there. A log never shows the bar, and shows
    the lines only with ``FLATOUT_PROGRESS=1``.
    """

    def __init__(self, epochs: int, loader: Iterable[Any], counter: MfuCounter, *, visible: bool) -> None:
        self._epochs = epochs
        self._loader = loader
        self._counter = counter
        self._losses = Logs(keep=1)
        self._steps = 0
        console, wanted = Console(stderr=True), wants_progress()
        has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        can_draw = has_widgets or (not console.is_jupyter and can_replace_lines(console))
        is_shown = visible and wanted is not False
        self._console = console if is_shown and (can_draw or wanted or console.is_jupyter) else None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the space that the text leaves
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            disable=not (is_shown and can_draw),
            expand=True,
        )

    def __enter__(self) -> EpochProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, epoch: int, steps: int = 0) -> None:
        """Start the line of an epoch.

        Args:
            epoch: number of the epoch, counted from 0.
            steps: number of the epoch's steps that are already done.
        """
        try:
            total = len(self._loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # an IterableDataset has no length
            total = None
        self._epoch = f"epoch {epoch + 1}/{self._epochs}"
        self._task = self._bar.add_task(self._epoch, total=total, completed=steps, status="")

    def advance(self, loss: Tensor) -> None:
        """Count one step."""
        if self._steps % LOSS_EVERY == 0:
            self._losses.log("loss", loss, self._steps)
        self._steps += 1
        if self._steps % LOSS_EVERY == 0:
            self._bar.update(self._task, status=self._status())
        self._bar.advance(self._task)

    def end(self, values: dict[str, float]) -> None:
        """Replace the bar of the epoch by a line with its results."""
        self._bar.remove_task(self._task)
        if self._console is None:
            return
        shown = "  ".join(f"{visible(name)} {value:.4g}" for name, value in values.items())
        line = f"{self._epoch}: {shown}  {self._rates()}".rstrip()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _status(self) -> str:
        loss = self._losses.latest("loss")
        return f"loss {math.nan if loss is None else loss:.4g}  {self._rates()}"

    def _rates(self) -> str:
        told = self._counter.window.told()
        return "  ".join(told[name] for name in ("samples_per_second", "mfu", "stall_fraction") if name in told)
