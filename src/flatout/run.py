"""A tuned training job: step it, fit it, evaluate it, undo it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.batches import batch_size_of, to_device
from flatout.core.formatting import first_line
from flatout.core.kinds import check_kinds, check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.core.snapshot import Snapshot
from flatout.core.toggle import Toggle
from flatout.data.loaders import check_reiterable
from flatout.mfu import MfuCounter
from flatout.mfu.verdict import Verdict
from flatout.plan import Plan
from flatout.profile import Profile, profile_run
from flatout.report import Report
from flatout.techniques import ObservingCandidate
from flatout.training import checkpoint, job_state
from flatout.training.attachments import attach, detach, is_attached
from flatout.training.checkpoint.copies import mapped
from flatout.training.device_verdict import judged
from flatout.training.export import export, export_weights
from flatout.training.fit import Fitted, Keeper, fit
from flatout.training.job import Job
from flatout.training.loader import TrainingLoader
from flatout.training.logged_metrics import Logs
from flatout.training.non_finite import NonFiniteMonitor
from flatout.training.progress_bar import EpochProgress
from flatout.training.recovery import Recovery

STATE_VERSION = 1
"""Version of what ``Run.state_dict`` returns; raised whenever an entry changes its meaning or goes away."""

Metric = Callable[[Any, Any], Any]
"""``(outputs, batch) -> mean over the batch``, a number or a 0-dim tensor."""


def undo(model: nn.Module) -> None:
    """Take everything back that ``optimize`` attached to a model and its optimizer.

    Works without the ``Run``, which may be gone; does nothing for a model that flatout does not know.
    """
    detach(model)


class Run:
    """What ``flatout.optimize`` returns.

    Attributes:
        model: the user's module, the same object.
        loader: iterate it for batches that are on the device already.
        optimizer: the user's optimizer, the same object; None in the two-value form.
        plan: the decisions, to save and apply again.
        report: every row of the checklist, with its number and its why.
        logs: what :meth:`log` was given: iterate it for ``(step, name, value)``, or have ``logs.listen`` call you.
        steps: calls of :meth:`step` so far, those before a checkpoint that was loaded included.
        fitted: how far :meth:`fit` has come.
    """

    def __init__(
        self,
        job: Job,
        *,
        scheduler: Any,
        plan: Plan,
        report: Report,
        switches: Sequence[Toggle],
        example: Any,
        peak_flops: float | None = None,
    ) -> None:
        self.model = job.spec.model
        self.optimizer = job.spec.optimizer
        self.plan = plan
        self.report = report
        self._job = job
        self._scheduler = scheduler
        self._example = example
        self._counter = MfuCounter(peak_flops=peak_flops, device=job.spec.device)
        self.loader: Iterable[Any] = TrainingLoader(
            job,
            self._counter,
            self._flush,
            [switch.on_batch for switch in switches if isinstance(switch, ObservingCandidate)],
        )
        self.logs = Logs()
        self._recovery = None if job.spec.optimizer is None else Recovery(job.stepper)
        self._finite = NonFiniteMonitor(job)
        self.steps = 0
        self.fitted = Fitted()
        self._writer = checkpoint.Writer()
        self._is_loaded = False  # since the last fit
        self._generators: list[Any] | None = None
        self._switches = list(switches)
        attach(job.spec.model, self._switches)

    def __iter__(self) -> Iterator[Any]:
        """``model, loader = flatout.optimize(model, loader)``."""
        yield self.model
        yield self.loader

    @property
    def scaler(self) -> Any:
        """The loss scaler; None unless the model computes in fp16."""
        return self._job.stepper.scaler

    @property
    def stats(self) -> MfuCounter:
        """Counts of steps, samples and tokens; rolling step and phase times, rates, MFU and HFU, loader stall.

        The steps are those of :meth:`step`. For a loop of your own: ``run.stats.wrap(run.model)``.
        """
        return self._counter

    @property
    def micro_batch(self) -> int | None:
        """Samples that :meth:`step` computes at once, where that is faster, or memory does not hold more; None: all."""
        return self._job.stepper.micro_batches.size

    @property
    def stop_after_bad(self) -> int:
        """Number of bad steps in a row after which :meth:`step` raises: infinite, NaN or skipped by the loss scaler.

        On a CPU every step is read. On a GPU every fiftieth step is read until a bad one, and then every step. The
        count begins with the first bad step that is read, and follows with the delay of the GPU behind the host.
        """
        return self._finite.stop_after

    @stop_after_bad.setter
    def stop_after_bad(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"stop_after_bad must be >= 1, got {steps}")
        self._finite.stop_after = steps

    @property
    def verdict(self) -> Verdict:
        """What the last steps made of the device: MFU beside NVML's utilisation, what is usual, what limits it.

        It takes a look at the GPU, some milliseconds: not for every step.
        """
        reading = self._counter.window
        return judged(self._job, reading.mfu, stall_fraction=reading.stall_fraction, phases=reading.phases)

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and, after every ``accumulate`` batches, the update and the scheduler's step.

        With the fused optimizer the update is the lazy form: gradients are scaled, averaged and clipped on their way
        through registers, ``p.grad`` stays as backward left it, and nothing waits for the device. Any other optimizer
        gets its gradients rewritten first, as torch's own utilities do it.

        A step that runs out of memory is computed in smaller parts, and so are all that follow: ``micro_batch``.

        Args:
            batch: as ``run.loader`` or the user's loader yields it.

        Returns:
            The loss, 0-dim, detached, on the device.

        Raises:
            RuntimeError: ``optimize`` was not given an optimizer.
            FloatingPointError: :attr:`stop_after_bad` steps in a row were infinite or NaN. The message says where
                infinities or NaNs begin. Before that, the first bad loss that is read gives a warning.
            torch.OutOfMemoryError: a single sample does not fit, or the batch cannot be taken apart; it says what would
                help. The step has not been taken, and what was accumulated before it is lost only where it says so.
            flatout.optim.PartialUpdateError: an optimizer that is not flatout's ran out of memory in the middle of a
                step.
        """
        if self._recovery is None:
            raise RuntimeError("run.step needs an optimizer: flatout.optimize(model, loader, optimizer, loss_fn)")
        with self._counter.step(*self._job.work(batch)) as step:
            with step.phase("h2d"):
                batch = to_device(batch, self._job.spec.device)
            loss = self._recovery.step(batch, step.phase)
            if not self._job.stepper.pending:
                self._step_scheduler()
        self.steps += 1
        if self.steps >= self._finite.next_look:
            self._finite.look(self.steps, loss, batch)
        return loss

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number without waiting for the device: ``run.log("loss", run.step(batch))``.

        Where ``loss.item()`` would wait until the GPU has computed the loss, this queues a copy of it and goes on;
        listeners get the number in a later call, or in :meth:`flush_logs`::

            run.logs.listen(lambda step, name, value: writer.add_scalar(name, value, step))

        Args:
            name: what it is.
            value: a number, or a tensor of one element.
            step: when; default: the number of :meth:`step` calls so far.

        Raises:
            TypeError: ``value`` is neither a number nor a tensor.
            ValueError: a tensor of more or less than one element, or there is neither ``step`` nor an optimizer: only
                :meth:`step` counts steps.
        """
        if step is None and self.optimizer is None:
            raise ValueError("run.log needs step= in a loop of your own: only run.step counts steps")
        self.logs.log(name, value, self.steps if step is None else step)

    def flush_logs(self) -> None:
        """Wait for what was logged and is on its way, and hand it to the listeners: at the end of training, say."""
        self.logs.flush()

    def _flush(self) -> None:
        """Update with what accumulated since the last update, at an epoch's end."""
        if self._recovery is not None and self._recovery.flush():
            self._step_scheduler()

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

        Training resumes from the newest readable checkpoint in ``checkpoint_dir``, so the same script can be started
        again and again. SIGTERM and Ctrl-C finish the step, save, and then terminate as usual (Ctrl-C raises
        ``KeyboardInterrupt``). A second Ctrl-C terminates at once, without saving. If the user has installed a signal
        handler, it is called after the save, and ``fit`` returns the epochs so far.

        The result is bit-exact to an uninterrupted training on two conditions. Steps repeat their results (on a GPU:
        ``deterministic=True``), and decisions are the same (``optimize(plan=Plan.from_checkpoints(folder))``). Random
        numbers differ in worker processes, and where a GPU's batches are loaded ahead of the step. With
        :func:`flatout.data.seed_samples` these are the same, too.

        Args:
            epochs: passes over ``run.loader``; with ``checkpoint_dir`` counted from the beginning of training, over
                all processes.
            eval_loader: evaluated after each epoch.
            metrics: as in ``evaluate``.
            progress: show a bar with loss, samples/s and loader stall.
            checkpoint_dir: a folder for the checkpoints of this training alone; made where it is missing.
            checkpoint_every: steps from one checkpoint to the next; default: one behind each epoch.
            keep: checkpoints to keep.
            asynchronous: write them while training goes on. It takes the memory of model and optimizer once more, on
                the host.

        Returns:
            One dict per epoch: ``loss`` (mean over its steps), and ``eval_<name>`` of every evaluated value.

        Raises:
            TypeError: ``epochs`` is above 1 and ``eval_loader`` is an iterator that yields only one epoch.
            ValueError: the loader yielded no batch in an epoch, ``checkpoint_every`` or ``keep`` is below 1, or the
                checkpoint is of another training.
            OSError: a checkpoint could not be written.
            RuntimeError: ``checkpoint_dir`` where several processes train together.
            flatout.CorruptCheckpointError: there are checkpoints, and none can be read.
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
            keeper = None
            if checkpoint_dir is not None:
                folder = checkpoint.Folder(checkpoint_dir, keep)
                keeper = stack.enter_context(Keeper(self, folder, checkpoint_every, asynchronous=asynchronous))
            if not self._is_loaded:
                self.fitted = Fitted()
            self._is_loaded = False
            bar = stack.enter_context(EpochProgress(epochs, self.loader, self._counter, visible=progress))
            fit(self, epochs, evaluated, bar, keeper)
        return list(self.fitted.history)

    def save(self, path: str | Path, *, asynchronous: bool = False, then: Callable[[], object] | None = None) -> None:
        """Write all that it takes to go on with this training: :meth:`state_dict`, in one file.

        The file is there as a whole or not at all, and carries a checksum. ``torch.load(path)`` reads it, too.

        Args:
            path: in a folder that exists; a file that is there is replaced.
            asynchronous: copy the state now, into host memory, and write it while training goes on. The file is there
                when the next save begins, after :meth:`flush_saves`, or when the process has ended.
            then: called when the file is there; asynchronously, by the thread that wrote it.

        Raises:
            TypeError: model, optimizer or scheduler have in their state what a checkpoint cannot hold.
            OSError: it could not be written; asynchronously, the one before could not.
        """
        self._writer.write(path, self.state_dict(), asynchronous=asynchronous, then=then)

    def flush_saves(self) -> None:
        """Wait for an asynchronous save; raises what went wrong with it."""
        self._writer.wait()

    def load(self, path: str | Path) -> None:
        """Go on where :meth:`save` wrote ``path``. Nothing in the file is run.

        Raises:
            FileNotFoundError: there is no such file.
            flatout.CorruptCheckpointError: a ``ValueError``: it is not ``save``'s, or not any more what that wrote.
            ValueError: it is of another training. Nothing has changed then.
        """
        self._adopt(checkpoint.read(path), f"{path} is")

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: of tensors, numbers, strings and containers of them. Tensors are the live ones.

        That is model, loss module, optimizer with its averages, loss scaler and scheduler; gradients that wait for an
        update; the loader's position and generators, torch's, NumPy's and Python's global ones; the plan, and how far
        training has come. The position in an epoch is left out where the loader cannot tell it
        (:meth:`flatout.data.Prefetcher.state_dict`): going on begins that epoch again.
        """
        position = self._position()[0]
        fitted = self.fitted if position is not None else Fitted(self.fitted.history)
        return {
            "version": STATE_VERSION,
            "job": job_state.state_dict(self._job.stepper),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "loader": position,
            "random": self._random_state().states(),
            "plan": asdict(self.plan),
            "steps": self.steps,
            "micro_batch": self.micro_batch,
            "fitted": vars(fitted) | {"history": [dict(row) for row in fitted.history]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was made. A loop over ``run.loader`` that is under way is not changed; begin another.

        Raises:
            ValueError: it is of another training. Nothing has changed then.
        """
        self._adopt(state, "the state is", torch.clone)

    def _adopt(self, state: Any, what: str, tensor: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Load a state completely, or change nothing.

        Args:
            state: the result of ``state_dict``.
            what: the beginning of error messages, such as "the state is".
            tensor: copies a tensor of ``state``, so that nothing else shares its memory.

        Raises:
            ValueError: ``state`` does not fit this training.
        """
        # On the host: the device may have no room for a second model.
        before = Snapshot.capture(
            self._job.spec.modules, self.optimizer, self._job.data.loader, self._job.spec.code, on=torch.device("cpu")
        )
        random = self._random_state()
        scheduler = None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        attributes = set(getattr(self._scheduler, "__dict__", ()))
        progress = self._job.stepper.progress
        try:
            if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
                raise ValueError(f"state must come from run.state_dict(), version {STATE_VERSION}")
            state = mapped(state, tensor)
            plan = Plan.from_dict(state["plan"])
            fitted = Fitted.from_dict(state["fitted"])
            steps, micro_batch = check_number(state["steps"], "steps"), state["micro_batch"]
            if micro_batch is not None:
                check_number(micro_batch, "micro_batch", least=1)
            there, here = _batch_size_in(plan.decisions), _batch_size_in(self.plan.decisions)
            if there != here:
                raise ValueError(
                    f"it was trained with a batch size of {there}, here it is {here}: "
                    "optimize(plan=Plan.from_checkpoints(folder)) takes the checkpoint's"
                )
            if (state["scheduler"] is None) != (scheduler is None):
                raise ValueError("only one of it and this training has a scheduler")
            self._check_scheduler(state["scheduler"], scheduler)
            job_state.load_state_dict(self._job.stepper, state["job"])
            if self._scheduler is not None:
                self._scheduler.load_state_dict(state["scheduler"])
            if fitted.loss is not None:
                fitted.loss = fitted.loss.to(self._job.spec.device)
            random.write(state["random"])
            if state["loader"] is not None:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        except BaseException as error:
            before.restore()
            random.restore()
            self._job.stepper.progress = progress
            if self._scheduler is not None:
                self._scheduler.load_state_dict(scheduler)
                for name in set(getattr(self._scheduler, "__dict__", ())) - attributes:
                    del self._scheduler.__dict__[name]
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"{what} of another training: {first_line(error)}") from error
        self.steps, self.fitted, self._is_loaded = steps, fitted, True
        here = self._job.stepper.micro_batches.size
        self._job.stepper.micro_batches.size = min((n for n in (here, micro_batch) if n is not None), default=None)
        self._finite = NonFiniteMonitor(self._job, self._finite.stop_after)
        if plan.decisions != self.plan.decisions:
            warnings.warn(
                f"the checkpoint was trained with {plan.decisions}, this run has {dict(self.plan.decisions)}. Training "
                "resumes, but not bit for bit. For that, call optimize(plan=Plan.from_checkpoints(folder))",
                RuntimeWarning,
                stacklevel=3,
            )

    def _check_scheduler(self, state: Any, own: Any) -> None:
        """Refuse a state that would break the scheduler, because ``load_state_dict`` accepts any attributes."""
        check_kinds(state, own, "scheduler")
        for name in () if own is None else state.keys() - own.keys():
            if callable(getattr(self._scheduler, name, None)):
                raise ValueError(f"scheduler must not have an entry with the name of its method {name}")

    @property
    def why_not_in_mid_epoch(self) -> str:
        """What keeps the loader from telling where in an epoch it is; empty when nothing does."""
        return self._position()[1]

    def _position(self) -> tuple[dict[str, Any] | None, str]:
        """The loader's ``state_dict``; None where it has none, and why."""
        if not isinstance(self.loader, TrainingLoader):
            return None, "undo() has given the loader back"
        try:
            return self.loader.state_dict(), ""
        except TypeError as error:
            return None, str(error)

    def _random_state(self) -> RandomState:
        """The global generators, and those that dataset, model and loss keep; the loader's are in its own state."""
        if self._generators is None:
            dataset = getattr(self._job.data.loader, "dataset", None)
            self._generators = generators_in([dataset, *self._job.spec.code])
        return RandomState.of(self._generators)

    def export(self, path: str | Path, format: str = "export", example: Any = None) -> None:
        """Save the model for deployment: a copy in eval mode, on the CPU, that needs no flatout.

        Args:
            path: of the file.
            format: ``"export"`` for ``torch.export.load(path).module()``; ``"torchscript"`` for
                ``torch.jit.load(path)``, and for ``torch::jit::load`` in C++.
            example: what the model is called with: a tensor, a tuple whose first is that, or a mapping of keyword
                arguments. Default: the first samples trained on, without labels.

        Raises:
            ValueError: there is no such format.
            Exception: whatever torch says of a model that it cannot export.
        """
        export(self.model, path, self._example if example is None else example, format)

    def export_weights(self, path: str | Path) -> None:
        """Save the weights as safetensors.

        Raises:
            ImportError: the package safetensors is not installed.
        """
        export_weights(self.model, path)

    def evaluate(self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Mean loss and metrics over a loader, without gradients, in eval mode; modes are restored.

        Args:
            loader: yields batches like those trained on.
            metrics: name to ``(outputs, batch) -> mean over the batch``; outputs are those of the model.

        Returns:
            ``loss`` and every metric, weighted by samples.

        Raises:
            ValueError: the loader yielded no batch.
        """
        metrics = {} if metrics is None else metrics
        outputs: list[Any] = []
        self._counter.pause()
        modes = [(m, m.training) for m in self.model.modules()]
        hook = self.model.register_forward_hook(lambda module, args, output: outputs.append(output))
        totals: dict[str, Tensor] = {}
        samples = 0
        try:
            self.model.eval()
            with torch.inference_mode():
                for batch in loader:
                    size = batch_size_of(batch)
                    if size == 0:
                        continue  # a mean over no samples is NaN
                    batch = to_device(batch, self._job.spec.device)
                    outputs.clear()
                    values = {"loss": self._job.objective.loss(batch)}
                    values |= {name: metric(outputs[-1], batch) for name, metric in metrics.items()}
                    for name, value in values.items():
                        totals[name] = totals.get(name, torch.zeros(())) + size * torch.as_tensor(value).float()
                    samples += size
        finally:
            hook.remove()
            for module, training in modes:
                module.training = training
        if samples == 0:
            raise ValueError("eval loader yielded no batch")
        return {name: float(total) / samples for name, total in totals.items()}

    def profile(self, steps: int = 10, warmup: int = 3) -> Profile:
        """Where the time of a step goes, and what to do about it: ``print(run.profile())``.

        These are **real training steps**: weights, optimizer and scheduler move on as in any loop over ``run.loader``
        that is left by a break, which is also how the loader is left. Besides ``steps`` and ``warmup`` two steps look
        for sync points, and some use up what loader workers have in store. A loader with fewer batches begins a new
        epoch; one that cannot is profiled as far as it goes.

        Args:
            steps: to time, under ``torch.profiler``.
            warmup: steps before.

        Raises:
            ValueError: ``steps`` < 1, ``warmup`` < 0, or the loader ended before a step could be timed.
            RuntimeError: ``optimize`` was not given an optimizer.
        """
        return profile_run(self.loader, self.step, steps, warmup, verdict=lambda: str(self.verdict))

    def undo(self) -> None:
        """Give the user's objects back: model, optimizer, device and backend flags work as before ``optimize``.

        What training has changed since (weights, optimizer state) stays. ``run.loader`` is the user's own again.
        """
        if is_attached(self.model, self._switches):  # else undone before, or replaced by a later optimize
            detach(self.model)
        if isinstance(self.loader, TrainingLoader):
            self.loader = self.loader.original
            self._job.data.source = self.loader


def _batch_size_in(decisions: Mapping[str, Any]) -> Any:
    """Samples of a batch as a plan has decided them."""
    return (decisions.get("batch_size") or {}).get("samples") or "the loader's own"
