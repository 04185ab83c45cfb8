"""Tuned training job, with methods to step, fit, evaluate, profile, export and undo."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout import unpacked
from flatout.core.batches import to_device
from flatout.core.breaks import Breaks
from flatout.core.described import Described
from flatout.core.standard_error import say, wants_progress
from flatout.core.toggle import Toggle
from flatout.data.loaders import check_reiterable
from flatout.distributed.agreement import OwnError, RankFailure
from flatout.mfu import MfuCounter, Phases
from flatout.mfu.verdict import Verdict
from flatout.plan import Plan
from flatout.profile import Profile, Step, profile_run
from flatout.report import Report
from flatout.report.model import RankPace
from flatout.resume import Resumable
from flatout.training import checkpoint
from flatout.training.attachments import Attachment, attach, attached_to, detach
from flatout.training.device_verdict import judged, tensor_watch
from flatout.training.evaluation_loop import Evaluation, Metric
from flatout.training.export import export, export_weights
from flatout.training.fit import EpochProgress, Fitted, Keeper, fit
from flatout.training.job import Job
from flatout.training.learning_rate import steps_of
from flatout.training.loader import TrainingLoader
from flatout.training.logged_metrics import Logs
from flatout.training.recovery import Recovery


def undo(model: nn.Module) -> None:
    """Revert all changes of ``optimize`` to a model and its optimizer.

    The ``Run`` is not needed. For a model that flatout has not tuned, nothing happens.

    Args:
        model: the tuned model.
    """
    detach(model)


def report_of(model: nn.Module) -> Report:
    """Return the report on a model that ``optimize`` or ``auto`` has tuned.

    This also works for ``model, loader = flatout.optimize(model, loader)``.

    Args:
        model: the tuned model.

    Raises:
        ValueError: the model is not tuned, or its tuning has failed or has just begun.
    """
    attachment = attached_to(model)
    report = None if attachment is None else attachment.report()
    if report is None:
        raise ValueError(
            f"model must be tuned by flatout, got a {type(model).__name__} without a report. "
            "Call model, loader = flatout.optimize(model, loader, optimizer)"
        )
    return report


def _current(report: Report, breaks: Breaks) -> Report:
    """Return a report that shows which techniques training has reverted."""
    return Report(report.summary.reverted(breaks.found)) if breaks.found else report


class Run(Resumable, Described):
    """Tuned training job that ``flatout.optimize`` returns.

    Attributes:
        model: the user's module, the same object.
        loader: yields batches that are already on the device.
        optimizer: the user's optimizer, the same object, or None if no optimizer was given.
        plan: the decisions, to save and apply again.
        logs: values of :meth:`log`. Iterate over ``logs`` for ``(step, name, value)``, or register a callback with
            ``logs.listen``.
        steps: number of calls of :meth:`step`, including the calls before a loaded checkpoint.
        fitted: progress of :meth:`fit`.
    """

    def __init__(
        self,
        job: Job,
        *,
        scheduler: Any,
        plan: Plan,
        report: Report,
        toggles: Sequence[Toggle],
        example: Any,
        peak_flops: float | None = None,
    ) -> None:
        self.model = job.spec.model
        self.optimizer = job.spec.optimizer
        self._report = report
        self.logs = Logs()
        self._counter = MfuCounter(peak_flops=peak_flops, device=job.spec.device, tensor_watch=tensor_watch(job))
        observers = [toggle.on_batch for toggle in toggles if toggle.on_batch is not None]
        breaks = job.breaks
        super().__init__(job, scheduler, plan, TrainingLoader(job, self._counter, self._flush, observers))
        self._example = example
        self._recovery = None if job.why_no_step else Recovery(job.stepper)
        self._evaluation = Evaluation(job)
        self._attachment = Attachment(tuple(toggles), lambda: _current(report, breaks))
        self._is_unpacked = False
        self._is_eval_mode_known = self._is_second_step_known = False
        attach(job.spec.model, self._attachment)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``model, loader = flatout.optimize(model, loader, optimizer)``, and print the result on stderr."""
        if not self._is_unpacked and wants_progress() is not False and self._job.spec.ranks.rank == 0:
            self._is_unpacked = True
            for line in unpacked.lines(self.report.summary, self._job, self._scheduler):
                say(line)
        yield self.model
        yield self.loader

    def _facts(self) -> dict[str, str]:
        return {
            **self.report._facts(),
            "steps": f"step {self.steps:,}",
            "model": type(self.model).__name__,
            "stats": ", ".join(self.stats.window.told().values()),
        }

    @property
    def report(self) -> Report:
        """Every row of the checklist, with its number and its reason."""
        return _current(self._report, self._job.breaks)

    @property
    def scaler(self) -> Any:
        """The loss scaler, or None if the model does not compute in fp16."""
        return self._job.stepper.scaler

    @property
    def stats(self) -> MfuCounter:
        """Counter of steps, samples and tokens, with rolling step and phase times, rates, MFU, HFU and loader stall.

        On a GPU that reports it, ``tensor_cores`` has the activity of the tensor cores.

        The counter counts calls of :meth:`step`. For your own loop, call ``run.stats.wrap(run.model)``.
        """
        return self._counter

    @property
    def rank_times(self) -> tuple[RankPace, ...]:
        """Mean times of each rank for loading, computing and waiting for others, in the last 100 calls of :meth:`step`.

        All ranks wait for the rank with the largest ``own_ms``. Every rank has the times of all ranks. In a training of
        one process, there are no times.
        """
        return self._job.stepper.times.paces

    @property
    def stop_after_bad(self) -> int:
        """Number of bad steps in a row after which :meth:`step` raises an error.

        The loss of a bad step is infinite or NaN, or the loss scaler has skipped the step. On a CPU every step is read.
        On a GPU every fiftieth step is read until a bad step, and then every step. The count begins with the first bad
        step that is read. Values arrive with the delay of the GPU.
        """
        return self._finite.stop_after

    @stop_after_bad.setter
    def stop_after_bad(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"stop_after_bad must be >= 1, got {steps}")
        self._finite.stop_after = steps

    @property
    def verdict(self) -> Verdict:
        """Verdict on the device use of the last steps.

        The verdict has the MFU, the activity of the tensor cores, NVML's utilization, the usual MFU, and the limit.

        The verdict needs a sample of the GPU, which takes some milliseconds, too long for every step.
        """
        reading = self._counter.window
        where = {"stall_fraction": reading.stall_fraction, "phases": reading.phases}
        return judged(self._job, reading.mfu, self.report.rows, tensor_cores=self._counter.tensor_cores, **where)

    def step(self, batch: Any) -> Tensor:
        """Run forward, backward and, after every ``accumulate`` batches, the update and the scheduler's step.

        The fused optimizer scales, averages and clips gradients in registers. ``p.grad`` keeps the result of backward,
        and the host does not wait for the device. For any other optimizer, gradients are rewritten before the update,
        as torch's own utilities do.

        A step that runs out of memory is computed in smaller parts, and so are all later steps. ``micro_batch`` is the
        size of these parts.

        The model keeps its mode. The first step in eval mode gives a warning. So does a script that also steps the
        scheduler of ``optimize(scheduler=)``.

        Args:
            batch: a batch of ``run.loader`` or of the user's loader.

        Returns:
            The loss, 0-dim, detached, on the device.

        Raises:
            RuntimeError: ``optimize`` was not given an optimizer, or no loss.
            FloatingPointError: :attr:`stop_after_bad` steps in a row were infinite, NaN or skipped. The message names
                the place where infinities or NaNs begin. Earlier, the first bad loss that is read gives a warning.
            torch.OutOfMemoryError: a single sample does not fit, or the batch cannot be split. The message gives
                advice. The step is not taken. Earlier accumulated gradients are kept, unless the message reports their
                loss.
            flatout.optim.PartialUpdateError: an optimizer that is not flatout's ran out of memory in the middle of a
                step.
        """
        if self._recovery is None:
            advice = "Give an optimizer" if self.optimizer is None else self._job.objective.loss_advice(batch)
            raise RuntimeError(f"run.step needs an optimizer and a loss: {self._job.why_no_step}. {advice}")
        if not (self.model.training or self._is_eval_mode_known):
            self._is_eval_mode_known = True
            warnings.warn(
                "run.step trains a model in eval mode: dropout is off, and batch norms keep their running statistics. "
                "Call model.train() before training",
                stacklevel=2,
            )
        job = self._job
        stepper = job.stepper
        with self._counter.step(*job.work(batch)) as step:
            with step.phase("h2d"):
                batch = to_device(batch, job.spec.device)
            stepper.weigh(batch, self.loader)
            try:
                loss = self._recovery.step(batch, step.phase)
            except RankFailure as failure:
                with OwnError():
                    raise failure
            if self._scheduler is not None and not stepper.pending:
                self._step_scheduler()
        self.steps += 1
        if self.steps >= self._finite.next_look:
            self._finite.look(self.steps, loss, batch)
        return loss

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number without waiting for the device, as in ``run.log("loss", run.step(batch))``.

        ``loss.item()`` waits until the GPU has computed the loss. This method queues a copy of the loss instead.
        Listeners get the number in a later call, or in :meth:`flush_logs`::

            run.logs.listen(lambda step, name, value: writer.add_scalar(name, value, step))

        Args:
            name: name of the value.
            value: a number, or a tensor of one element.
            step: step of the value. The default is the number of :meth:`step` calls so far.

        Raises:
            TypeError: ``value`` is neither a number nor a tensor.
            ValueError: ``value`` is a tensor of more or less than one element. Or ``step`` is missing in your own loop,
                because only :meth:`step` counts steps.
        """
        if step is None and self._recovery is None:
            raise ValueError("run.log needs step= in a loop of your own: only run.step counts steps")
        self.logs.log(name, value, self.steps if step is None else step)

    def flush_logs(self) -> None:
        """Wait for logged values on their way, and pass them to the listeners, for example at the end of training."""
        self.logs.flush()

    def _flush(self) -> None:
        """Update with the remaining accumulated gradients at an epoch's end, and broadcast the buffers of rank 0."""
        if self._recovery is not None and self._recovery.flush():
            self._step_scheduler()
        if self._job.stepper.sync is not None:
            self._job.stepper.sync.broadcast_buffers()

    def _step_scheduler(self) -> None:
        if self._scheduler is None:
            return
        # None before the first step, because a script may load the state of its scheduler.
        before = self._scheduler_steps
        if before is not None and not self._is_second_step_known and (steps_of(self._scheduler) or 0) > before:
            self._is_second_step_known = True
            warnings.warn(
                "the loop calls scheduler.step(), and so does run.step: learning rates change too fast. Remove "
                "scheduler.step() from the loop, or scheduler= from flatout.optimize()",
                stacklevel=3,
            )
        self._scheduler.step()
        self._scheduler_steps = steps_of(self._scheduler)

    def fit(
        self,
        epochs: int,
        eval_loader: Iterable[Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        *,
        progress: bool = True,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep: int = 3,
        asynchronous: bool = True,
    ) -> list[dict[str, float]]:
        """Train for a number of epochs. With ``checkpoint_dir``, resume the training of an earlier process.

        Training resumes from the newest readable checkpoint in ``checkpoint_dir``, so a restart of the same script
        resumes it. SIGTERM and Ctrl-C finish the step, save, and then terminate as usual (Ctrl-C raises
        ``KeyboardInterrupt``). A second Ctrl-C terminates at once, without saving. If the user has installed a signal
        handler, it is called after the save, and ``fit`` returns the epochs so far.

        The result is bit-exact to an uninterrupted training on two conditions. Steps must repeat their results, which
        requires ``deterministic=True`` on a GPU. Decisions must be the same, as with
        ``optimize(plan=Plan.from_checkpoints(folder))``. Random numbers differ in worker processes, and also if batches
        for a GPU are loaded before the step. :func:`flatout.data.seed_samples` makes random numbers the same.

        Args:
            epochs: passes over ``run.loader``. With ``checkpoint_dir``, the number includes epochs of earlier
                processes.
            eval_loader: loader of the evaluation after each epoch.
            metrics: as in ``evaluate``.
            progress: True to show loss, samples/s, MFU and loader stall on standard error, if this is a terminal or a
                notebook. With ``FLATOUT_PROGRESS=1``, a log has a line per epoch. Of several ranks, the first shows
                them.
            checkpoint_dir: folder for the checkpoints of this training only, which is created if missing.
            checkpoint_every: steps between checkpoints. The default is one checkpoint after each epoch.
            keep: number of checkpoints to keep.
            asynchronous: True to write checkpoints while training continues, which takes host memory for one copy of
                model and optimizer.

        Returns:
            One dict per epoch, with ``loss`` (mean over its steps), and ``eval_<name>`` of every evaluated value.

        Raises:
            TypeError: ``epochs`` is above 1 and ``eval_loader`` is an iterator that yields only one epoch.
            ValueError: the loader yielded no batch in an epoch, ``checkpoint_every`` or ``keep`` is below 1, or the
                checkpoint belongs to another training.
            OSError: a checkpoint could not be written.
            RuntimeError: ``checkpoint_dir`` is given, but several processes train that ``optimize`` does not train
                together.
            flatout.CorruptCheckpointError: checkpoints exist, but none is readable.
        """
        if checkpoint_every is not None and checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be >= 1, got {checkpoint_every}")
        if epochs > 1:
            check_reiterable(eval_loader, "eval_loader")

        def evaluated() -> dict[str, float]:
            values = {} if eval_loader is None else self.evaluate(eval_loader, metrics)
            return {f"eval_{name}": value for name, value in values.items()}

        if not self.model.training:
            self.model.train()
        with contextlib.ExitStack() as stack:
            keeper, ranks = None, self._job.spec.ranks
            if checkpoint_dir is not None:
                with OwnError(), ranks.attempt("run.fit"):
                    folder = checkpoint.Folder(checkpoint_dir, keep) if ranks.rank == 0 else None
                keeper = stack.enter_context(
                    Keeper(self, self._job.stepper, folder, checkpoint_every, asynchronous=asynchronous)
                )
            if not self._is_loaded:
                self.fitted = Fitted()
            self._is_loaded = False
            is_shown = progress and ranks.rank == 0
            bar = stack.enter_context(EpochProgress(epochs, self.loader, self._counter, visible=is_shown))
            fit(self, epochs, evaluated, bar, keeper)
        return list(self.fitted.history)

    def export(self, path: str | Path, format: str = "export", example: Any = None) -> None:
        """Save a copy of the model for deployment, in eval mode, on the CPU, and without flatout.

        Args:
            path: the file.
            format: ``"export"`` or ``"torchscript"``. ``torch.export.load(path).module()`` loads the first format.
                ``torch.jit.load(path)``, or ``torch::jit::load`` in C++, loads the second format.
            example: input of the model, as a tensor, a tuple that starts with the tensor, or a mapping of keyword
                arguments. The default is the first samples of the training, without labels.

        Raises:
            ValueError: ``format`` is unknown, or a trace for TorchScript depends on the values of the inputs.
            Exception: torch cannot export the model.
        """
        export(self.model, path, self._example if example is None else example, format)

    def export_weights(self, path: str | Path) -> None:
        """Save the weights as safetensors.

        Raises:
            ImportError: the package safetensors is not installed.
        """
        export_weights(self.model, path)

    def evaluate(self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Return the mean loss and metrics over a loader, without gradients, in eval mode. Modes are restored.

        If ``optimize`` trains several ranks together, all ranks must call this, and all get the same values. Each rank
        computes its slice of every batch of a plain ``DataLoader``, and the values are the same as with one process. A
        metric that is not a mean over samples, such as F1, depends on the slices, as it depends on the batch size.
        Every rank iterates over the whole of any other loader, such as a list of batches. The means are then taken over
        all ranks.

        Args:
            loader: yields batches like the training's batches.
            metrics: functions ``(outputs, batch) -> mean over the batch`` by name, with the model's outputs.

        Returns:
            ``loss``, weighted by ``loss_weight`` if ``optimize`` has one, and every metric, weighted by samples.

        Raises:
            ValueError: the loader yielded no batch, or ranks have different metrics.
            RuntimeError: the evaluation failed on another rank.
        """
        self._counter.pause()
        with OwnError():
            return self._evaluation.means(loader, {} if metrics is None else metrics)

    def profile(self, steps: int = 10, warmup: int = 3) -> Profile:
        """Profile the time of a step, and give advice. ``print(run.profile())`` shows both.

        The steps are **real training steps**. Weights, optimizer and scheduler advance as in any loop over
        ``run.loader``. The first ``warmup`` steps warm up. Two steps search for sync points. Some steps consume batches
        that loader workers have prefetched. The next ``steps`` steps are timed without ``torch.profiler``. Then equally
        many steps run under ``torch.profiler``.

        Headline, phases and verdict come from the timed steps. Operators and memory come from the profiler. The
        epoch ends as by a ``break``. If the loader ends too early, a new epoch starts. A loader that cannot restart is
        profiled to its end.

        Args:
            steps: number of steps to time, and number of steps to profile.
            warmup: number of steps before all others.

        Raises:
            ValueError: ``steps`` < 1, ``warmup`` < 0, or the loader ended before a step was timed.
            RuntimeError: ``optimize`` was not given an optimizer.
        """
        return profile_run(self.loader, self.step, steps, warmup, verdict=self._judge, rows=self.report.rows)

    def _judge(self, mean: Step) -> str:
        """Return the verdict on the mean of the steps that were just timed."""
        window = self._counter.window
        mfu = None if window.mfu is None else window.mfu * window.seconds / window.steps / mean.seconds
        phases = Phases(**{str(phase): seconds for phase, seconds in mean.phases.items()})
        return str(judged(self._job, mfu, self.report.rows, phases=phases))

    def undo(self) -> None:
        """Revert ``optimize``, so that model, optimizer, device and backend flags work as before.

        Weights and optimizer state keep their trained values. ``run.loader`` is the user's own loader again.
        """
        if attached_to(self.model) is self._attachment:  # else already reverted, or replaced by a later optimize
            detach(self.model)
        if isinstance(self.loader, TrainingLoader):
            self.loader = self.loader.original
            self._job.data.source = self.loader
