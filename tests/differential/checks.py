"""Checks of one job, trained plainly and through ``flatout.optimize``. Everything that can differ is compared."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import flatout
from flatout.data import is_rewindable
from flatout.data.feedback import why_not_ahead
from flatout.data.loaders import TRIAL_BATCHES, why_not_read
from flatout.techniques import REGISTRY
from tests.differential import process
from tests.differential.data import BATCHES, DRAWS, LOADERS, READ_ONCE, RESEEDED, fixed_batches
from tests.differential.grammar import Failure, Injected, Job
from tests.differential.losses import LOSSES, WRITING, Loss
from tests.differential.models import MODELS, QUIRKS, SPARSE, WithLoss
from tests.differential.optimizers import OPTIMIZERS, SCHEDULERS, SIGNS
from tests.differential.picture import STRUCTURE, VALUES, Bits, Picture

EPOCHS = 2
EXACT = frozenset(t.name for t in REGISTRY if t.effect == "exact")
ERRORS = (TypeError, ValueError, RuntimeError)
ARGUMENTS = "model|loader|optimizer|loss|scheduler|techniques|batch|plan|deterministic|seed|LBFGS|ReduceLROnPlateau"


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Trigger:
    """Counter of calls, which raises at the call that a failure names, counted from the last ``arm(True)``."""

    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure
        self.their_calls: int | None = None

    def arm(self, armed: bool) -> None:
        self.their_calls = 0 if armed else None

    def count(self, *_: object) -> None:
        if self.failure is not None and self.their_calls is not None:
            self.their_calls += 1
            if self.their_calls == self.failure.call:
                raise self.failure.error("injected")

    def counted(self, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.count()
            return function(*args)

        return counted


class World:
    """Objects of a job, newly created. Two worlds of one job are bit-equal, including global generators."""

    def __init__(self, job: Job) -> None:
        self.job = job
        _seed(11)
        make, self.kind = MODELS[job.model]
        self.model: nn.Module = make()
        for name in job.quirks:
            QUIRKS[name](self.model)
        if job.loss == "of the model":
            self.model = WithLoss(self.model)
        self.container = BATCHES[job.batch]
        self.loss: Loss = LOSSES[job.loss][0](self.container.unpack)
        self.optimizer: Any = None
        self.scheduler: Any = None
        if job.form != "inference":
            self.optimizer = OPTIMIZERS[job.optimizer](list(self.model.parameters()))
            if job.scheduler:
                self.scheduler = SCHEDULERS[job.scheduler](self.optimizer)
        if hasattr(self.model, "swap"):
            self.model.swap()
        self.trigger = Trigger(job.failure)
        if job.failure is not None and job.failure.where == "forward":
            self.model.register_forward_pre_hook(self.trigger.count)
        for batch in fixed_batches(self.kind, job.batch)[: job.trained]:
            self._train_plainly(batch)
        if job.form == "inference":
            self.model.eval()
        self.loader = LOADERS[job.loader](self.kind, job.batch)
        random.random(), np.random.rand(), torch.rand(1)

    def _train_plainly(self, batch: Any) -> None:
        """Take a step that leaves gradients and moments, and advances generators."""
        optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.01)
        optimizer.zero_grad()
        if isinstance(optimizer, torch.optim.LBFGS):
            return
        self.compute_loss(batch).backward()
        optimizer.step()

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the loss, from the arguments that ``optimize`` receives."""
        arguments = self.loss.arguments
        if "compute_loss" in arguments:
            return arguments["compute_loss"](self.model, batch)
        if "loss_fn" in arguments:
            x, y = batch
            return arguments["loss_fn"](self.model(x), y)
        return self.model(**batch)["loss"]

    def optimize(self, loader: Any = None, **changes: Any) -> flatout.Run:
        job, arguments = self.job, dict(self.loss.arguments)
        if job.failure is not None and job.failure.where == "loss":
            for name in {"loss_fn", "compute_loss"} & arguments.keys():
                arguments[name] = self.trigger.counted(arguments[name])
        if job.form in ("own loop", "inference"):
            arguments = {}
        elif self.scheduler is not None:
            arguments["scheduler"] = self.scheduler
        optimizer = self.optimizer if job.form in ("step", "fit", "checkpoint") else None
        if "compute_loss" in self.loss.arguments:
            arguments["compute_loss"] = arguments.get("compute_loss", self.loss.arguments["compute_loss"])
        arguments |= {"techniques": job.techniques, **job.arguments, **changes}
        return flatout.optimize(self.model, self.loader if loader is None else loader, optimizer, **arguments)

    def picture(self) -> Picture:
        """Return a picture of all objects of the world, and of the global generators."""
        return Picture(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loss=self.loss,
            loader=self.loader,
            **{f"generator of {name}": state for name, state in process.generators().items()},
        )


# ---- trainings ---------------------------------------------------------------------------------------------------


class Course:
    """Record of a training: its batches and losses."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.losses: list[Tensor] = []
        self.means: list[float] = []

    def saw(self, batch: Any) -> None:
        self.batches.append(Picture(batch=copy.deepcopy(batch)))


def train_plainly(world: World, loaders: Iterable[Any]) -> Course:
    """Train by torch's loop, one epoch for each of ``loaders``."""
    job, course = world.job, Course()
    optimizer, scheduler = world.optimizer, world.scheduler
    if job.form == "fit" and not world.model.training:
        world.model.train()  # ``fit`` does the same
    accumulate, max_norm = job.arguments.get("accumulate", 1), job.arguments.get("max_grad_norm")
    held = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    weigh = world.loss.arguments.get("loss_weight", lambda batch: 1) if accumulate > 1 else lambda batch: 1

    closure = [lambda: course.losses[-1]] if isinstance(optimizer, torch.optim.LBFGS) else []

    def update(weight: Any) -> None:
        for p in held:
            if p.grad is not None and accumulate > 1:
                p.grad.mul_(1 / weight)
        if max_norm is not None:
            clip_grad_norm_(held, max_norm)
        optimizer.step(*closure)
        if scheduler is not None:
            scheduler.step()

    for loader in loaders:
        pending, weight, begun = 0, 0, len(course.losses)
        for batch in loader:
            course.saw(batch)
            if job.loss in WRITING:
                batch = copy.deepcopy(batch)  # a loss may write to its batch, but not to the loader's copy
            if job.form == "inference":
                with torch.inference_mode():
                    course.losses.append(world.compute_loss(batch).detach())
                continue
            if pending == 0:
                optimizer.zero_grad()
            loss, own = world.compute_loss(batch), weigh(batch)
            (loss * own).backward()
            course.losses.append(loss.detach())
            pending, weight = pending + 1, weight + own
            if pending == accumulate:
                update(weight)
                pending, weight = 0, 0
        if pending:
            update(weight)
        if course.losses[begun:]:
            course.means.append(math.fsum(map(float, course.losses[begun:])) / len(course.losses[begun:]))
    return course


def _epoch(run: flatout.Run, course: Course) -> None:
    for batch in run.loader:
        course.saw(batch)
        course.losses.append(run.step(batch))


def train(world: World, run: flatout.Run) -> Course:
    """Train through flatout, in the form of the job."""
    if world.job.form in ("own loop", "inference"):
        world.model, batches = run
        return train_plainly(world, [batches] * EPOCHS)
    course = Course()
    if world.job.form == "step":
        for _ in range(EPOCHS):
            _epoch(run, course)
        return course
    if world.job.form == "fit":
        course.means = [row["loss"] for row in run.fit(EPOCHS, progress=False)]
        return course
    _epoch(run, course)
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder, "half.pt"))
        run.undo()
        world.__init__(world.job)  # type: ignore[misc]
        again = world.optimize(plan=run.plan)
        again.load(Path(folder, "half.pt"))
    _epoch(again, course)
    again.undo()
    return course


# ---- checks ------------------------------------------------------------------------------------------------------


def check(job: Job) -> None:
    """Check all properties of a job.

    Raises:
        AssertionError: a property does not hold.
    """
    with process.as_user_sets_it(job.flags), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = _leaves_no_trace(job)
        while inapplicable := re.match(r"techniques\['(\w+)'\] must serve this job", str(refused)):
            job = replace(job, techniques={k: v for k, v in job.techniques.items() if k != inapplicable[1]})
            refused = _leaves_no_trace(job)
        if refused is None and job.failure is None:
            _trains_alike(job)
        gc.collect()


@contextmanager
def _undone(world: World) -> Iterator[None]:
    """Undo ``optimize`` at the end, whatever fails."""
    try:
        yield
    finally:
        flatout.undo(world.model)


def _unexpected(job: Job, places: list[str], *allowed: str) -> list[str]:
    """Return the places where a difference is a defect."""
    patterns = [
        r"optimizer\.state\[[^.]*\((object|memory)\)",  # entries are restored as new dicts
        r"\.weight\b" if "old weight norm" in job.quirks else "",  # each forward creates the weight
        r"\._watch\.",  # times and counts of the watch of a cache
        r"\._dynamo_",  # torch.compile leaves this mark on tensors
        r"\._plan\b",  # addresses in a plan of flatout's optimizer
        r"^loader\._rings",  # memory that flatout's loader reuses
        r"_table\." if job.loader == "cached" else "",  # a cache may hold more samples than before
        r"^loader.*_IterableDataset_len_called",  # ``len`` of the loader was called
        r"^loader\b" if job.loader in READ_ONCE else "",  # batches that were read are not read again
        *allowed,
    ]
    return [place for place in places if not any(p and re.search(p, place) for p in patterns)]


def _none(places: list[str], what: str) -> None:
    assert not places, f"{what}:\n" + "\n".join(places[:20])


def _differing(before: dict[str, Any], now: Callable[[], dict[str, Any]]) -> list[str]:
    """Return the differences that remain after ten seconds, because workers need time to exit."""
    deadline = time.monotonic() + 10
    while (after := now()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{name}: {before[name]!r:.200} -> {after[name]!r:.200}" for name in before if before[name] != after[name]]


def _leaves_no_trace(job: Job) -> BaseException | None:
    """Compare all state before and after ``optimize``, and after ``undo``. Return the error if the job may raise it."""
    world, refused = World(job), None
    rewinds, is_seeded = is_rewindable(world.loader), job.arguments.get("seed") is not None
    before, around, flags = world.picture(), process.surroundings(), process.flags()
    with _undone(world):
        try:
            if job.twice:
                world.optimize(fixed_batches(world.kind, job.batch), budget=0, seed=None, deterministic=False)
            world.trigger.arm(True)
            world.optimize()
        except (*ERRORS, Injected, KeyboardInterrupt, MemoryError) as error:
            if not _may_raise(job, error):
                raise
            refused = error.with_traceback(None)  # the frames of the error would keep workers alive
        world.trigger.arm(False)
        gc.collect()
        drawn = r"^generator" if is_seeded and refused is None else ""
        # One sets an environment variable. The other continues the epoch that trials began.
        if refused is None and not job.arguments.get("deterministic") and rewinds:
            _none(_differing(around, process.surroundings), "optimize changed the process")
        if refused is None:
            places = before.changes(world.picture(), VALUES)
            _none(_unexpected(job, places, r"^optimizer\.step", drawn), "optimize left a trace")
    gc.collect()
    what = "undo did not give back" if refused is None else f"{type(refused).__name__} left"
    _none(_unexpected(job, before.changes(world.picture()), drawn), what)
    _none(_differing(around | flags, lambda: process.surroundings() | process.flags()), what)
    return refused


def _may_raise(job: Job, error: BaseException) -> bool:
    if job.failure is not None and isinstance(error, job.failure.error):
        return True
    if not isinstance(error, ERRORS):
        return False
    return bool(job.refusable and re.search(ARGUMENTS, str(error))) or "must serve this job" in str(error)


def _trains_alike(job: Job) -> None:
    """Compare a training through ``optimize`` with plain training: batches, losses, and all final state."""
    around, world = process.surroundings(), World(job)
    with _undone(world):
        run = world.optimize()
        if job.twice:
            run.undo()
            run = world.optimize(run.loader, plan=run.plan)
        course = train(world, run)
        run.undo()
    after, decisions = world.picture(), run.plan.decisions
    run = None  # type: ignore[assignment]
    twin = World(job)
    expected = train_plainly(twin, _as_optimize_reads(twin))
    close = Tolerance(job, decisions)
    picture = twin.picture()
    places = picture.changes(after, STRUCTURE, close.equal)
    # Other numbers than in plain training were drawn, so that the second epoch may have another order.
    is_redrawn = close.redraws and any(place.startswith("generator") for place in picture.changes(after, STRUCTURE))
    if not _is_reseeded(job, decisions) and not (is_redrawn and job.loader in DRAWS):
        epochs = 1 if is_redrawn else EPOCHS
        count = len(expected.losses) * epochs // EPOCHS
        if course.batches:
            _none(_sequence_changes(expected.batches[:count], course.batches[:count]), "batches differ")
        _none(_unequal(expected.losses[:count], course.losses[:count], close.losses), "losses differ")
        _none(_unequal(expected.means[:epochs], course.means[:epochs], close.means), "mean losses differ")
        if not is_redrawn:
            _none(_unexpected(job, places, *close.allowed), "training ended elsewhere")
    del world, twin, picture
    gc.collect()
    _none(_differing(around, process.surroundings), "training changed the process")


def _is_reseeded(job: Job, decisions: dict[str, Any]) -> bool:
    """Return whether samples draw other random numbers than in the plain training."""
    has_seeds = bool(job.arguments.get("deterministic")) and job.arguments.get("seed") is not None
    return job.loader in RESEEDED and (has_seeds or bool(decisions.get("workers", {}).get("num_workers")))


def _unequal(theirs: list[Any], ours: list[Any], equal: Callable[[float, float], bool]) -> list[str]:
    pairs = zip(map(float, ours), map(float, theirs), strict=True) if ours else ()
    return [f"{i}: {b} -> {a}" for i, (a, b) in enumerate(pairs) if not equal(a, b)]


def _as_optimize_reads(world: World) -> Iterator[Iterable[Any]]:
    """Yield a loader for each epoch. A loader that cannot be rewound gives its trial batches before training draws."""
    seed, first = world.job.arguments.get("seed"), world.loader
    if not is_rewindable(world.loader):
        rest = iter(world.loader)
        count = 1 if why_not_read(world.loader) or why_not_ahead(world.loader) else TRIAL_BATCHES
        read = [copy.deepcopy(batch) for batch in itertools.islice(rest, count)]
        first = itertools.chain(read, rest)
    if seed is not None:
        _seed(seed)
    yield first
    for _ in range(1, EPOCHS):
        yield world.loader


def _sequence_changes(theirs: list[Any], ours: list[Any]) -> list[str]:
    if len(theirs) != len(ours):
        return [f"{len(theirs)} batches -> {len(ours)}"]
    return [
        f"batch {i}: {place}"
        for i, (before, after) in enumerate(zip(theirs, ours, strict=True))
        for place in before.changes(after, STRUCTURE)
    ]


class Tolerance:
    """Allowed difference from plain training. Without inexact techniques no difference is allowed."""

    def __init__(self, job: Job, decisions: dict[str, Any]) -> None:
        inexact = {name for name, value in decisions.items() if value is not False} - EXACT
        is_weighted = job.loss == "ignoring some" and job.arguments.get("accumulate", 1) > 1
        if (
            is_weighted
            or job.optimizer.startswith(("flatout", "fused"))
            or job.arguments.get("max_grad_norm") is not None
        ):
            inexact.add("fused_optimizer")
        if job.model in SPARSE and job.arguments.get("accumulate", 1) > 1:
            inexact.add("coalesced before they are averaged")
        self.loads = job.form == "checkpoint"
        # A native step creates state by dtype. torch loads a step size in the dtype of its parameter.
        self.reorders = (job.model == "complex" and bool(inexact)) or (self.loads and "bf16" in job.quirks)
        self.counts = job.loader in ("prefetcher", "in memory")
        self.is_exact = not inexact
        self.is_half = "precision" in inexact or "bf16" in job.quirks
        self.redraws = "compile" in inexact  # compiled code draws other random numbers
        self.is_loose = self.is_half or self.redraws or (bool(inexact) and job.optimizer in SIGNS)

    def losses(self, ours: float, theirs: float) -> bool:
        if self.is_exact:
            return ours == theirs
        share = 0.15 if self.is_loose else 1e-3
        return abs(ours - theirs) <= share * (1 + abs(theirs))

    def means(self, ours: float, theirs: float) -> bool:
        """Compare means. ``fit`` sums in float32."""
        return math.isclose(ours, theirs, rel_tol=1e-5) if self.is_exact else self.losses(ours, theirs)

    def equal(self, theirs: Any, ours: Any) -> bool:
        if theirs == ours or self.is_exact:
            return bool(theirs == ours)
        if isinstance(theirs, Bits) and isinstance(ours, Bits):
            if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
                return False
            # A gradient that is zero except for rounding moves a weight by Adam's full learning rate.
            return self.is_loose or torch.allclose(ours.values, theirs.values, rtol=0.02, atol=0.05)
        try:
            return self.is_loose or math.isclose(float(ours), float(theirs), rel_tol=0.02, abs_tol=0.02)
        except (TypeError, ValueError):
            return False

    @property
    def allowed(self) -> tuple[str, ...]:
        """Patterns of places that may differ."""
        return (
            r"loader\._iterator",  # the user's own workers were not used
            r"^loader\b" if self.counts else "",  # a loader of flatout counts its epochs
            r"(param_groups|defaults).*\((keys|same as)\)|defaults\["
            if self.loads
            else "",  # loading in torch changes the order
            "" if self.is_exact else r"\.grad\b",  # gradients stay scaled in the lazy form
            r"\.grad\b" if self.loads else "",  # a checkpoint lacks gradients of parameters outside the optimizer
            "^generator" if self.redraws else "",
            r"_need_device_dtype_check_for_fused",  # torch's step did not run
            r"optimizer\.state" if self.reorders else "",
            "" if self.is_exact else r"(avg|buffer|sum|norm|sq)\w*'\] \(bits\)",  # from pure rounding
        )
