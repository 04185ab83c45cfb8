"""Helpers for tests of one technique. No other test file uses the internal protocol of techniques."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

import flatout
from flatout.core.errors import Unsuitable
from flatout.core.snapshot import Snapshot
from flatout.data import is_rewindable
from flatout.data.loaders import loader_position
from flatout.data.tuning import Tuned
from flatout.report.model import Pace, Row
from flatout.techniques import REGISTRY, Advice, LoaderTechnique, Measured, NotApplicable, StepTechnique
from flatout.techniques.cuda_graph import CudaGraph, GraphCandidate, why_not_captured
from flatout.techniques.cudnn_benchmark import CudnnBenchmark
from flatout.training import step_flops
from flatout.training.job import Job
from flatout.tuning.arguments import Choices
from flatout.tuning.bench import Bench
from flatout.tuning.budget import Budget
from flatout.tuning.stopwatch import Block, Measure, Stopwatch
from flatout.tuning.tuner import Tuner
from tests.reasons import reasons
from tests.techniques.recorder import Rerun

TECHNIQUES = {technique.name: technique for technique in REGISTRY}

STARVED = Pace(step_ms=10.0, load_ms=50.0, samples_per_second=100.0)
"""Pace of a loop that waits for its loader most of the time."""


# -- jobs ----------------------------------------------------------------------------------------------------


def step(job: Job, batch: Any) -> Tensor:
    """Step the job as ``run.step`` does."""
    return job.stepper.step(batch)


def count_work(job: Job, batch: Any) -> None:
    """Count the FLOPs of a step, as ``optimize`` does before techniques return candidates."""
    job.work(batch)


def share_of_flops(job: Job, module: str) -> float | None:
    """Return a module's share of a step's FLOPs, or None if the share is unknown."""
    return step_flops.share_of_flops(job.work, module)


# -- applicability of a technique to a job --------------------------------------------------------------------


def unable(reason: str) -> Exception:
    """Return the error that a candidate raises if it cannot be used."""
    return Unsuitable(reason)


def refused(work: Callable[[], Any]) -> set[str] | None:
    """Return the reason codes if the work refuses the job, otherwise None."""
    try:
        work()
    except (NotApplicable, Unsuitable) as reason:
        return _codes(str(reason))
    return None


def refusal(name: str, job: Job, pace: Pace = STARVED) -> set[str] | None:
    """Return the reason codes if the technique refuses the job, otherwise None."""
    technique = TECHNIQUES[name]
    if isinstance(technique, Advice):
        return refused(lambda: findings(name, job, pace=pace))
    if isinstance(technique, Measured):
        return refused(lambda: candidates(name, job, pace))
    return refused(lambda: technique.check(job))


def findings(name: str, job: Job, seconds: float = 1.0, pace: Pace = STARVED) -> list[Any]:
    """Return the lines or stages of an advice technique."""
    technique = TECHNIQUES[name]
    assert isinstance(technique, Advice)
    technique.check(job)
    return list(technique.findings(job, pace, seconds))


def candidates(name: str, job: Job, pace: Pace = STARVED) -> list[Candidate]:
    """Return the technique's candidates for this job, most promising first."""
    technique = TECHNIQUES[name]
    technique.check(job)
    if isinstance(technique, LoaderTechnique):
        return [Candidate(source) for source in technique.candidates(job, pace)]
    assert isinstance(technique, StepTechnique)
    return [Candidate(candidate) for candidate in technique.candidates(job)]


def setup_seconds(name: str, job: Job, pace: Pace) -> float:
    """Return the estimated setup time of a candidate."""
    technique = TECHNIQUES[name]
    assert isinstance(technique, Measured)
    return technique.setup_estimate(job, pace)


# -- candidates ----------------------------------------------------------------------------------------------


class Candidate:
    """Change to a job, active inside ``with``. A loader's candidate builds another loader instead."""

    def __init__(self, candidate: Any) -> None:
        self._candidate = candidate

    @property
    def label(self) -> str:
        return self._candidate.label

    @property
    def value(self) -> Any:
        return self._candidate.value

    @property
    def reason(self) -> str:
        """Sentence of the tuner on its choice of a loader's settings."""
        return self._candidate.reason

    def __enter__(self) -> Candidate:
        self._candidate.enable()
        return self

    def __exit__(self, *_: object) -> None:
        self._candidate.disable()

    def end_warmup(self) -> None:
        """End the warm-up. Later calls compile and record nothing."""
        self._candidate.end_warmup()

    def on_batch(self, batch: Any) -> None:
        """Pass a training batch to the candidate."""
        self._candidate.on_batch(batch)

    def free(self) -> None:
        """Free memory that is needed only if the candidate is enabled again."""
        self._candidate.release()

    @property
    def stopped(self) -> set[str]:
        """Reason codes for which the candidate fell back, empty while it is in use."""
        return _codes(self._candidate.failure) if self._candidate.failure else set()

    def make(self) -> Any:
        """Build the loader."""
        return self._candidate.make()


def forced(name: str, value: Any, job: Job) -> Candidate:
    """Return the candidate that ``techniques={name: value}`` forces."""
    technique = TECHNIQUES[name]
    if isinstance(technique, Measured):
        return Candidate(technique.forced(job, value))
    return Candidate(technique.candidate(job))  # type: ignore[attr-defined]


# -- decisions -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Result of the trials of some techniques.

    Attributes:
        rows: rows of the report by technique.
        values: values of the kept techniques, as a plan stores them.
        loader: loader that training would iterate.
    """

    rows: dict[str, Row]
    values: dict[str, Any]
    loader: Any


@contextlib.contextmanager
def decided(*names: str, job: Job, budget: float = 60.0) -> Iterator[Outcome]:
    """Decide about these techniques alone, one after the other. Kept techniques are active inside the block.

    Args:
        names: names of the techniques.
        job: job from ``job_of`` with batches.
        budget: as for ``optimize``.
    """
    spec, loader = job.spec, job.data.loader
    state = Snapshot.capture(spec.modules, spec.optimizer, loader, spec.code, also=[loader_position(loader)])
    with state.guarded():
        bench = Bench(job, state, Budget(budget), rewindable=is_rewindable(job.data.loader))
        tuner = Tuner(bench, Choices({}, {}, {}))
        rows: dict[str, Row] = {}
        for name in names:
            technique = TECHNIQUES[name]
            assert isinstance(technique, Measured)
            rows[name] = tuner.decide(technique)
        bench.rewind(to_train=False)
        try:
            yield Outcome(rows, bench.ledger.values, job.data.source)
        finally:
            for candidate in reversed(bench.ledger.candidates):
                candidate.disable()


@contextlib.contextmanager
def given_timings(old: float, new: float, pace: Pace) -> Iterator[None]:
    """Replace the times in trials of loaders by fixed ones.

    Args:
        old: seconds of an update with the user's loader.
        new: seconds of an update with a candidate.
        pace: pace of the job before any trial.
    """

    @contextlib.contextmanager
    def loops(*_: Any, **__: Any) -> Iterator[tuple[Measure, Measure]]:
        yield lambda i: Block((old,), old), lambda i: Block((new,), new)

    with mock.patch.object(Stopwatch, "pace", pace), mock.patch.object(Bench, "loops", loops):
        yield


@contextlib.contextmanager
def tuned_workers(workers: int, busy: float = 0.0, *, persistent: bool = False) -> Iterator[None]:
    """Replace the measurement of the worker tuner by a given result.

    Args:
        workers: number of workers that the tuner chooses.
        busy: share of a core that each worker keeps busy.
        persistent: value of ``persistent_workers`` that the tuner chooses.
    """

    def tune(loader: Any, step_time: float, *, is_warm: bool) -> Tuned:
        return Tuned(
            loader=loader,
            workers=workers,
            prefetch_factor=2,
            persistent=persistent,
            start_method=None,
            start_seconds=0.1,
            step_time=step_time,
            stall=None,
            busy=busy,
            tries=(),
            reason=f"{workers} workers load as a step needs",
        )

    with mock.patch("flatout.techniques.workers.tune", tune):
        yield


@contextlib.contextmanager
def usable_cores(count: int) -> Iterator[None]:
    """Set the number of cores that this process can use, as the only rank."""
    with contextlib.ExitStack() as stack:
        for module in ("data.tuning", "techniques.workers", "techniques.cpu_threads"):
            stack.enter_context(mock.patch(f"flatout.{module}.own_cores", return_value=count))
        yield


@contextlib.contextmanager
def cudnn_benchmark_without_a_gpu() -> Iterator[None]:
    """Make the technique apply to every job."""
    with mock.patch.object(CudnnBenchmark, "check", return_value=None):
        yield


# -- graphs of whole steps -----------------------------------------------------------------------------------


def job_under(run: flatout.Run) -> Job:
    """Return the job of a run.

    No public attribute holds the job. Tests of graphs attach a recorder to a run that is already set up.
    """
    return run._job


def graphed(run: flatout.Run, recorder: Rerun) -> Candidate:
    """Return the candidate that records the steps of a run with this recorder."""
    return Candidate(GraphCandidate(job_under(run).stepper, recorder))


def recorder_of(run: flatout.Run) -> Rerun:
    """Return a recorder for the steps of a run."""
    return Rerun(job_under(run))


def rates_of(candidate: Candidate) -> list[Tensor]:
    """Return the learning rates that recorded updates read.

    No public attribute shows how often the rates are written. Weights do not depend on unneeded writes.
    """
    return candidate._candidate.runner._constants.rates._slots


def change_loss(run: flatout.Run, factor: float) -> None:
    """Multiply the loss of every step by a factor, as a technique that replaces the loss could."""
    job = job_under(run)
    job.objective.compiled = lambda batch: factor * job.objective.loss(batch)


class Recorders(list[Rerun]):
    """Recorders that the technique has made.

    Attributes:
        error: error of all later recorders, or None.
    """

    error: Exception | None = None


@contextlib.contextmanager
def cuda_graph_without_a_gpu() -> Iterator[Recorders]:
    """Make the technique record steps on the CPU as functions. Yield the recorders that it makes."""
    made = Recorders()

    def candidates(self: CudaGraph, job: Job) -> list[GraphCandidate]:
        made.append(Rerun(job))
        made[-1].error = made.error
        return [GraphCandidate(job.stepper, made[-1])]

    def check(self: CudaGraph, job: Job) -> None:
        reason = why_not_captured(job)
        if reason:
            raise NotApplicable(reason)

    with mock.patch.object(CudaGraph, "candidates", candidates), mock.patch.object(CudaGraph, "check", check):
        yield made


# -- eager and compiled calls --------------------------------------------------------------------------------


class PythonCalls:
    """Count of the eager calls of a function inside ``with``. Compiled and scripted calls do not count."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.count = 0
        self._code = function.__code__

    def __enter__(self) -> PythonCalls:
        self._before = sys.getprofile()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _on_event(self, frame: Any, event: str, _: Any) -> None:
        self.count += event == "call" and frame.f_code is self._code


def _codes(sentence: str) -> set[str]:
    return reasons(sentence) or {"unknown"}
