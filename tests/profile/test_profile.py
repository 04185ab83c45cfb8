"""run.profile: locates delays and syncs, and does not disturb training."""

from __future__ import annotations

import gzip
import json
import tempfile
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatout
from flatout.profile import Profile, profile_run, record
from flatout.profile.profile_data import PHASES, Step
from flatout.profile.record import SEARCHED_STEPS
from tests.helpers import snapshot
from tests.profile.profile_sample import ended_early
from tests.reasons import advice

PLAIN = {"compile": False, "precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}


class Samples(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(index)), index % 2


class Net(nn.Module):
    """Network of two layers. If ``looks``, forward waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.looks = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.looks and hidden.sum().item() > 1e9:  # the sync
            hidden = hidden * 2
        return self.second(hidden)


def make(loader: Any = None, model: nn.Module | None = None, **kwargs: Any) -> flatout.Run:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(), batch_size=8) if loader is None else loader
    kwargs.setdefault("techniques", PLAIN)
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0, **kwargs)


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = Net()
    model.looks = True
    return make(model=model).profile(steps=3, warmup=2)


def test_phases_and_steps_add_up(profile: Profile) -> None:
    assert len(profile.steps) == 3
    assert set(profile.phases) == set(PHASES)
    assert sum(profile.phases.values()) == pytest.approx(profile.seconds)
    assert profile.seconds == pytest.approx(sum(step.seconds for step in profile.steps) / 3)
    for step in profile.steps:
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
        assert min(step.phases[phase] for phase in ("forward", "backward", "update", "loader_wait")) > 0
    assert profile.samples == 8
    assert (profile.before, profile.profiled_steps) == (4, 3)
    assert profile.profiled_seconds is not None
    assert profile.device_busy is None


def test_the_verdict_is_of_the_timed_steps_and_taken_right_after_them() -> None:
    run = make()
    judged: list[tuple[Step, int]] = []

    def verdict(mean: Step) -> str:
        judged.append((mean, run.stats.steps))
        return "judged"

    profile = profile_run(run.loader, run.step, steps=2, warmup=1, verdict=verdict)
    assert profile.verdict == "judged"
    assert judged == [(Step(profile.seconds, profile.phases), 1 + SEARCHED_STEPS + 2)]


def test_batches_that_workers_prefetched_are_not_timed() -> None:
    taken: list[Any] = []
    profile = profile_run(
        DataLoader(Samples(), batch_size=8, num_workers=1, prefetch_factor=4), taken.append, steps=2, warmup=1
    )
    assert len(profile.steps) == 2
    assert profile.before >= 1 + SEARCHED_STEPS + 4  # four steps whose batches a worker may hold are not timed
    assert len(taken) == profile.before + 2 + 2


def test_syncs_have_their_line(profile: Profile) -> None:
    (sync,) = [sync for sync in profile.syncs if sync.phase == "forward"]
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the sync"))
    assert sync.where.endswith(f"test_profile.py:{line}")
    assert sync.code == lines[line - 1].strip()
    assert (sync.what, sync.per_step) == ("item", 1)


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"accumulate": 2}], ids=str)
def test_a_profile_of_clean_steps_names_no_line(settings: dict[str, Any]) -> None:
    run = make(model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), **settings)
    run.log("loss", run.step(next(iter(run.loader))))
    profile = run.profile(steps=2, warmup=2)
    assert profile.syncs == ()
    assert "would-wait" not in {code for sentence in profile.advice for code in advice(sentence)}


def test_operators_are_those_of_the_profiled_steps_alone() -> None:
    batches, run = list(DataLoader(Samples(), batch_size=8))[:6], make()

    def until_the_end() -> Iterator[Any]:
        yield from batches
        torch.ones(999).cumsum(0)

    for steps in (1, 2):  # one step warms up, two are searched, ``steps`` are timed, and one is profiled
        profile = profile_run(until_the_end(), run.step, steps=steps, warmup=1)
        assert profile.profiled_steps == 1
        names = {operator.name: operator for operator in profile.operators}
        assert names["aten::addmm"].calls == 2
        assert not names.keys() & {"aten::cumsum", "flatout.forward", "[memory]"}
        shares = [operator.share for operator in profile.operators]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1.001
        assert all(operator.device_seconds == 0 for operator in profile.operators)


def test_the_peak_of_memory_is_that_of_the_profiled_steps() -> None:
    size, is_large = 2**20, iter([False] * 4 + [True] + [False])

    def step(batch: Any) -> None:
        torch.ones(4 * size if next(is_large) else size, dtype=torch.int8)

    batches = [torch.ones(8)] * 6  # two are searched, two are timed, two are profiled
    peak = profile_run(batches, step, steps=2, warmup=0).memory_peak
    assert peak is not None
    assert 4 * size <= peak < 5 * size


def test_events_on_a_gpu_are_counted_by_their_kernels() -> None:
    def event(name: str, start: float, end: float, **about: Any) -> FunctionEvent:
        return FunctionEvent(len(events), name, 1, start, end, use_device="cuda", **about)

    events: list[FunctionEvent] = []
    events.append(event("flatout.boundary", 100, 100, is_user_annotation=True))
    matmul, view = event("aten::mm", 110, 130), event("aten::view", 111, 115)
    matmul.append_kernel("gemm", 0, 500)
    matmul.append_cpu_child(view)
    replay = event("flatout.forward", 140, 160, is_user_annotation=True)  # replays a CUDA graph
    replay.append_kernel("graph", 0, 200)
    kernels = [
        event("gemm", 120, 620, device_type=DeviceType.CUDA),
        event("graph", 620, 820, device_type=DeviceType.CUDA),
    ]
    shown = event("flatout.forward", 620, 820, device_type=DeviceType.CUDA, is_user_annotation=True)
    plain = event("flatout.update", 170, 180, is_user_annotation=True)
    last = event("flatout.boundary", 1100, 1100, is_user_annotation=True)
    late = event("aten::late", 1200, 1300)
    events += [matmul, view, replay, *kernels, shown, plain, last, late]
    averages = record._averages(SimpleNamespace(events=lambda: events))  # type: ignore[arg-type]
    assert record._device_seconds(averages) == pytest.approx(700e-6)
    operators = record._operators(averages, 2, 1e-3, on_gpu=True)
    assert [(operator.name, operator.calls) for operator in operators] == [
        ("aten::mm", 0.5),
        ("flatout.forward", 0.5),
        ("aten::view", 0.5),
    ]
    assert [operator.device_seconds for operator in operators] == pytest.approx([250e-6, 100e-6, 0])
    assert [operator.share for operator in operators] == pytest.approx([0.25, 0.1, 0])
    assert [operator.host_seconds for operator in operators] == pytest.approx([8e-6, 10e-6, 2e-6])


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_those_of_the_same_steps_without_it(fused: bool) -> None:
    force = PLAIN | {"fused_optimizer": fused}
    run, twin = make(techniques=force), make(techniques=force)
    state = torch.get_rng_state()
    run.profile(steps=2, warmup=1)
    torch.set_rng_state(state)
    for _, batch in zip(range(7), twin.loader, strict=False):  # 1 warm-up, 2 searched, 2 timed, 2 profiled
        twin.step(batch)
    ours, theirs = snapshot(run.model, run.optimizer), snapshot(twin.model, twin.optimizer)
    for part in ("parameters", "grads", "buffers", "modes", "hooks", "flags", "optimizer", "groups"):
        assert ours[part] == theirs[part], part


def test_a_loop_after_a_profile_starts_at_the_first_batch() -> None:
    run = make(accumulate=2)
    run.profile(steps=2, warmup=1)
    assert [len(batch[0]) for batch in run.loader] == [8] * 8
    assert run.stats.steps == 7


def test_modes_filters_and_methods_are_put_back() -> None:
    def seen() -> tuple[Any, ...]:
        methods = [getattr(Tensor, name) for name in ("cpu", "to", "numpy", "tolist", "__array__")]
        own = {"cpu", "to", "numpy", "tolist"} & vars(Tensor).keys()
        return methods, own, list(warnings.filters), warnings.showwarning, _get_current_dispatch_mode_stack()

    before = seen()
    make().profile(steps=1, warmup=0)
    assert seen() == before

    run = make()
    run.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.profile(steps=1, warmup=0)
    assert seen() == before
    assert not torch.autograd._profiler_enabled()


def test_an_error_in_the_timed_steps_leaves_nothing_on() -> None:
    run = make()
    steps = 0

    def fails_late(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise KeyError

    run.model.register_forward_hook(fails_late)
    with pytest.raises(KeyError):
        run.profile(steps=3, warmup=1)
    assert not torch.autograd._profiler_enabled()
    run.profile(steps=1, warmup=0)


def test_an_error_while_a_loaders_store_is_used_up_ends_the_profiler(capfd: pytest.CaptureFixture[str]) -> None:
    steps = 0

    def fails(batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # one warm-up step, two that search for syncs, and the second of four prefetched batches
            raise KeyError

    with pytest.raises(KeyError):
        profile_run(DataLoader(Samples(), batch_size=8, num_workers=1, prefetch_factor=4), fails, warmup=1)
    make().profile(steps=1, warmup=0)
    assert "Cancelling" not in capfd.readouterr().err


@pytest.mark.parametrize("late", [5, 7])
def test_a_profiler_of_the_loops_own_is_refused(late: int) -> None:
    steps, own = 0, torch.profiler.profile()

    def starts_one(batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == late:  # one warms up, two are searched, two are timed, two are profiled
            own.start()

    with pytest.raises(RuntimeError, match="profiler"):
        profile_run(DataLoader(Samples(), batch_size=8), starts_one, steps=2, warmup=1)
    own.stop()
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="profiler"):
        make().profile(steps=1, warmup=0)
    with torch.profiler.profile() as again:  # the profiler works again
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in again.key_averages())


def test_without_an_optimizer_there_is_nothing_to_step() -> None:
    with pytest.raises(RuntimeError, match="optimizer"):
        flatout.optimize(Net(), [(torch.ones(2, 4), torch.zeros(2))], budget=0, techniques=PLAIN).profile()


@pytest.mark.parametrize(("argument", "value"), [("steps", 0), ("warmup", -1)])
def test_bad_arguments_are_named(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}.* {value}"):
        make().profile(**{argument: value})


class OneEpoch:
    """Loader that can be iterated only once."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.left:
            self.left -= 1
            yield torch.ones(8, 4), torch.zeros(8, dtype=torch.long)


def test_an_empty_loader_is_an_error_and_a_short_one_is_not() -> None:
    step = make().step
    for too_few in (0, 5):
        with pytest.raises(ValueError):  # noqa: PT011
            profile_run(OneEpoch(too_few), step)
    assert len(profile_run(OneEpoch(7), step).steps) == 2


def test_an_epoch_that_ends_is_followed_by_another() -> None:
    run = make(DataLoader(TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long)), batch_size=8))
    assert len(run.profile(steps=4, warmup=0).steps) == 4


def test_a_profile_is_written_as_json_trace_and_page(profile: Profile, tmp_path: Path) -> None:
    text = profile.to_json(tmp_path / "p.json")
    assert json.loads(text) == json.loads((tmp_path / "p.json").read_text())
    assert json.loads(text)["schema"] == 3
    assert json.loads(text)["phases"]["forward"] == profile.phases["forward"]
    profile.to_chrome_trace(tmp_path / "t.json")
    profile.to_chrome_trace(tmp_path / "t.json.gz")
    trace = (tmp_path / "t.json").read_bytes()
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == trace
    assert any(event.get("name") == "flatout.forward" for event in json.loads(trace)["traceEvents"])
    profile.to_html(tmp_path / "p.html")
    root = ET.fromstring((tmp_path / "p.html").read_text(encoding="utf-8"))
    said = "".join(root.itertext()).replace("\u00a0", " ")
    for sentence in profile.advice:
        assert sentence in said
    assert str(profile)
    ET.fromstring(profile._repr_html_())


def test_a_profile_leaves_no_file_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    profile = make().profile(steps=1, warmup=0)
    assert profile.trace
    assert not list(tmp_path.iterdir())


def test_a_profile_without_a_profiled_step_writes_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace"):
        ended_early().to_chrome_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
