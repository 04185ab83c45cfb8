"""Checks that all ranks of a pool make the same decisions: ``optimize`` under noise, other machines and failures."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatout
from flatout.core.errors import Unsuitable
from flatout.core.snapshot import Snapshot
from flatout.core.toggle import Toggle
from flatout.distributed.agreement import GroupAgreement, RankFailure
from flatout.distributed.process_group import control_group
from flatout.techniques import REGISTRY, Candidate, Measured, NotApplicable
from flatout.training.stepper import Stepper
from flatout.tuning import costs
from flatout.tuning.combinations import Combinations
from flatout.tuning.numerics import Difference
from flatout.tuning.ranks import same_candidates
from flatout.tuning.stopwatch import Stopwatch
from tests.clock import Clock, TimedStep
from tests.helpers import snapshot
from tests.jobs import job_of
from tests.reasons import reasons
from tests.tuning.harness import Change

REAL_SLEEP = time.sleep

SECONDS = 60
"""Time without a step after which a run counts as a hang. The process then shows its stack, and the system kills it."""

PLACES = (
    "check",
    "candidates",
    "enable",
    "disable",
    "step",
    "verify",
    "combination",
    "restore",
    "loader",
    "batch",
    "numerics",
)
ERRORS: tuple[Callable[[str], Exception], ...] = (
    ValueError,
    RuntimeError,
    torch.OutOfMemoryError,
    NotApplicable,
    Unsuitable,
)

Injected = "injected"


def ranks() -> GroupAgreement:
    return GroupAgreement(control_group())


def end_after_a_hang() -> None:
    """Show the stack of this process after ``SECONDS`` without another call, and kill it."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(SECONDS)


class Net(nn.Module):
    """Model with state in BatchNorm and random numbers in Dropout, to which several techniques apply."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Machine(Clock):
    """Simulated clock of one rank, whose work takes a random time. Sometimes the rank is late in real time, too.

    Args:
        rank: number of the rank. No clock has the time of another.
        seed: seed of the random times. A ``random.Random`` would make the samples of a dataset look random.
        noise: largest relative error of a time.
    """

    def __init__(self, rank: int, seed: int, noise: float) -> None:
        super().__init__()
        self.now = 1000.0 * rank
        self._state = 1000 * seed + rank
        self._noise = noise

    def _draw(self) -> float:
        self._state = (1664525 * self._state + 1013904223) % 2**32
        return self._state / 2**32

    def advance(self, seconds: float) -> None:
        """Advance the clock by the time of work."""
        late = 10 if self._draw() < 0.05 else 1
        super().advance(seconds * (1 + late * self._noise * self._draw()))
        if self._draw() < 0.02:
            REAL_SLEEP(self._draw() * 2e-3)


class Samples(Dataset[tuple[Tensor, int]]):
    """Deterministic samples that take time.

    Args:
        machine: the clock that each sample advances, or None for samples without load time.
        seconds: time of a sample.
    """

    def __init__(self, machine: Machine | None = None, seconds: float = 0.0) -> None:
        self._machine = machine
        self._seconds = seconds

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self._machine is not None:
            self._machine.advance(self._seconds)
        return torch.full((1, 8, 8), float(i)), i % 3


class Stream:
    """Loader that trials cannot rewind."""

    def __init__(self, samples: Samples) -> None:
        self._loader = DataLoader(samples, batch_size=8)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@dataclass(frozen=True)
class Program:
    """Settings of a run, the same on all ranks."""

    loader: str
    seconds: float
    budget: float
    accumulate: int
    noise: float
    pays: frozenset[str]
    place: str
    rank: int
    after: int
    error: Callable[[str], Exception]

    @classmethod
    def of(cls, seed: int, size: int) -> Program:
        draw = random.Random(seed)
        seconds = draw.choice([0.02, 0.2, 1.0])
        return cls(
            loader=draw.choice(["tensors", "samples", "samples", "stream"]),
            seconds=seconds,
            budget=seconds * draw.choice([30.0, 300.0, 1000.0]),
            accumulate=draw.choice([1, 1, 2]),
            noise=draw.choice([0.0, 0.02, 0.2, 2.0]),
            pays=frozenset(draw.sample(["precision", "cpu_threads", "fused_optimizer", "channels_last"], 2)),
            place=draw.choice([*PLACES, ""]),
            rank=draw.randrange(size),
            after=draw.choice([0, 1, 2, 5, 20, 60, 100, 200, 400]),
            error=draw.choice(ERRORS),
        )

    def step_seconds(self, samples: int, active: Collection[str]) -> float:
        return self.seconds * 0.8 ** len(self.pays & set(active))

    def make_loader(self, machine: Machine) -> Any:
        if self.loader == "tensors":
            return DataLoader(TensorDataset(torch.randn(48, 1, 8, 8), torch.arange(48) % 3), batch_size=8, shuffle=True)
        samples = Samples(machine, 0.05 * self.seconds)
        return Stream(samples) if self.loader == "stream" else DataLoader(samples, batch_size=8)


@contextlib.contextmanager
def running_on(machine: Machine, rank: int) -> Iterator[None]:
    """Give a rank its own clock, load average, cores and order of pairs."""
    functions = {"perf_counter": machine, "process_time": machine.process_seconds, "sleep": machine.sleep}
    with (
        mock.patch.multiple(time, **functions),
        mock.patch("os.getloadavg", return_value=(10.0 * rank, 0.0, 0.0)),
        mock.patch("os.sched_getaffinity", return_value=set(range(2 - rank % 2))),
        mock.patch("flatout.tuning.pairs._seeds", itertools.count(7 * rank)),
        mock.patch("flatout.mfu.peaks._SIZES", {"cpu": (64,)}),
        mock.patch("flatout.mfu.peaks._SWEEP_SECONDS", 0.0),
    ):
        yield


@contextlib.contextmanager
def failing(program: Program, rank: int) -> Iterator[list[str]]:
    """Raise the error of a program once, on its rank. The list receives the error."""
    raised: list[str] = []
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        if calls == program.after + 1:
            raised.append(program.error(Injected).__class__.__name__)
            raise program.error(Injected)

    def before(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fails()
            return plain(*args, **kwargs)

        return call

    def after(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            fails()
            return result

        return call

    def differing(plain: Callable[..., list[Difference]]) -> Callable[..., list[Difference]]:
        return lambda *observed: [replace(d, by=1e6) for d in plain(*observed)]

    def of_candidates(how: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        failing_call = how(plain)
        return lambda self: (failing_call if isinstance(self, Candidate) else plain)(self)

    techniques = [type(technique) for technique in REGISTRY if isinstance(technique, Measured)]
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
            stack.enter_context(mock.patch.object(owner, name, how(getattr(owner, name))))

        if rank == program.rank:
            if program.place in ("check", "candidates"):
                for technique in techniques:
                    patch(technique, program.place, before)
            elif program.place == "enable":
                patch(Toggle, "enable", partial(of_candidates, before))
            elif program.place == "disable":
                patch(Toggle, "disable", partial(of_candidates, after))
            elif program.place == "step":
                patch(Stepper, "step", before)
            elif program.place == "verify":
                patch(flatout.tuning.numerics, "observe", before)
            elif program.place == "combination":
                patch(Combinations, "_measure", before)
            elif program.place == "numerics":  # all candidates compute wrong values on this rank
                patch(flatout.tuning.numerics, "compare", differing)
            elif program.place == "restore":
                patch(Snapshot, "restore", after)
            elif program.place == "loader":
                patch(flatout.tuning.trials, "Stopwatch", before)
            elif program.place == "batch":
                patch(DataLoader, "__iter__", before)
        yield raised


def decided(run: flatout.Run) -> dict[str, Any]:
    """Return all that ranks must agree on."""
    summary = run.report.summary
    return {
        "decisions": run.plan.decisions,
        "undecided": run.plan.undecided,
        "noise": run.plan.noise,
        "load": (run.plan.load_average, run.plan.cores),
        "rows": [replace(row, why="") for row in summary.rows],
        "paces": (summary.before, summary.after),
        "gain": (summary.gain, summary.gain_statistic),
    }


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a training that no candidate changes. A data-parallel model has other hooks."""
    changed = ("class", "compiled", "optimizer class", "threads", "hooks")
    return {name: value for name, value in snapshot(model, optimizer).items() if name not in changed}


def run_ends_alike(seed: int) -> None:
    """Run ``optimize`` with the noise and the failure of a seed. All ranks must end in the same way."""
    together = ranks()
    program = Program.of(seed, together.size)
    machine = Machine(together.rank, seed, program.noise)
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = program.make_loader(machine)

    computed: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        computed.append(target)
        end_after_a_hang()
        return functional.cross_entropy(output, target)

    def alone(*args: Any, plain: Callable[..., float] = costs._alone) -> float:
        counted = len(computed)  # rank 0 takes these steps while the others rest
        seconds = plain(*args)
        del computed[counted:]
        return seconds

    loss = TimedStep(machine, program.step_seconds, loss_fn).watch(model, optimizer)
    before = snapshot(model, optimizer)
    outcome: dict[str, Any] = {}
    error: Exception | None = None
    end_after_a_hang()
    with (
        running_on(machine, together.rank),
        mock.patch.object(costs, "_alone", alone),
        failing(program, together.rank) as raised,
    ):
        try:
            run = flatout.optimize(
                model,
                loader,
                optimizer,
                loss,
                parallel="ddp",
                techniques={"compile": False, "torchscript": False, "workers": False},
                budget=program.budget,
                accumulate=program.accumulate,
                device="cpu",
                plan=None,
            )
            outcome = decided(run)
        except (RankFailure, *ERRORS) as caught:  # type: ignore[misc]
            error = caught
    signal.alarm(0)
    if error is None:
        after = picture(model, optimizer)
        assert after == {name: before[name] for name in after}
        run.undo()
    assert snapshot(model, optimizer) == before, program
    raised_anywhere = together.every(bool(raised))
    outcomes = together.every(outcome)
    for name in outcomes[0]:
        assert len({repr(each.get(name)) for each in outcomes}) == 1, (program, name, outcomes)  # bit-equal numbers
    assert len(set(together.every(error is None))) == 1, (program, error)
    if not any(raised_anywhere):  # data-parallel steps wait for each other
        assert len(set(together.every(len(computed)))) == 1, program
    if error is not None:
        assert raised_anywhere[program.rank], error
        if together.rank == program.rank:
            assert Injected in str(error)
            assert not isinstance(error, RankFailure)
        else:
            assert isinstance(error, RankFailure)
            assert f"rank {program.rank}: " in str(error)
            assert Injected in str(error)


def loops_train_for_equally_many_batches() -> None:
    """Steps and batches take ten times as long on rank 1. All ranks rest equally long, and stop at the same time."""
    together = ranks()
    machine = Machine(together.rank, 0, 0.0)
    seconds = 1.0 if together.rank == 1 else 0.1
    steps: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        machine.advance(seconds)
        steps.append(target)
        return functional.cross_entropy(output, target)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(machine, seconds / 8), batch_size=8)
    job = job_of(model, [], optimizer, loader=loader, loss_fn=loss_fn, ranks=together)
    counts = []
    end_after_a_hang()
    with running_on(machine, together.rank):
        timer = Stopwatch(job, loader)
        for run in (lambda: timer.settle(1, rest=5.0), lambda: timer.block(40), lambda: timer.block(40, limit=4.0)):
            begun = len(steps)
            run()
            counts.append(len(steps) - begun)
        found = (counts, timer.pace, timer.alone())
        timer.close()
    signal.alarm(0)
    assert len(set(map(repr, together.every(found)))) == 1, together.every(found)
    assert counts[1] == 40
    assert counts[2] < 8
    assert timer.pace.step_ms == pytest.approx(1000, rel=0.01)


def an_error_of_the_loss_ends_all_ranks(call: int) -> None:
    """The loss of rank 1 raises from one call on, which may count FLOPs: that ignores errors."""
    together, calls = ranks(), 0
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if together.rank == 1 and calls >= call:
            raise KeyError("no such label")
        return functional.cross_entropy(output, target)

    loader = DataLoader(Samples(), batch_size=8)
    before, begun = snapshot(model, optimizer), time.monotonic()
    end_after_a_hang()
    with pytest.raises((KeyError, RankFailure)) as caught:
        flatout.optimize(model, loader, optimizer, loss, parallel="ddp", budget=5.0, device="cpu", plan=None)
    signal.alarm(0)
    assert time.monotonic() - begun < 20
    if together.rank == 1:
        assert type(caught.value) is KeyError
        assert caught.value.__context__ is None
    else:
        assert str(caught.value) == "rank 1: KeyError: 'no such label'"
    assert snapshot(model, optimizer) == before
    assert sum(together.every(1)) == together.size


def arguments_that_differ_are_rejected(**of_rank_1: Any) -> None:
    """Rank 1 has another argument than the others."""
    together = ranks()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(), batch_size=8)
    arguments = of_rank_1 if together.rank == 1 else {}
    end_after_a_hang()
    with pytest.raises(ValueError, match=f"{next(iter(of_rank_1))} must be the same on all ranks"):
        flatout.optimize(model, loader, optimizer, functional.cross_entropy, parallel="ddp", **arguments)
    signal.alarm(0)


def candidates_that_differ_do_not_apply() -> None:
    """Each rank finds another candidate, or one rank finds none."""
    together = ranks()

    def nothing() -> None:
        raise AssertionError("no candidate is turned on")

    def found() -> list[Change]:
        return [Change(f"{together.rank} threads", nothing, nothing)]

    def found_by_rank_0() -> list[Change]:
        if together.rank == 1:
            raise NotApplicable("there is only one core")
        return found()

    with pytest.raises(NotApplicable) as caught:
        same_candidates(together, found)
    assert "ranks-differ" in reasons(str(caught.value))
    with pytest.raises(NotApplicable, match="rank 1: NotApplicable"):
        same_candidates(together, found_by_rank_0)


def a_cached_plan_is_that_of_rank_0(folder: str) -> None:
    """Only rank 0 writes to its cache, and all ranks repeat its plan."""
    together = ranks()
    cache = os.path.join(folder, f"rank{together.rank}")
    end_after_a_hang()
    runs = []
    with mock.patch.dict(os.environ, FLATOUT_CACHE=cache):
        for _ in range(2):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loader = DataLoader(Samples(), batch_size=8)
            run = flatout.optimize(
                model,
                loader,
                optimizer,
                functional.cross_entropy,
                parallel="ddp",
                techniques={"compile": False, "torchscript": False, "workers": False},
                budget=1.0,
                device="cpu",
            )
            runs.append(run)
            assert len(set(map(str, together.every(decided(run))))) == 1
            run.undo()
    signal.alarm(0)
    assert os.path.isdir(os.path.join(cache, "plans")) is (together.rank == 0)
    is_repeated = any("of an earlier start" in note for note in runs[1].report.summary.notes)
    assert together.every(is_repeated) == [is_repeated] * together.size
