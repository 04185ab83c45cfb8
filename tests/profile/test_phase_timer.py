"""Times of steps and their parts without the profiler, on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.mfu import MfuCounter
from flatout.profile import Profile, profile_run
from flatout.profile.phase_timer import PhaseTimer, is_gpu
from flatout.profile.profile_data import PHASES, Step
from flatout.profile.shown_profile import tables
from tests.clock import Clock, TimedSamples, simulated_time
from tests.profile.test_profile import PLAIN

SECONDS = {"loader_wait": 8.0, "forward": 3.0, "backward": 4.0, "update": 2.0, "host_idle": 1.0}
"""Seconds of the parts of a step of ``Loop``."""


@pytest.fixture
def clock() -> Iterator[Clock]:
    with simulated_time(tick=0.0) as clock:
        yield clock


class Slow(nn.Module):
    """Layer that takes time in forward and backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_forward_hook(lambda *_: clock.advance(SECONDS["forward"] - 1.0))
        self.layer.weight.register_hook(lambda _: clock.advance(SECONDS["backward"]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Loop:
    """Training on simulated time.

    Under the profiler each step takes ``overhead`` more seconds, half of them in forward.

    Attributes:
        profiled: for each step, whether it ran under a profiler.
    """

    def __init__(self, clock: Clock, overhead: float = 0.0) -> None:
        torch.manual_seed(0)
        self.clock, self.overhead = clock, overhead
        self.model = Slow(clock)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(lambda *_: clock.advance(SECONDS["update"]))
        self.loader = DataLoader(TimedSamples(clock, SECONDS["loader_wait"] / 8), batch_size=8)
        self.profiled: list[bool] = []

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        self.clock.advance(1.0)
        return nn.functional.cross_entropy(output, y)

    def step(self, batch: Any) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        self.profiled.append(torch.autograd._profiler_enabled())
        if self.profiled[-1]:
            self.clock.advance(self.overhead)
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
        self.clock.advance(SECONDS["host_idle"])

    def profile(self, **about: Any) -> Profile:
        return profile_run(self.loader, self.step, **about)


def parts(step: Step) -> dict[str, float]:
    """Return the parts of a step that take time, rounded."""
    return {phase: round(seconds, 6) for phase, seconds in step.phases.items() if seconds > 1e-6}


def timed(clock: Clock, *steps: Callable[[], object]) -> list[dict[str, float]]:
    """Return the parts of each step."""
    timer = PhaseTimer()
    with timer.listening():
        timer.boundary()
        for step in steps:
            step()
            timer.boundary()
    return [parts(step) for step in timer.steps()]


def test_headline_and_phases_are_those_of_steps_without_the_profiler(clock: Clock) -> None:
    loop = Loop(clock, overhead=36.0)
    profile = loop.profile(steps=3, warmup=1)
    assert loop.profiled == [False] * (profile.before + 3) + [True] * 3
    assert profile.seconds == pytest.approx(sum(SECONDS.values()))
    assert parts(Step(profile.seconds, profile.phases)) == pytest.approx(SECONDS)
    assert [parts(step) for step in profile.steps] == [pytest.approx(SECONDS)] * 3
    assert profile.profiled_seconds == pytest.approx(sum(SECONDS.values()) + 36.0)
    assert profile.distortion == pytest.approx(3.0)
    assert profile.samples == 8


def test_the_time_under_the_profiler_is_noted_with_the_operators(clock: Clock) -> None:
    profile = Loop(clock, overhead=36.0).profile(steps=2, warmup=0)
    (note,) = (note for _, note, table in tables(profile) if "operator" in table.headings)
    assert "54,000 ms" in note


def test_a_loop_that_ends_before_the_profiler_has_times_and_no_operators(clock: Clock) -> None:
    loop = Loop(clock)
    loop.loader = list(loop.loader)[:6]  # type: ignore[assignment]
    batches = iter(loop.loader)
    profile = profile_run(batches, loop.step, steps=9, warmup=1)
    assert (len(profile.steps), profile.profiled_steps, profile.profiled_seconds) == (3, 0, None)
    assert (profile.operators, profile.memory_peak, profile.trace) == ((), None, None)
    assert profile.phases["forward"] == pytest.approx(SECONDS["forward"])
    assert profile.advice
    assert profile.distortion is None
    assert str(profile)
    assert profile._repr_html_()
    assert profile.to_json()


def test_parts_of_a_run_are_those_that_it_marks(clock: Clock) -> None:
    model = Slow(clock)
    loss_fn = Loop(clock).loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TimedSamples(clock, 1.0), batch_size=8)
    run = flatout.optimize(model, loader, optimizer, loss_fn, budget=0, techniques=PLAIN)
    optimizer.register_step_pre_hook(lambda *_: clock.advance(SECONDS["update"]))
    profile = run.profile(steps=2, warmup=1)
    assert parts(Step(profile.seconds, profile.phases)) == pytest.approx(
        {name: seconds for name, seconds in SECONDS.items() if name != "host_idle"}
    )
    assert "47 %" in profile.verdict  # the loader's share of the timed steps


def test_evaluation_and_its_batches_are_the_loops_own_code(clock: Clock) -> None:
    loop = Loop(clock)

    def evaluate() -> None:
        loop.model.eval()
        with torch.no_grad():
            for _, (x, _) in zip(range(2), loop.loader, strict=False):
                loop.model(x)
        loop.model.train()

    def step() -> None:
        loop.step(next(iter(loop.loader)))
        evaluate()

    of_evaluation = 2 * (SECONDS["loader_wait"] + SECONDS["forward"] - 1.0)
    assert timed(clock, step) == [SECONDS | {"host_idle": SECONDS["host_idle"] + of_evaluation}]


def test_a_frozen_teacher_before_the_student_leaves_the_batch_to_the_training(clock: Clock) -> None:
    loop, teacher = Loop(clock), nn.Linear(8, 3).eval()

    def step() -> None:
        x, y = next(iter(loop.loader))
        with torch.no_grad():
            teacher(x)
        loop.step((x, y))

    assert timed(clock, step, step) == [SECONDS] * 2


def test_a_forward_without_a_backward_ends_with_its_step(clock: Clock) -> None:
    layer = nn.Linear(4, 1)
    layer.register_forward_hook(lambda *_: clock.advance(1.0))

    def look() -> None:
        layer(torch.ones(1, 4))
        clock.advance(2.0)

    def train() -> None:
        clock.advance(4.0)
        layer(torch.ones(1, 4)).sum().backward()

    assert timed(clock, look, train) == [{"forward": 1.0, "host_idle": 2.0}, {"forward": 1.0, "host_idle": 4.0}]


class Transform(nn.Module):
    """Transform of one sample that takes time. ``weight`` makes it a learned one, such as a frozen encoder."""

    def __init__(self, clock: Clock, *, has_weight: bool) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.ones(8)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        self.clock.advance(1.0)
        return x if self.weight is None else x * self.weight


class Transformed(Dataset[tuple[Tensor, Tensor]]):
    """Samples that a module transforms."""

    def __init__(self, transform: nn.Module) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(torch.ones(8)).detach(), torch.tensor(i % 3)


@pytest.mark.parametrize("own_loop", [True, False], ids=["own loop", "run.loader"])
@pytest.mark.parametrize("has_weight", [False, True])
def test_modules_that_a_dataset_calls_are_loading(has_weight: bool, own_loop: bool, clock: Clock) -> None:
    loop = Loop(clock)
    loop.loader = DataLoader(Transformed(Transform(clock, has_weight=has_weight)), batch_size=8)
    if not own_loop:
        _, loop.loader = flatout.optimize(loop.model, loop.loader, budget=0, techniques=PLAIN)
    profile = loop.profile(steps=2, warmup=1)
    assert parts(Step(profile.seconds, profile.phases)) == pytest.approx(SECONDS)


def test_a_transform_between_loader_and_model_is_the_loops_own_code(clock: Clock) -> None:
    loop, transform = Loop(clock), Transform(clock, has_weight=False)
    (x, y), *_ = loop.loader
    (found,) = timed(clock, lambda: (transform(x), clock.advance(5.0), loop.step((x, y))))
    assert found["forward"] == SECONDS["forward"]


def test_a_forward_without_modules_is_what_precedes_the_backward(clock: Clock) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clock.advance(5.0))

    def step() -> None:
        loss = weight.square().sum()
        clock.advance(2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.advance(1.0)

    assert timed(clock, step, step) == [{"forward": 2.0, "update": 5.0, "host_idle": 1.0}] * 2


def test_forwards_in_a_closure_and_in_a_checkpoint_belong_to_forward_and_backward(clock: Clock) -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda *_: clock.advance(1.0))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    assert timed(clock, lambda: optimizer.step(closure)) == [{"forward": 1.0, "backward": 1.0}]


def test_clipping_scaling_and_schedules_are_parts_of_the_update(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (clock.advance(1.0), function(*args, **kwargs))[1])

    for owner, name in (
        (clip_grad, "_get_total_norm"),
        (torch.amp.GradScaler, "unscale_"),
        (torch.amp.GradScaler, "update"),
        (torch.optim.lr_scheduler.StepLR, "get_lr"),
    ):
        slow(owner, name)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, schedule = torch.amp.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step() -> None:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        clip_grad.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    assert timed(clock, step) == [{"update": 4.0}]


@pytest.fixture
def gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake GPU whose events have the time of their creation."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream is gpu.stream
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    gpu = SimpleNamespace(stream=SimpleNamespace(device="cuda:0"), captures=False, waits=[])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.captures)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.waits.append)
    return gpu


def test_a_gpu_times_the_steps_with_events(clock: Clock, gpu: SimpleNamespace) -> None:
    loop = Loop(clock)
    (x, y), *_ = loop.loader
    assert timed(clock, lambda: loop.step((x, y))) == [
        {phase: seconds for phase, seconds in SECONDS.items() if phase != "loader_wait"}
    ]
    assert gpu.waits == ["cuda:0"]


def test_a_moment_in_the_capture_of_a_graph_has_the_time_of_the_moment_before(
    clock: Clock, gpu: SimpleNamespace
) -> None:
    layer = nn.Linear(2, 1)
    layer.register_forward_pre_hook(lambda *_: setattr(gpu, "captures", True))

    def step() -> None:
        clock.advance(1.0)
        layer(torch.ones(1, 2))  # the capture begins within the forward
        clock.advance(2.0)
        gpu.captures = False

    assert timed(clock, step) == [{"host_idle": 3.0}]


@pytest.mark.usefixtures("gpu")
def test_uploads_are_copies_to_the_device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(tensor: Tensor, *_: object) -> Tensor:  # without a GPU nothing is copied
        clock.advance(1.0)
        return tensor

    for method in ("to", "cuda"):
        monkeypatch.setattr(Tensor, method, copy)
    timer = PhaseTimer()
    with timer.listening():
        timer.boundary()
        torch.ones(1).to("cuda")
        torch.ones(1).cuda()
        torch.ones(1).to(torch.float16)
        timer.boundary()
    assert [parts(step) for step in timer.steps()] == [{"h2d": 2.0, "host_idle": 1.0}]
    assert Tensor.to is copy


@pytest.mark.parametrize(
    ("target", "expected"),
    [("cuda:1", True), (torch.device("cuda"), True), (0, True), ("cpu", False), (torch.float16, False), (None, False)],
)
def test_an_upload_has_a_gpu_as_its_target(target: Any, expected: bool) -> None:
    assert is_gpu(target) == expected
    assert not is_gpu(torch.ones(1))


def states() -> list[Any]:
    """Return the functions that a timer replaces."""
    return [
        record_function.__enter__,
        record_function.__exit__,
        torch.autograd._engine_run_backward,
        nn.Module.__call__,
        torch.amp.GradScaler.step,
        clip_grad._get_total_norm,
        LRScheduler.step,
        Tensor.to,
    ]


def test_everything_is_restored_even_after_an_error() -> None:
    def fail() -> None:
        with PhaseTimer().listening():
            assert states() != before
            raise KeyError

    before = states()
    with pytest.raises(KeyError):
        fail()
    assert states() == before
    counter = MfuCounter()
    with torch.profiler.profile() as profiler, counter.step() as step, step.phase("forward"):
        pass
    assert "flatout.forward" in {event.key for event in profiler.key_averages()}


def test_other_threads_and_errors_leave_whole_spans() -> None:
    model = nn.Linear(2, 1)
    timer = PhaseTimer()
    with timer.listening():
        timer.boundary()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        model(torch.ones(1, 2)).sum().backward()
        timer.boundary()
    (step,) = timer.steps()
    assert sum(step.phases.values()) == pytest.approx(step.seconds)
    assert set(step.phases) == set(PHASES)


@pytest.fixture
def compiled() -> Iterator[Callable[[Tensor], Tensor]]:
    """Function that ``torch.compile`` compiles as a whole, or not at all. The function calls a model."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    yield torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("within", [False, True])
def test_timing_compiles_nothing_again(within: bool, compiled: Callable[[Tensor], Tensor]) -> None:
    if not within:
        compiled(torch.ones(2, 4)).sum().backward()
    with PhaseTimer().listening():
        compiled(torch.ones(2, 4)).sum().backward()
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(torch.ones(2, 4)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=not within):  # code compiled inside has such a guard
        compiled(torch.ones(2, 4)).sum().backward()
