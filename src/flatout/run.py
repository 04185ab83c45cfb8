"""A tuned training job: step it, fit it, evaluate it, undo it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatout._garbage import LongLived
from flatout.data import Prefetcher, batch_size_of, to_device
from flatout.data.loaders import SEEDED_FROM
from flatout.data.replay import Replayed
from flatout.finite import FiniteWatch
from flatout.job import Job
from flatout.logs import Logs
from flatout.measure.judge import judged
from flatout.mfu import MfuCounter
from flatout.mfu.verdict import Verdict
from flatout.plan import Plan
from flatout.profile import Profile, profile_run
from flatout.report import Report
from flatout.report.progress import EpochProgress
from flatout.techniques import Switch

Metric = Callable[[Any, Any], Any]
"""``(outputs, batch) -> mean over the batch``, a number or a 0-dim tensor."""

_attached: weakref.WeakKeyDictionary[nn.Module, list[Switch]] = weakref.WeakKeyDictionary()


def undo(model: nn.Module) -> None:
    """Take everything back that ``optimize`` attached to a model and its optimizer.

    Works without the ``Run``, which may be gone; does nothing for a model that flatout does not know.
    """
    detach(model)


def attach(model: nn.Module, switches: Sequence[Switch]) -> None:
    """Turn switches on in their order, and remember them for ``undo``."""
    for switch in switches:
        switch.enable()
    _attached[model] = list(switches)


def detach(model: nn.Module) -> list[Switch]:
    """Turn off and forget what is attached to a model; returns it in its order, for ``attach``."""
    switches = _attached.pop(model, [])
    for switch in reversed(switches):
        switch.disable()
        switch.release()
    return switches


class TrainingLoader:
    """The user's batches, on the device, prefetched. Attributes are those of the user's loader."""

    def __init__(
        self, job: Job, counter: MfuCounter, end_of_epoch: Callable[[], None], switches: Iterable[Switch] = ()
    ) -> None:
        self._job = job
        self._watching = [switch for switch in switches if switch.watches]
        self._counter = counter
        self._end_of_epoch = end_of_epoch
        self._prefetcher = Prefetcher(job.source, job.device, copying=counter.copying)

    @property
    def original(self) -> Iterable[Any]:
        """The user's own loader, behind the batches that trials took from it where it cannot be rewound."""
        source, loader = self._job.source, self._job.loader
        return source if isinstance(source, Replayed) else getattr(loader, SEEDED_FROM, loader)

    def __iter__(self) -> Iterator[Any]:
        self._end_of_epoch()  # of one that was left by a break
        batches = self._counter.batches(self._prefetcher)
        with LongLived() as objects:
            for batch in map(self._show, batches) if self._watching else batches:
                yield batch
                objects.between_steps()
        self._end_of_epoch()

    def __len__(self) -> int:
        return len(self._prefetcher)

    def _show(self, batch: Any) -> Any:
        for switch in self._watching:
            switch.saw(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where in the epoch training is: see :meth:`flatout.data.Prefetcher.state_dict`."""
        return self._prefetcher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was saved: see :meth:`flatout.data.Prefetcher.load_state_dict`."""
        self._prefetcher.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy looks for these before there is a job to ask
            raise AttributeError(name)
        return getattr(getattr(self._job.loader, SEEDED_FROM, self._job.loader), name)


class Run:
    """What ``flatout.optimize`` returns.

    Attributes:
        model: the user's module, the same object.
        loader: iterate it for batches that are on the device already.
        optimizer: the user's optimizer, the same object; None in the two-value form.
        plan: the decisions, to save and apply again.
        report: every row of the checklist, with its number and its why.
        logs: what :meth:`log` was given: iterate it for ``(step, name, value)``, or have ``logs.listen`` call you.
    """

    def __init__(
        self,
        job: Job,
        *,
        scheduler: Any,
        plan: Plan,
        report: Report,
        switches: Sequence[Switch],
        peak_flops: float | None = None,
    ) -> None:
        self.model = job.model
        self.optimizer = job.optimizer
        self.plan = plan
        self.report = report
        self._job = job
        self._scheduler = scheduler
        self._counter = MfuCounter(peak_flops=peak_flops, device=job.device)
        self.loader: Iterable[Any] = TrainingLoader(job, self._counter, self._flush, switches)
        self.logs = Logs()
        self._finite = FiniteWatch(job)
        self._steps = 0
        self._switches = list(switches)
        attach(job.model, self._switches)

    def __iter__(self) -> Iterator[Any]:
        """``model, loader = flatout.optimize(model, loader)``."""
        yield self.model
        yield self.loader

    @property
    def scaler(self) -> Any:
        """The loss scaler; None unless the model computes in fp16."""
        return self._job.scaler

    @property
    def stats(self) -> MfuCounter:
        """Counts of steps, samples and tokens; rolling step and phase times, rates, MFU and HFU, loader stall.

        The steps are those of :meth:`step`. For a loop of your own: ``run.stats.wrap(run.model)``.
        """
        return self._counter

    @property
    def stop_after_bad(self) -> int:
        """Steps in a row that were infinite or NaN, or skipped by the loss scaler, after which :meth:`step` raises."""
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

        Args:
            batch: as ``run.loader`` or the user's loader yields it.

        Returns:
            The loss, 0-dim, detached, on the device.

        Raises:
            RuntimeError: ``optimize`` was not given an optimizer.
            FloatingPointError: ``stop_after_bad`` steps in a row were infinite or NaN; it names where that begins. (The
                first bad loss is told by a warning.)
        """
        if self.optimizer is None:
            raise RuntimeError("run.step needs an optimizer: flatout.optimize(model, loader, optimizer, loss_fn)")
        with self._counter.step(*self._job.work(batch)) as step:
            with step.phase("h2d"):
                batch = to_device(batch, self._job.device)
            loss = self._job.step(batch, step.phase)
            if not self._job.pending:
                self._step_scheduler()
        self._steps += 1
        if self._steps >= self._finite.next_look:
            self._finite.look(self._steps, loss, batch)
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
        self.logs.log(name, value, self._steps if step is None else step)

    def flush_logs(self) -> None:
        """Wait for what was logged and is on its way, and hand it to the listeners: at the end of training, say."""
        self.logs.flush()

    def _flush(self) -> None:
        """Update with what accumulated since the last update, at an epoch's end."""
        if self._job.flush():
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
    ) -> list[dict[str, float]]:
        """Train for a number of epochs.

        Args:
            epochs: passes over ``run.loader``.
            eval_loader: evaluated after each epoch.
            metrics: as in ``evaluate``.
            progress: show a bar with loss, samples/s and loader stall.

        Returns:
            One dict per epoch: ``loss`` (mean over its steps), and ``eval_<name>`` of every evaluated value.

        Raises:
            ValueError: the loader yielded no batch; an iterator, say, is spent after one epoch.
        """
        if not self.model.training:
            self.model.train()
        history: list[dict[str, float]] = []
        with EpochProgress(epochs, self.loader, self._counter, visible=progress) as bar:
            for epoch in range(epochs):
                bar.begin(epoch)
                total, steps = torch.zeros((), device=self._job.device), 0
                for batch in self.loader:
                    loss = self.step(batch)
                    total += loss
                    steps += 1
                    bar.advance(loss)
                if steps == 0:
                    raise ValueError(f"the loader yielded no batch in epoch {epoch + 1}: can it be iterated again?")
                row = {"loss": float(total) / steps}
                self.flush_logs()  # they are here by now
                if eval_loader is not None:
                    row |= {f"eval_{name}": value for name, value in self.evaluate(eval_loader, metrics).items()}
                bar.end(row)
                history.append(row)
        return history

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
        metrics = metrics or {}
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
                    batch = to_device(batch, self._job.device)
                    outputs.clear()
                    values = {"loss": self._job.loss(batch)}
                    values |= {name: metric(outputs[-1], batch) for name, metric in metrics.items()}
                    size = batch_size_of(batch)
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
        if _attached.get(self.model) == self._switches:  # else undone before, or replaced by a later optimize
            detach(self.model)
        if isinstance(self.loader, TrainingLoader):
            self.loader = self.loader.original
            self._job.source = self.loader
