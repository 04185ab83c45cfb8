"""A tuned training job: step it, fit it, evaluate it, undo it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout import unpacked
from flatout.core.batches import to_device
from flatout.core.described import Described
from flatout.core.progress_setting import wants_progress
from flatout.core.standard_error import say
from flatout.core.toggle import Toggle
from flatout.data.loaders import check_reiterable
from flatout.distributed.agreement import OwnError
from flatout.mfu import MfuCounter, Phases
from flatout.mfu.verdict import Verdict
from flatout.plan import Plan
from flatout.profile import Profile, Step, profile_run
from flatout.report import Report
from flatout.report.model import RankPace
from flatout.resume import Resumable
from flatout.techniques import ObservingCandidate
from flatout.training import checkpoint
from flatout.training.attachments import Attachment, attach, attached_to, detach
from flatout.training.device_verdict import judged
from flatout.training.evaluation_loop import Evaluation, Metric
from flatout.training.export import export, export_weights
from flatout.training.fit import Fitted, Keeper, fit
from flatout.training.job import Job
from flatout.training.loader import TrainingLoader
from flatout.training.logged_metrics import Logs
from flatout.training.progress_bar import EpochProgress
from flatout.training.recovery import Recovery


def undo(model: nn.Module) -> None:
    """Revert everything that ``optimize`` attached to a model and its optimizer.

    Works without the ``Run``. Does nothing for a model that flatout has not tuned.
    """
    detach(model)


def report_of(model: nn.Module) -> Report:
    """Return the report on a model that is tuned: by ``optimize``, also in the two-value form, or by ``auto``.

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


class Run(Resumable, Described):
    """Tuned training job that ``flatout.optimize`` returns.

    Attributes:
        model: the user's module, the same object.
        loader: yields batches that are already on the device.
        optimizer: the user's optimizer, the same object; None if it was not given.
        plan: the decisions, to save and apply again.
        report: every row of the checklist, with its number and its reason.
        logs: values of :meth:`log`. Iterate it for ``(step, name, value)``, or register a callback with
            ``logs.listen``.
        steps: number of calls of :meth:`step`, including those before a loaded checkpoint.
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
        self.report = report
        self.logs = Logs()
        self._counter = MfuCounter(peak_flops=peak_flops, device=job.spec.device)
        observers = [toggle.on_batch for toggle in toggles if isinstance(toggle, ObservingCandidate)]
        super().__init__(job, scheduler, plan, TrainingLoader(job, self._counter, self._flush, observers))
        self._example = example
        self._recovery = None if job.why_no_step else Recovery(job.stepper)
        self._evaluation = Evaluation(job)
        self._attachment = Attachment(tuple(toggles), lambda: report)
        self._is_unpacked = False
        attach(job.spec.model, self._attachment)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``model, loader = flatout.optimize(model, loader, optimizer)``, and say on stderr what is kept."""
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
    def scaler(self) -> Any:
        """The loss scaler; None unless the model computes in fp16."""
        return self._job.stepper.scaler

    @property
    def stats(self) -> MfuCounter:
        """Counts of steps, samples and tokens; rolling step and phase times, rates, MFU and HFU, loader stall.

        The steps are those of :meth:`step`. For your own loop: ``run.stats.wrap(run.model)``.
        """
        return self._counter

    @property
    def rank_times(self) -> tuple[RankPace, ...]:
        """Mean times of each rank in the last 100 calls of :meth:`step`: loading, computing, waiting for other ranks.

        The rank with the largest ``own_ms`` is the one that all others wait for. Every rank knows the times of all.
        Empty in a training of one process.
        """
        return self._job.stepper.times.paces

    @property
    def stop_after_bad(self) -> int:
        """Number of bad steps in a row after which :meth:`step` raises: infinite, NaN or skipped by the loss scaler.

        On a CPU every step is read. On a GPU every fiftieth step is read until a bad one, and then every step. The
        count begins with the first bad step that is read. Values arrive with the delay of the GPU.
        """
        return self._finite.stop_after

    @stop_after_bad.setter
    def stop_after_bad(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"stop_after_bad must be >= 1, got {steps}")
        self._finite.stop_after = steps

    @property
    def verdict(self) -> Verdict:
        """Verdict on the device use of the last steps: MFU beside NVML's utilization, the usual MFU, and the limit.

        Samples the GPU, which takes some milliseconds: too slow for every step.
        """
        reading = self._counter.window
        where = {"stall_fraction": reading.stall_fraction, "phases": reading.phases}
        return judged(self._job, reading.mfu, self.report.rows, **where)

    def step(self, batch: Any) -> Tensor:
        """Run forward, backward and, after every ``accumulate`` batches, the update and the scheduler's step.

        The fused optimizer scales, averages and clips gradients in registers. ``p.grad`` keeps the result of backward,
        and nothing waits for the device. For any other optimizer gradients are rewritten before the update, as torch's
        own utilities do.

        A step that runs out of memory is computed in smaller parts, and so are all later steps: ``micro_batch``.

        Args:
            batch: a batch of ``run.loader`` or of the user's loader.

        Returns:
            The loss, 0-dim, detached, on the device.

        Raises:
            RuntimeError: ``optimize`` was not given an optimizer, or no loss.
            FloatingPointError: :attr:`stop_after_bad` steps in a row were infinite or NaN. The message says where
                infinities or NaNs begin. Before that, the first bad loss that is read gives a warning.
            torch.OutOfMemoryError: a single sample does not fit, or the batch cannot be split. The message says what
                would help. The step is not taken. Gradients accumulated before are kept, unless the message says that
                they are lost.
            flatout.optim.PartialUpdateError: an optimizer that is not flatout's ran out of memory in the middle of a
                step.
        """
        if self._recovery is None:
            advice = "Give an optimizer" if self.optimizer is None else self._job.objective.loss_advice(batch)
            raise RuntimeError(f"run.step needs an optimizer and a loss: {self._job.why_no_step}. {advice}")
        with self._counter.step(*self._job.work(batch)) as step:
            with step.phase("h2d"):
                batch = to_device(batch, self._job.spec.device)
            self._job.stepper.weigh(batch, getattr(self.loader, "share", None))
            with OwnError():
                loss = self._recovery.step(batch, step.phase)
            if not self._job.stepper.pending:
                self._step_scheduler()
        self.steps += 1
        if self.steps >= self._finite.next_look:
            self._finite.look(self.steps, loss, batch)
        return loss

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number without waiting for the device: ``run.log("loss", run.step(batch))``.

        ``loss.item()`` waits until the GPU has computed the loss. This method queues a copy of the loss instead.
        Listeners get the number in a later call, or in :meth:`flush_logs`::

            run.logs.listen(lambda step, name, value: writer.add_scalar(name, value, step))

        Args:
            name: name of the value.
            value: a number, or a tensor of one element.
            step: step of the value; default: the number of :meth:`step` calls so far.

        Raises:
            TypeError: ``value`` is neither a number nor a tensor.
            ValueError: ``value`` is a tensor of more or less than one element. Or ``step`` is missing in a loop of your
                own, because only :meth:`step` counts steps.
        """
        if step is None and self._recovery is None:
            raise ValueError("run.log needs step= in a loop of your own: only run.step counts steps")
        self.logs.log(name, value, self.steps if step is None else step)

    def flush_logs(self) -> None:
        """Wait for logged values on their way, and pass them to the listeners, for example at the end of training."""
        self.logs.flush()

    def _flush(self) -> None:
        """Update with the remaining accumulated gradients at an epoch's end. Make the buffers of all ranks equal."""
        if self._recovery is not None and self._recovery.flush():
            self._step_scheduler()
        if self._job.stepper.sync is not None:
            self._job.stepper.sync.broadcast_buffers()

    def _step_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

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
        """Train for a number of epochs. With ``checkpoint_dir``, resume where an earlier process was stopped or killed.

        Training resumes from the newest readable checkpoint in ``checkpoint_dir``, so a restart of the same script
        resumes it. SIGTERM and Ctrl-C finish the step, save, and then terminate as usual (Ctrl-C raises
        ``KeyboardInterrupt``). A second Ctrl-C terminates at once, without saving. If the user has installed a signal
        handler, it is called after the save, and ``fit`` returns the epochs so far.

        The result is bit-exact to an uninterrupted training on two conditions. Steps repeat their results (on a GPU:
        ``deterministic=True``), and decisions are the same (``optimize(plan=Plan.from_checkpoints(folder))``). Random
        numbers differ in worker processes, and if a GPU's batches are loaded ahead of the step.
        :func:`flatout.data.seed_samples` makes them the same.

        Args:
            epochs: passes over ``run.loader``. With ``checkpoint_dir`` they count from the start of training, including
                those of earlier processes.
            eval_loader: evaluated after each epoch.
            metrics: as in ``evaluate``.
            progress: show a bar with loss, samples/s and loader stall.
            checkpoint_dir: folder for the checkpoints of this training alone; made if it is missing.
            checkpoint_every: steps between checkpoints; default: one checkpoint after each epoch.
            keep: number of checkpoints to keep.
            asynchronous: write checkpoints while training continues. This takes host memory for one copy of model and
                optimizer.

        Returns:
            One dict per epoch: ``loss`` (mean over its steps), and ``eval_<name>`` of every evaluated value.

        Raises:
            TypeError: ``epochs`` is above 1 and ``eval_loader`` is an iterator that yields only one epoch.
            ValueError: the loader yielded no batch in an epoch, ``checkpoint_every`` or ``keep`` is below 1, or the
                checkpoint is of another training.
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
            bar = stack.enter_context(EpochProgress(epochs, self.loader, self._counter, visible=progress))
            fit(self, epochs, evaluated, bar, keeper)
        return list(self.fitted.history)

    def export(self, path: str | Path, format: str = "export", example: Any = None) -> None:
        """Save the model for deployment: a copy in eval mode, on the CPU, that works without flatout.

        Args:
            path: the file.
            format: ``"export"`` for ``torch.export.load(path).module()``; ``"torchscript"`` for
                ``torch.jit.load(path)``, and for ``torch::jit::load`` in C++.
            example: input of the model: a tensor, a tuple that starts with the tensor, or a mapping of keyword
                arguments. Default: the first samples of the training, without labels.

        Raises:
            ValueError: ``format`` is unknown.
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

        On several ranks that ``optimize`` trains together, all must call this, and all get the same values. Each rank
        computes its slice of every batch of a plain ``DataLoader``, and the values are those of one process. A metric
        that is no mean over samples, such as F1, depends on the slices, as it does on the batch size. Every rank
        iterates any other loader whole, such as a list of batches, and the means are those over all ranks.

        Args:
            loader: yields batches like those of the training.
            metrics: name to ``(outputs, batch) -> mean over the batch``, with the model's outputs.

        Returns:
            ``loss`` and every metric, weighted by samples.

        Raises:
            ValueError: the loader yielded no batch, or ranks have different metrics.
            RuntimeError: the evaluation failed on another rank.
        """
        self._counter.pause()
        with OwnError():
            return self._evaluation.means(loader, {} if metrics is None else metrics)

    def profile(self, steps: int = 10, warmup: int = 3) -> Profile:
        """Profile the time of a step, with advice: ``print(run.profile())``.

        These are **real training steps**: weights, optimizer and scheduler advance as in any loop over ``run.loader``.
        The first ``warmup`` steps warm up. Two search for sync points. Some consume batches that loader workers have
        prefetched. The next ``steps`` are timed without ``torch.profiler``, and as many after these run under it.

        Headline, phases and verdict come from the timed steps. Operators, gaps and memory come from the profiler. The
        loader is left as by a ``break``. If it ends too early, a new epoch starts. A loader that cannot restart is
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
        """Return the verdict on the mean of steps that have just been timed."""
        window = self._counter.window
        mfu = None if window.mfu is None else window.mfu * window.seconds / window.steps / mean.seconds
        phases = Phases(**{str(phase): seconds for phase, seconds in mean.phases.items()})
        return str(judged(self._job, mfu, self.report.rows, phases=phases))

    def undo(self) -> None:
        """Revert ``optimize``: model, optimizer, device and backend flags work as before.

        Weights and optimizer state keep the values that training has given them. ``run.loader`` is the user's own
        loader again.
        """
        if attached_to(self.model) is self._attachment:  # else reverted already, or replaced by a later optimize
            detach(self.model)
        if isinstance(self.loader, TrainingLoader):
            self.loader = self.loader.original
            self._job.data.source = self.loader
