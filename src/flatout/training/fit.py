"""Epochs of ``Run.fit``, which are saved in checkpoints and resumed by the next process."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from flatout.core.formatting import visible
from flatout.core.kinds import check_kinds, check_number
from flatout.core.standard_error import can_replace_lines, wants_progress
from flatout.data.remote import WorkerError
from flatout.distributed.agreement import OwnError
from flatout.distributed.process_group import group_size
from flatout.mfu import MfuCounter
from flatout.training.checkpoint.folder import Folder
from flatout.training.checkpoint.termination import Termination
from flatout.training.logged_metrics import Logs
from flatout.training.stepper import Stepper


@dataclass
class Fitted:
    """Progress of ``fit``.

    Attributes:
        history: results of the complete epochs.
        steps: steps of the current epoch.
        loss: sum of the losses of these steps, on the device, or None before the first step.
        is_trained: True if the current epoch is trained, but not evaluated yet.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    loss: Tensor | None = None
    is_trained: bool = False

    @classmethod
    def from_dict(cls, data: Any) -> Fitted:
        """Return an object made from its fields as plain data.

        Raises:
            ValueError: a field has another type.
        """
        check_kinds(data, {"history": [], "steps": 0, "loss": 0.0, "is_trained": False}, "fitted")
        found = cls(**data)
        for row in found.history:
            check_kinds(row, dict.fromkeys(row, 0.0), "fitted.history")
        check_number(found.steps, "fitted.steps")
        if found.loss is not None and not isinstance(found.loss, Tensor):
            raise ValueError(f"fitted.loss must be a tensor, got {type(found.loss).__name__}")
        if (found.loss is None) != (found.steps == 0):
            raise ValueError(f"fitted.loss must be None only before the first step, got fitted.steps = {found.steps}")
        return found


class Trainable(Protocol):
    """Training that ``fit`` runs, such as ``flatout.Run``."""

    fitted: Fitted
    loader: Iterable[Any]
    steps: int

    def step(self, batch: Any) -> Tensor:
        """Train on one batch and return its loss."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``."""

    def save(self, path: str | Path, *, asynchronous: bool, then: Callable[[], object] | None) -> None:
        """Write a checkpoint."""

    def flush_saves(self) -> None:
        """Wait for an asynchronous save."""

    def flush_logs(self) -> None:
        """Wait for logged values."""

    @property
    def why_not_in_mid_epoch(self) -> str:
        """Reason why an epoch cannot be resumed in its middle. Empty if it can be."""


class Keeper:
    """Context manager that resumes a training from a folder, and saves it at intervals and at the end.

    Args:
        run: the training, which runs inside the block.
        stepper: runs the steps of ``run``.
        folder: folder that only this training uses, or None on ranks that write no checkpoint.
        every: steps between checkpoints, or None for one checkpoint after each epoch.
        asynchronous: True to write while training continues.

    Raises:
        RuntimeError: several processes train, but not together.
    """

    def __init__(
        self, run: Trainable, stepper: Stepper, folder: Folder | None, every: int | None, *, asynchronous: bool
    ) -> None:
        self._ranks = stepper.spec.ranks
        self._stepper = stepper
        if group_size() > self._ranks.size:
            raise RuntimeError(
                "checkpoint_dir requires one process, or ranks that optimize() trains together, got several that "
                "train on their own. Call run.save and run.load with a file for each rank"
            )
        self._run = run
        self._folder = folder
        self._every = every
        self._asynchronous = asynchronous
        self._termination = Termination()
        self._saved: tuple[int, int, bool] | None = None
        self._has_to_end = False

    def __enter__(self) -> Keeper:
        self._resume()
        self._stepper.note = lambda: [float(self._termination.number)]
        reason = self._run.why_not_in_mid_epoch
        if reason:
            warnings.warn(f"a training that is stopped in mid-epoch begins that epoch again: {reason}", stacklevel=4)
        self._termination.__enter__()
        return self

    def _resume(self) -> None:
        with OwnError(), self._ranks.attempt("run.fit"):
            state = self._ranks.first(None if self._folder is None else self._folder.newest())
        if state is None:
            return
        before = self._run.steps
        self._run.load_state_dict(state)
        self._saved = self._place
        if before not in (0, self._run.steps):
            warnings.warn(
                f"this run was at step {before}. It resumes from the checkpoint of step {self._run.steps}",
                stacklevel=5,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        try:
            # A signal may also reach the loader's workers. When a worker fails, the step before its batch is complete.
            # During an evaluation the trained epoch is complete, too.
            is_evaluated = self._run.fitted.is_trained and isinstance(error, Exception)
            may_save = is_evaluated or isinstance(error, WorkerError)
            if error is None or (self._ranks.size == 1 and self._termination.asked and may_save):
                self._save()
            self._run.flush_saves()
        finally:
            self._stepper.note = list
            self._termination.__exit__(kind, error, at)

    def step_done(self) -> None:
        """Save if a checkpoint is due after this step. From now on, a signal to one rank counts on all ranks."""
        numbers = [int(row[0]) for row in self._stepper.notes if row]
        if any(numbers):
            self._has_to_end = True
            self._termination.ask(max(numbers))
        if self._every is not None and self._run.steps % self._every == 0:
            self._save()

    def epoch_done(self) -> None:
        """Save if checkpoints are written after each epoch."""
        if self._every is None:
            self._save()

    @property
    def has_to_end(self) -> bool:
        """True after a signal to terminate. On several ranks, all ranks agree on this since the last step."""
        return self._termination.asked if self._ranks.size == 1 else self._has_to_end

    @property
    def _place(self) -> tuple[int, int, bool]:
        fitted = self._run.fitted
        return self._run.steps, len(fitted.history), fitted.is_trained

    def _save(self) -> None:
        if self._place != self._saved:
            folder = self._folder
            path, prune = ("", None) if folder is None else (folder.path_of(self._run.steps), folder.prune)
            self._run.save(path, asynchronous=self._asynchronous, then=prune)
            self._saved = self._place


def fit(
    run: Trainable, epochs: int, evaluate: Callable[[], dict[str, float]], bar: EpochProgress, keeper: Keeper | None
) -> None:
    """Train until ``run.fitted`` has ``epochs`` epochs, or the process has to terminate.

    Raises:
        ValueError: the loader yielded no batch in an epoch.
    """
    fitted = run.fitted
    while len(fitted.history) < epochs:
        bar.begin(len(fitted.history), fitted.steps)
        if not fitted.is_trained:
            for batch in run.loader:
                loss = run.step(batch)
                fitted.loss = loss.float() if fitted.loss is None else fitted.loss + loss
                fitted.steps += 1
                bar.advance(loss)
                if keeper is not None:
                    keeper.step_done()
                    if keeper.has_to_end:
                        return
            if fitted.loss is None:
                raise ValueError(
                    f"the loader yielded no batch in epoch {len(fitted.history) + 1}: can it be iterated again?"
                )
            fitted.is_trained = True
        assert fitted.loss is not None
        if keeper is not None and keeper.has_to_end:
            return
        row = {"loss": float(fitted.loss) / fitted.steps}
        run.flush_logs()  # the step's values have arrived
        row |= evaluate()
        bar.end(row)
        fitted.history.append(row)
        fitted.steps, fitted.loss, fitted.is_trained = 0, None, False
        if keeper is not None:
            keeper.epoch_done()
            if keeper.has_to_end:
                return


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
        from flatout.report.terminal import Console  # slow to import, and before rich

        console, wanted = Console(stderr=True), wants_progress()
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

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
