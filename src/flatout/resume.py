"""State of a run: saved in checkpoints, and resumed bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.core.formatting import first_line
from flatout.core.kinds import check_kinds, check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.core.snapshot import Snapshot
from flatout.plan import Plan
from flatout.training import checkpoint, job_state
from flatout.training.checkpoint.copies import mapped
from flatout.training.fit import Fitted
from flatout.training.job import Job
from flatout.training.loader import TrainingLoader
from flatout.training.non_finite import NonFiniteMonitor

STATE_VERSION = 1
"""Version of what ``Run.state_dict`` returns; raised whenever an entry changes its meaning or goes away."""


class Resumable:
    """Training whose whole state can be saved, and resumed bit for bit: the part of ``Run`` that checkpoints need.

    Args:
        job: the training.
        scheduler: the learning-rate scheduler; None without one.
        plan: the decisions.
        loader: yields the batches of the training.

    Attributes:
        loader: yields the batches of the training; the user's own after ``undo``.
        steps: steps so far, including those before a loaded checkpoint.
        fitted: progress of ``fit``.
        plan: the decisions.
    """

    def __init__(self, job: Job, scheduler: Any, plan: Plan, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.plan = plan
        self.steps = 0
        self.fitted = Fitted()
        self._job = job
        self._scheduler = scheduler
        self._finite = NonFiniteMonitor(job)
        self._writer = checkpoint.Writer()
        self._is_loaded = False  # since the last fit
        self._generators: list[Any] | None = None

    @property
    def micro_batch(self) -> int | None:
        """Samples that ``step`` computes at once; None: whole batches."""
        return self._job.stepper.micro_batches.size

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
            self._job.spec.modules,
            self._job.spec.optimizer,
            self._job.data.loader,
            self._job.spec.code,
            on=torch.device("cpu"),
        )
        random = self._random_state()
        scheduler = None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        attributes = set(getattr(self._scheduler, "__dict__", ()))
        progress = self._job.stepper.progress
        try:
            if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
                raise ValueError(f"state must come from run.state_dict(), version {STATE_VERSION}")
            state = mapped(state, tensor)
            plan, fitted, steps, micro_batch = self._own_fields(state)
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

    def _own_fields(self, state: dict[str, Any]) -> tuple[Plan, Fitted, int, int | None]:
        """Return plan, progress of ``fit``, steps and micro-batch of a state.

        Raises:
            ValueError: a field is invalid, or the batch size is another.
        """
        plan, fitted = Plan.from_dict(state["plan"]), Fitted.from_dict(state["fitted"])
        steps, micro_batch = check_number(state["steps"], "steps"), state["micro_batch"]
        if micro_batch is not None:
            check_number(micro_batch, "micro_batch", least=1)
        there, here = _batch_size_in(plan.decisions), _batch_size_in(self.plan.decisions)
        if there != here:
            raise ValueError(
                f"it was trained with a batch size of {there}, here it is {here}: "
                "optimize(plan=Plan.from_checkpoints(folder)) takes the checkpoint's"
            )
        return plan, fitted, steps, micro_batch

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


def _batch_size_in(decisions: Mapping[str, Any]) -> Any:
    """Samples of a batch as a plan has decided them."""
    return (decisions.get("batch_size") or {}).get("samples") or "the loader's own"
