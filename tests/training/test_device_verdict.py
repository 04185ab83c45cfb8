"""Remedies of a verdict, which are the techniques that a report leaves to try."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch import nn

import flatout
from flatout.mfu import MfuCounter, Phases, TensorCores, peaks
from flatout.mfu.flop_count import CountedWork
from flatout.mfu.verdict import DENSE, Bottleneck, Verdict, judge
from flatout.report import Row, Status
from flatout.report.model import argument_of, untried
from flatout.techniques import REGISTRY
from flatout.training.device_verdict import REMEDIES, TensorWatch, judged, tensor_watch, with_remedies
from flatout.training.step_flops import Peak, peak_of
from flatout.tuning.arguments import choices_of
from tests.clock import Clock, simulated_time
from tests.mfu.harness import core_of, forgotten_warnings
from tests.mfu.test_verdict import phases
from tests.monitor.fake_nvml import A100, H100
from tests.monitor.harness import System

STATUSES: tuple[Status, ...] = get_args(Status)
TITLES = {technique.name: technique.title for technique in REGISTRY}
SITUATIONS = {
    "loader": {"phases": phases(loader_wait=1.0)},
    "copy": {"phases": phases(h2d=1.0)},
    "own code": {"phases": phases(host_idle=1.0)},
    "clocks": {"throttle": ("power limit",)},
    "launch": {"utilization": 0.5},
    "kernels": {"utilization": 0.99},
}


def row(technique: str, status: Status) -> Row:
    return Row(technique, None, TITLES[technique], status, "")


def names_of(technique: str) -> set[str]:
    """Return the names of a technique in sentences: title, name as code, and common name."""
    called = {"batch_size": "larger batches", "precision": "lower precision", "compile": "fusion"}
    names = {TITLES[technique], f"'{technique}'", f"{technique}=", called.get(technique, TITLES[technique])}
    return {name.lower() for name in names}


NAMES = {technique: names_of(technique) for technique in TITLES}


def named_in(sentences: str) -> set[str]:
    """Return the techniques that a text names."""
    text = sentences.lower()
    return {technique for technique, names in NAMES.items() if any(name in text for name in names)}


@pytest.mark.parametrize("bottleneck", SITUATIONS)
def test_no_sentence_names_a_decided_technique(bottleneck: Bottleneck) -> None:
    verdict = judge(0.1, "the peak", DENSE, **SITUATIONS[bottleneck])
    assert verdict.bottleneck == bottleneck
    techniques = REMEDIES.get(bottleneck, ())
    others = [row(name, "kept") for name in TITLES if name not in techniques]
    for statuses in product(("kept", "rejected", "not tried", "not applicable"), repeat=len(techniques)):
        decided = dict(zip(techniques, statuses, strict=True))
        said = str(with_remedies(verdict, [row(*item) for item in decided.items()] + others))
        assert named_in(said) == {name for name, status in decided.items() if status == "not tried"}


def test_a_verdict_without_rows_names_the_limit_and_stops() -> None:
    verdict = judge(0.1, "the peak", DENSE)
    assert with_remedies(verdict, ()) == verdict
    assert str(verdict).endswith("kernels.")


def test_every_remedy_is_a_technique_with_an_argument_that_optimize_takes() -> None:
    named = {name for techniques in REMEDIES.values() for name in techniques}
    assert named <= TITLES.keys()
    for name in named:
        (keyword,) = ast.parse(f"optimize({argument_of(name)})", mode="eval").body.keywords  # type: ignore[attr-defined]
        value = ast.literal_eval(keyword.value)
        if keyword.arg == "batch_size":
            assert (name, value) == ("batch_size", "auto")
            continue
        given: Mapping[str, object] = {"techniques": None, "precision": "auto"} | {keyword.arg: value}
        assert name in choices_of(**given).values  # type: ignore[arg-type]
        technique = next(technique for technique in REGISTRY if technique.name == name)
        assert technique.accepts(choices_of(**given).values[name])  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize("status", STATUSES)
def test_only_untried_techniques_are_left(status: Status) -> None:
    assert bool(untried([row("compile", status)], ["compile"])) == (status == "not tried")


def test_forbidden_techniques_are_not_left_to_try() -> None:
    assert untried([replace(row("compile", "not tried"), left_out=True)], ["compile"]) == []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 4
    arguments = (model, batches, optimizer, nn.functional.mse_loss)
    run = flatout.optimize(*arguments, budget=0, techniques={"compile": False})
    assert {row.technique for row in run.report.rows if row.left_out} == {"compile"}
    assert flatout.Report.from_json(run.report.to_json()).row("compile").left_out
    run.undo()
    planned = flatout.optimize(*arguments, plan=flatout.Plan(decisions={}, fingerprint=run.plan.fingerprint))
    assert planned.report.row("compile").left_out
    assert untried(planned.report.rows, chain(*REMEDIES.values())) == []


def test_remedies_come_in_their_order_with_the_titles_of_their_rows() -> None:
    rows = [row("compile", "not tried"), row("precision", "not tried"), row("tf32", "rejected")]
    assert untried(rows, ("precision", "tf32", "compile", "no_such_row")) == [
        "mixed precision (precision='bf16')",
        "torch.compile (techniques={'compile': True})",
    ]


def test_the_verdict_of_a_run_names_the_techniques_that_are_left() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 4
    run = flatout.optimize(model, batches, optimizer, nn.functional.mse_loss, budget=0)
    run.fit(1, progress=False)
    left = [row.technique for row in run.report.rows if row.status == "not tried"]
    assert left
    verdict: Verdict = run.verdict
    assert list(verdict.remedies) == untried(run.report.rows, REMEDIES.get(verdict.bottleneck, ()))


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def train(counter: MfuCounter, clock: Clock, *work: float | None) -> None:
    """Train for four seconds with these FLOPs, and these FLOPs of the hardware, in each second."""
    for _ in range(4):
        core_of(counter).add(1.0, None, 0.0, 1, 0, *work)
        clock.advance(1.0)


def test_activity_of_tensor_cores_stands_beside_the_flops_of_the_same_time(system: System) -> None:
    nvml = system.nvml(boards=(H100,))
    with simulated_time(tick=0.0) as clock:
        counter = MfuCounter(peak_flops=10.0, device="cpu", tensor_watch=TensorWatch(torch.device("cuda", 0)))
        clock.advance(5.0)
        counter.pause()  # the time before the first epoch
        assert counter.tensor_cores is None
        train(counter, clock, 4.0, 6.0)
        seen = counter.tensor_cores
        assert seen == TensorCores(0.478, pytest.approx(0.6))
        nvml.metrics[nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL] = (0, 20.0)
        clock.advance(1.0)  # an evaluation, which is not counted
        assert counter.tensor_cores == seen
        train(counter, clock, 2.0, 3.0)
        assert counter.tensor_cores == TensorCores(0.2, pytest.approx(0.3))
        clock.advance(0.1)
        core_of(counter).add(0.1, None, 0.0, 1, 0, 0.0, 0.0)
        assert counter.tensor_cores == TensorCores(0.2, pytest.approx(0.3))  # the time is too short


@pytest.mark.parametrize(("work", "needed"), [((4.0, None), 0.4), ((None, None), None)])
def test_flops_of_the_hardware_may_be_unknown(system: System, work: tuple[float | None, None], needed: float) -> None:
    system.nvml(boards=(H100,))
    with simulated_time(tick=0.0) as clock:
        counter = MfuCounter(peak_flops=10.0, device="cpu", tensor_watch=TensorWatch(torch.device("cuda", 0)))
        train(counter, clock, *work)
        assert counter.tensor_cores == TensorCores(0.478, needed and pytest.approx(needed))


def test_a_watch_releases_nvml(system: System) -> None:
    nvml = system.nvml(boards=(H100,))
    watch = TensorWatch(torch.device("cuda", 0))
    assert nvml.open == 1
    del watch
    gc.collect()
    assert (nvml.open, nvml.gpm_samples) == (0, set())


def test_a_gpu_without_gpm_is_asked_once(system: System) -> None:
    nvml, asked = system.nvml(boards=(A100,)), []
    with simulated_time(tick=0.0) as clock:
        counter = MfuCounter(device="cpu", tensor_watch=TensorWatch(torch.device("cuda", 0)))
        nvml.before = asked.append
        train(counter, clock, 1.0, 1.0)
        assert counter.tensor_cores is None
    assert asked == []


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Simulate an H100 whose fastest product of bfloat16 was measured."""
    name = "NVIDIA H100 80GB HBM3"
    properties = SimpleNamespace(name=name, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    key = f"{name} | bfloat16 | torch {torch.__version__}"
    with mock.patch.dict(peaks._measured, {key: 8e14}), forgotten_warnings():
        yield torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        (torch.bfloat16, Peak(989.4e12, "the data sheet's peak in bf16", 8e14, on_tensor_cores=True)),
        (torch.float16, Peak(989.4e12, "the data sheet's peak in fp16", None, on_tensor_cores=True)),
        (torch.float32, Peak(66.9e12, "the data sheet's peak in fp32", None, on_tensor_cores=False)),
    ],
)
def test_the_peak_of_a_gpu_has_a_measured_peak_beside_it(h100: torch.device, dtype: torch.dtype, peak: Peak) -> None:
    spec: Any = SimpleNamespace(model=nn.Linear(2, 2, dtype=dtype), device=h100)
    found = peak_of(spec, CountedWork(lambda: None))
    assert found == peak._replace(flops=pytest.approx(peak.flops))


def test_a_product_in_float32_is_no_measure_of_convolutions_in_tf32(h100: torch.device) -> None:
    peaks._measured["NVIDIA H100 80GB HBM3 | float32 | torch " + torch.__version__] = 5e13
    spec: Any = SimpleNamespace(model=nn.Conv2d(3, 8, 3), device=h100)
    assert peak_of(spec, CountedWork(lambda: None)).measured == 5e13
    work: Any = SimpleNamespace(counts=[SimpleNamespace(by_op={"aten::convolution": 1})])
    found = peak_of(spec, work)
    assert found == Peak(pytest.approx(494.7e12), "the data sheet's peak in tf32", None, on_tensor_cores=True)


def test_a_verdict_on_a_gpu_has_both_peaks_and_the_activity(h100: torch.device, system: System) -> None:
    system.nvml(boards=(H100,))
    spec = SimpleNamespace(model=nn.Linear(2, 2, dtype=torch.bfloat16), device=h100)
    job: Any = SimpleNamespace(spec=spec, work=CountedWork(lambda: None))
    verdict = judged(job, 0.4, (), TensorCores(0.5, 0.4), stall_fraction=0.3)
    assert verdict.of_measured == pytest.approx(0.4 * 989.4 / 800)
    assert (verdict.peak, verdict.utilization) == ("the data sheet's peak in bf16", 0.98)
    assert (verdict.bottleneck, verdict.tensor_cores) == ("loader", TensorCores(0.5, 0.4))
    assert isinstance(tensor_watch(job), TensorWatch)
    spec.model = nn.Linear(2, 2)
    assert not isinstance(tensor_watch(job), TensorWatch)


def test_phases_decide_before_the_stall_of_a_window() -> None:
    spent = Phases(loader_wait=0.0, h2d=0.0, forward=1.0, backward=0.0, update=0.0, host_idle=0.0)
    assert judge(0.1, "the peak", DENSE, stall_fraction=0.9, phases=spent).bottleneck == "kernels"
