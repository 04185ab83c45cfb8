"""State of a run, which is saved in checkpoints and resumed bit-exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flatout.core.formatting import first_line
from flatout.core.kinds import check_kinds, check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.core.saved import parts_of
from flatout.core.snapshot import Snapshot
from flatout.data.loaders import loader_position, original_of
from flatout.distributed.agreement import OwnError
from flatout.plan import Plan
from flatout.training import checkpoint, job_state
from flatout.training.checkpoint.writer import mapped
from flatout.training.fit import Fitted
from flatout.training.job import Job
from flatout.training.loader import TrainingLoader
from flatout.training.non_finite import NonFiniteMonitor

STATE_VERSION = 1
"""Version of the result of ``Run.state_dict``, which increases if an entry changes its meaning or is removed."""


class Resumable:
    """Training whose whole state can be saved and resumed bit-exactly, as base of ``Run``.

    Args:
        job: the training.
        scheduler: the learning-rate scheduler, or None without a scheduler.
        plan: the decisions.
        loader: yields the batches of the training.

    Attributes:
        loader: yields the batches of the training. After ``undo``, this is the user's own loader.
        steps: number of steps, including the steps before a loaded checkpoint.
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
        self._scheduler_steps: int | None = None  # after the last step by ``Run.step``, None before
        self._finite = NonFiniteMonitor(job)
        self._writer = checkpoint.Writer()
        self._is_loaded = False  # True if a state was loaded after the last fit
        self._generators: list[Any] | None = None

    @property
    def micro_batch(self) -> int | None:
        """Number of samples that ``step`` computes at once, or None for whole batches."""
        return self._job.stepper.micro_batches.size

    def save(self, path: str | Path, *, asynchronous: bool = False, then: Callable[[], object] | None = None) -> None:
        """Write the whole state of this training to one file. The state is the result of :meth:`state_dict`.

        The file is written atomically and has a checksum. ``torch.load(path)`` also reads it. In a data-parallel
        training, all ranks call this, and rank 0 writes the file.

        Args:
            path: the file, in an existing folder. An existing file is replaced.
            asynchronous: True to copy the state into host memory now, and to write the copy while training continues.
                The file is complete when the next save starts, after :meth:`flush_saves`, or when the process has
                ended.
            then: called when the file is complete, on the rank that writes the file. With ``asynchronous``, the writing
                thread calls this function.

        Raises:
            TypeError: the state of model, optimizer or scheduler has an object that a checkpoint cannot store.
            OSError: this write failed, or the previous asynchronous write failed.
        """
        ranks = self._job.spec.ranks
        with OwnError(), ranks.attempt("run.save"):
            state = self.state_dict()
            if ranks.rank == 0:
                self._writer.write(path, state, asynchronous=asynchronous, then=then)

    def flush_saves(self) -> None:
        """Wait for an asynchronous save, and raise its error."""
        self._writer.wait()

    def load(self, path: str | Path) -> None:
        """Resume from the file that :meth:`save` wrote. Loading executes no code from the file.

        In a data-parallel training, all ranks call this, and each rank reads the file. With as many ranks as before,
        training resumes bit-exactly. With any other number of ranks, training resumes with the same samples.

        Raises:
            FileNotFoundError: the file does not exist.
            flatout.CorruptCheckpointError: the file is corrupt or was not written by ``save``. The class is a subclass
                of ``ValueError``.
            ValueError: the file belongs to another training. Nothing has changed.
        """
        self._adopt(checkpoint.read(path), f"{path} is")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the training, as tensors, numbers, strings and containers.

        Tensors are not copied, so later steps change them.

        The state holds the model, the loss module, the optimizer with its averages, the loss scaler and the scheduler.
        It also holds pending gradients, the loader's position and generators, the global generators of torch, NumPy and
        Python, the plan, and the progress of training. A loader may not know its position in an epoch
        (:meth:`flatout.data.Prefetcher.state_dict`). Then the resumed training repeats that epoch.

        In a data-parallel training, all ranks call this. The state then holds the generators of every rank, and pending
        gradients are averaged over the ranks.
        """
        ranks, stepper = self._job.spec.ranks, self._job.stepper
        if stepper.sync is not None and stepper.pending:
            stepper.sync.reduce()
        random, *others = ranks.every(self._random_state().states())
        position = self._position()[0]
        fitted = self.fitted if position is not None else Fitted(self.fitted.history)
        return {
            "version": STATE_VERSION,
            "job": job_state.state_dict(self._job.stepper),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "loader": position,
            "random": random,
            "random_of_others": others,
            "plan": asdict(self.plan),
            "steps": self.steps,
            "micro_batch": self.micro_batch,
            "fitted": vars(fitted) | {"history": [dict(row) for row in fitted.history]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Start a new loop over ``run.loader``, because a running loop does not change.

        Raises:
            ValueError: the state belongs to another training. Nothing has changed.
        """
        self._adopt(state, "the state is", torch.clone)

    def _adopt(self, state: Any, what: str, tensor: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Load a state completely, or change nothing.

        Args:
            state: the result of ``state_dict``.
            what: the beginning of error messages, such as "the state is".
            tensor: copies a tensor of ``state``, so that no other object shares its memory.

        Raises:
            ValueError: ``state`` does not fit this training.
        """
        spec, data, stepper = self._job.spec, self._job.data, self._job.stepper
        random = self._random_state()
        # The copies are on the host, because the device may not have enough memory for a second model.
        before = Snapshot.capture(
            spec.modules,
            spec.optimizer,
            data.loader,
            [*spec.code, self._scheduler],
            also=[loader_position(self.loader, data.source, data.loader), random, *parts_of(stepper, 0)],
            on=torch.device("cpu"),
        )
        before.add_data(stepper.times)
        if not isinstance(own := original_of(data.loader), DataLoader):  # other code runs beside the workers of one
            before.add_data(own)
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        try:
            with before.extended(), OwnError(), spec.ranks.attempt("run.load"):
                if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
                    raise ValueError(f"state must come from run.state_dict(), version {STATE_VERSION}")
                state = mapped(state, tensor)
                plan, fitted, steps, micro_batch = self._own_fields(state)
                if (state["scheduler"] is None) != (scheduler is None):
                    raise ValueError("only one of it and this training has a scheduler")
                self._check_scheduler(state["scheduler"], scheduler)
                job_state.load_state_dict(stepper, state["job"])
                if self._scheduler is not None:
                    self._scheduler.load_state_dict(state["scheduler"])
                if fitted.loss is not None:
                    fitted.loss = fitted.loss.to(spec.device)
                self._write_random(random, [state["random"], *state.get("random_of_others", [])])
                if state["loader"] is not None:
                    self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        except BaseException as error:
            before.restore()
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"{what} of another training: {first_line(error)}") from error
        self.steps, self.fitted, self._is_loaded = steps, fitted, True
        self._scheduler_steps = None
        here = stepper.micro_batches.size
        stepper.micro_batches.size = min((n for n in (here, micro_batch) if n is not None), default=None)
        self._finite = NonFiniteMonitor(self._job, self._finite.stop_after)
        if plan.decisions != self.plan.decisions:
            warnings.warn(
                f"the checkpoint was trained with {plan.decisions}, this run has {dict(self.plan.decisions)}. Training "
                "resumes, but not bit for bit. For that, call optimize(plan=Plan.from_checkpoints(folder))",
                RuntimeWarning,
                stacklevel=3,
            )

    def _write_random(self, generators: RandomState, states: Sequence[Any]) -> None:
        """Set the generators of this rank to their states. A rank without saved states keeps its own.

        Args:
            generators: the generators of this rank.
            states: states by rank.
        """
        rank = self._job.spec.ranks.rank
        if rank < len(states):
            generators.write(states[rank])

    def _own_fields(self, state: dict[str, Any]) -> tuple[Plan, Fitted, int, int | None]:
        """Return plan, progress of ``fit``, steps and micro-batch of a state.

        Raises:
            ValueError: a field is invalid, or the batch size differs.
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
        """Reject a state that would break the scheduler, because ``load_state_dict`` accepts any attributes."""
        check_kinds(state, own, "scheduler")
        for name in () if own is None else state.keys() - own.keys():
            if callable(getattr(self._scheduler, name, None)):
                raise ValueError(f"scheduler must not have an entry with the name of its method {name}")

    @property
    def why_not_in_mid_epoch(self) -> str:
        """Reason why the loader does not know its position in an epoch. Empty if the loader knows it."""
        return self._position()[1]

    def _position(self) -> tuple[dict[str, Any] | None, str]:
        """Return the loader's ``state_dict``, or None and the reason why there is none."""
        if not isinstance(self.loader, TrainingLoader):
            return None, "undo() has given the loader back"
        try:
            return self.loader.state_dict(), ""
        except TypeError as error:
            return None, str(error)

    def _random_state(self) -> RandomState:
        """Return the global generators, and the generators of dataset, model and loss.

        The loader's state has the loader's generators.
        """
        if self._generators is None:
            dataset = getattr(self._job.data.loader, "dataset", None)
            self._generators = generators_in([dataset, *self._job.spec.code])
        return RandomState.of(self._generators)


def _batch_size_in(decisions: Mapping[str, Any]) -> Any:
    """Return the samples per batch that a plan has decided, or words for the loader's own batch size."""
    return (decisions.get("batch_size") or {}).get("samples") or "the loader's own"
