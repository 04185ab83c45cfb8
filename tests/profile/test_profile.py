"""run.profile: locates delays and syncs, and does not disturb training."""

from __future__ import annotations

import gzip
import json
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatout
from flatout.profile import Profile, profile_run
from flatout.profile.places import code_at
from flatout.profile.profile_data import PHASES, Step
from flatout.profile.record import SEARCHED_STEPS
from flatout.profile.trace import Trace
from tests.helpers import snapshot
from tests.profile.events import marked
from tests.reasons import advice

PLAIN = {"compile": False, "precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}


def mark(*_: Any) -> None:
    """Leave a marker in the trace: a call that no other code makes, and that takes no time."""
    time.sleep(0)


class Samples(Dataset[tuple[Tensor, int]]):
    def __init__(self, marked: bool = False) -> None:
        self.marked = marked

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.marked:
            mark()
        return torch.full((4,), float(index)), index % 2


class Net(nn.Module):
    """Network of two layers. If ``marked``, forward leaves a marker. If ``looks``, forward waits for the device."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.marked = marked
        self.looks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.marked:
            mark()
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
    assert profile.device_phases == {}
    assert profile.gaps == ()
    assert profile.device_busy is None


def test_the_old_name_of_the_time_without_the_profiler_warns(profile: Profile) -> None:
    with pytest.warns(DeprecationWarning, match=r"Profile\.seconds"):
        assert profile.unprofiled_seconds == profile.seconds


def marked_parts(profile: Profile) -> set[str]:
    assert profile.trace is not None
    return marked(Trace.read(profile.trace.path))


def marking(phase: str) -> flatout.Run:
    if phase == "loader_wait":
        return make(DataLoader(Samples(marked=True), batch_size=8))
    if phase == "forward":
        return make(model=Net(marked=True))
    run = make()
    if phase == "backward":
        run.model.first.weight.register_hook(mark)  # type: ignore[union-attr]
    else:
        assert run.optimizer is not None
        run.optimizer.register_step_post_hook(mark)
    return run


@pytest.mark.parametrize("phase", ["loader_wait", "forward", "backward", "update"])
def test_a_call_is_found_in_its_phase(phase: str) -> None:
    assert marked_parts(marking(phase).profile(steps=2, warmup=1)) == {phase}


def test_a_call_between_steps_is_host_idle_time() -> None:
    run = make()

    def step_and_mark(batch: Any) -> None:
        run.step(batch)
        mark()

    assert marked_parts(profile_run(run.loader, step_and_mark, steps=2, warmup=1)) == {"host_idle"}


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
    places = {operator.where for operator in profile.operators} - {""}
    assert [code_at(place) for place in places if "torch.full" not in code_at(place)] == []  # of the samples
    assert "would-wait" not in {code for sentence in profile.advice for code in advice(sentence)}


def test_operators_are_ranked_and_placed(profile: Profile) -> None:
    shares = [operator.share for operator in profile.operators]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1.001
    linear = next(operator for operator in profile.operators if operator.name == "aten::addmm")
    assert linear.calls == 2
    assert "test_profile.py:" in linear.where


def test_memory_has_a_peak_and_a_phase(profile: Profile) -> None:
    memory = profile.memory
    assert memory is not None
    assert memory.device == "cpu"
    assert memory.peak == max(allocated for _, allocated in memory.timeline)
    assert memory.peak_phase in PHASES
    times = [seconds for seconds, _ in memory.timeline]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1]


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


def test_a_profiler_of_the_loops_own_is_refused_before_it_ends_the_process() -> None:
    steps = 0

    def starts_one(batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            torch.profiler.profile().start()

    with pytest.raises(RuntimeError, match="profiler"):
        profile_run(DataLoader(Samples(), batch_size=8), starts_one, warmup=1)
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="profiler"):
        make().profile(steps=1, warmup=0)
    with torch.profiler.profile() as own:  # the profiler works again
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in own.key_averages())


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
    assert json.loads(text)["schema"] == 2
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


def test_the_trace_file_is_deleted_with_its_profile() -> None:
    profile = make().profile(steps=1, warmup=0)
    assert profile.trace is not None
    path = profile.trace.path
    assert path.exists()
    del profile
    assert not path.exists()
