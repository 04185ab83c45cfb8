"""Summaries of GPU traces, which are made by hand and need no GPU."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.formatting import clean, share
from flatout.profile import Memory, Profile, Step, gaps, memory_timeline, operators, profile_page
from flatout.profile.profile_data import PHASES
from flatout.profile.profile_text import continued
from flatout.profile.sections import LOOKS, sections
from flatout.profile.summary import summarise
from flatout.profile.trace import BOUNDARY, Trace
from tests.profile.events import AUTOGRAD, COPY_STREAM, STREAM, ProfileRecording, step, summary_of
from tests.profile.profile_sample import sync_bound
from tests.reasons import advice
from tests.renderings.rendered import in_terminal, root_of
from tests.report.drawn import bars as bars_of
from tests.report.drawn import share as share_of


def found(recording: ProfileRecording) -> list[tuple[float, float, str, str, str]]:
    return [(g.start, g.end, g.cause, g.phase, g.where) for g in gaps.gaps(Trace(recording.events))]


def parts(recording: ProfileRecording) -> list[tuple[float, float, str]]:
    return [tuple(span) for span in Trace(recording.events).parts.spans if span.phase != "host_idle"]


def test_an_idle_wait_for_data_is_the_loaders() -> None:
    r = step()
    r.phase("loader_wait", 0, 600)
    r.phase("forward", 610, 700)
    r.kernel(620, 630, 1000)
    assert found(r) == [
        (0, 600, "loader", "loader_wait", ""),
        (600, 610, "own code", "host_idle", ""),
        (610, 630, "launch", "forward", ""),
    ]


def test_a_gap_after_a_sync_is_caused_by_the_sync() -> None:
    r = step()
    r.phase("forward", 0, 100)
    r.kernel(0, 0, 500)
    r.function("train.py(1): <module>", 0, 1000)
    r.function("<built-in method item of Tensor object at 0x7f>", 150, 510, "train.py:12")
    r.host("aten::item", 160, 505)
    r.host("aten::_local_scalar_dense", 165, 504)
    r.kernel(170, 500, 502, name="Memcpy DtoH (Device -> Pageable)", call="cudaMemcpyAsync")
    r.wait(175, 503)
    r.phase("loader_wait", 520, 600)
    r.phase("forward", 640, 700)
    r.kernel(650, 660, 1000)
    assert found(r) == [
        (502, 520, "sync", "host_idle", "train.py:12"),
        (520, 600, "loader", "loader_wait", ""),
        (600, 640, "sync", "host_idle", "train.py:12"),
        (640, 660, "sync", "host_idle", "train.py:12"),
    ]


def test_an_older_trace_without_call_sites_names_the_function() -> None:
    r = step()
    r.kernel(0, 0, 500)
    r.function("train.py(8): log", 140, 520)
    r.function("<built-in method item of Tensor object at 0x7f>", 150, 510)
    r.wait(175, 501)
    r.kernel(650, 660, 1000)
    assert {where for *_, where in found(r)} == {"train.py:8 (log)"}


def test_kernels_that_run_faster_than_they_are_launched_are_launch_bound() -> None:
    r = step(100)
    r.phase("forward", 0, 100)
    for at in range(0, 100, 10):
        r.kernel(at, at + 3, at + 6)
    r.kernel(98, 99, 100)
    causes = found(r)
    assert {cause for _, _, cause, *_ in causes} == {"launch"}
    assert sum(end - start for start, end, *_ in causes) == 100 - 10 * 3 - 1
    (group,) = gaps.grouped(Trace(r.events), gaps.gaps(Trace(r.events)))
    assert (group.count, group.seconds, group.longest) == (11, pytest.approx(69e-6), pytest.approx(7e-6))


def test_work_that_was_queued_waits_for_the_device() -> None:
    r = step()
    r.phase("forward", 0, 50)
    r.host("aten::mm", 10, 20)
    r.kernel(0, 0, 400)
    r.kernel(12, 450, 1000)
    assert found(r) == [(400, 450, "device", "forward", "aten::mm")]


def test_copies_and_other_streams_are_work_too() -> None:
    r = step()
    r.kernel(0, 0, 400)
    r.kernel(10, 300, 700, stream=COPY_STREAM, name="Memcpy HtoD (Pinned -> Device)", call="cudaMemcpyAsync")
    r.kernel(20, 600, 1000)
    assert found(r) == []
    assert gaps.busy(Trace(r.events)) == [(0, 1000)]


def test_a_blocking_copy_is_a_copy() -> None:
    r = step()
    r.phase("h2d", 0, 300)
    r.host("aten::copy_", 5, 295)
    r.kernel(10, 280, 290, stream=STREAM, name="Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", takes=282)
    r.kernel(291, 295, 1000)
    assert found(r)[0] == (0, 280, "copy", "h2d", "")


@pytest.mark.parametrize(("name", "pageable"), [("Device -> Pageable", True), ("Device -> Pinned", False)])
def test_a_copy_to_pageable_memory_waits_and_one_to_pinned_memory_does_not(name: str, pageable: bool) -> None:
    r = step()
    r.kernel(0, 0, 400)
    r.function("<built-in method cpu of Tensor object at 0x7f>", 90, 520, "train.py:7")
    r.kernel(100, 400, 500, name=f"Memcpy DtoH ({name})", call="cudaMemcpyAsync", takes=410)
    r.wait(512, 515)
    r.kernel(600, 605, 1000)
    expected = ("sync", "host_idle", "train.py:7") if pageable else ("own code", "host_idle", "")
    assert found(r) == [(500, 605, *expected)]


def test_a_gap_after_a_blocking_copy_is_caused_by_the_copy() -> None:
    r = step()
    r.phase("h2d", 0, 300)
    r.kernel(10, 0, 290, name="Memcpy HtoD (Pinned -> Device)", call="cudaMemcpyAsync")
    r.wait(20, 295)
    r.phase("forward", 310, 500)
    r.kernel(340, 350, 1000)
    assert {(cause, phase) for _, _, cause, phase, _ in found(r)} == {("copy", "h2d")}


@pytest.mark.parametrize("thread", [AUTOGRAD, 99])
def test_only_waits_of_training_count(thread: int) -> None:
    r = step()
    r.phase("backward", 0, 900)
    r.kernel(0, 0, 400)
    r.host("autograd::engine::evaluate_function: MulBackward0", 50, 420, thread=AUTOGRAD)
    r.host("cudaEventSynchronize", 60, 410, "cuda_runtime", thread)  # from a hook, or from a pinning thread
    r.kernel(650, 660, 1000)
    assert [cause for _, _, cause, *_ in found(r)] == ["sync" if thread == AUTOGRAD else "launch"]


def test_waits_that_the_debug_mode_is_silent_about_are_taken_from_the_trace() -> None:
    r = step()
    r.boundary(2000)
    for at in (100, 1100):
        r.function("train.py(1): <module>", at, at + 50, "")
        r.function("torch/cuda/__init__.py(1): synchronize", at + 1, at + 45, f"{__file__}:1")
        r.wait(at + 5, at + 40, "cudaDeviceSynchronize")
        r.wait(at + 41, at + 42, "cudaStreamSynchronize")
    r.host("cudaEventSynchronize", 200, 210, "cuda_runtime", 99)
    r.wait(300, 310, "cudaEventSynchronize")  # no Python code to name
    profile = summary_of(r)
    (sync,) = profile.syncs
    assert (sync.what, sync.where, sync.per_step) == ("cudaDeviceSynchronize", f"{__file__}:1", 1)
    assert sync.code == Path(__file__).read_text(encoding="utf-8").splitlines()[0]


def test_a_trace_that_lacks_things_gives_less() -> None:
    r = step()
    r.phase("forward", 0, 300)
    r.kernel(10, 20, 500)
    r.events[-1]["args"] = {}  # no correlation
    r.host("cudaLaunchKernel", 30, 35, "cuda_runtime")
    r.kernel(600, 610, 700)
    del r.events[-2]  # the trace lacks the launch
    for args in ({}, {"Device Type": 1, "Device Id": 0}):
        r.memory(5, args)
    r.arrow("s", 20)
    profile = summary_of(r)
    assert profile.device_phases["forward"] == pytest.approx(480e-6)
    assert profile.memory is None
    assert profile.device_busy == pytest.approx(0.57)


def test_a_gpu_trace_without_kernels_is_not_taken_for_a_cpu_trace() -> None:
    r = step()
    r.host("aten::mm", 10, 20)
    r.memory(15, {"Device Type": 1, "Device Id": 0, "Total Allocated": 512})
    profile = summary_of(r)
    assert advice(profile.advice[0]) == {"no-kernels"}
    assert not any("would-wait" in advice(line) for line in (*profile.advice, str(profile)))


def test_time_after_the_last_kernel_is_accounted_for() -> None:
    r = step()
    r.kernel(0, 0, 400)
    assert found(r) == [(400, 1000, "own code", "host_idle", "")]


@pytest.mark.parametrize(("microseconds", "idle"), [(1000, 600), (500, 100), (300, 0)])
def test_idle_time_is_that_of_a_step_without_the_profiler(microseconds: int, idle: int) -> None:
    r = step()
    r.phase("loader_wait", 0, 150)
    r.kernel(0, 150, 550)
    trace = Trace(r.events)
    timed = Step(1e-6 * microseconds, dict.fromkeys(PHASES, 0.0))
    profile = summarise((timed,), trace, profiled=trace.parts.steps(trace.boundaries))
    assert sum(gap.seconds for gap in profile.gaps) == pytest.approx(1e-6 * idle)
    assert profile.device_busy == pytest.approx(1 - idle / microseconds)
    assert [gap.longest for gap in profile.gaps] == pytest.approx([450e-6, 150e-6])  # times that the profiler measured


def test_without_work_on_a_device_there_are_no_gaps() -> None:
    r = step()
    r.host("aten::mm", 10, 20)
    assert found(r) == []


times = st.integers(0, 200)


@given(
    st.lists(st.tuples(times, times, times, st.sampled_from([STREAM, COPY_STREAM]), st.booleans()), max_size=12),
    st.lists(st.tuples(times, times, st.sampled_from(["loader_wait", "h2d", "forward", "backward"])), max_size=6),
    st.lists(st.tuples(times, times), max_size=4),
)
def test_busy_and_gaps_are_all_of_the_steps_and_overlap_nowhere(
    kernels: list[tuple[int, int, int, int, bool]], phases: list[tuple[int, int, str]], waits: list[tuple[int, int]]
) -> None:
    r = ProfileRecording()
    for at in (20, 90, 170):
        r.boundary(at)
    for launched, start, length, stream, known in kernels:
        r.kernel(launched, max(launched, start), max(launched, start) + length, stream=stream)
        if not known:
            r.events[-1]["args"] = {}
    for start, end, name in phases:
        r.phase(name, min(start, end), max(start, end))
    for start, end in waits:
        r.wait(min(start, end), max(start, end))
    trace = Trace(r.events)
    idle = gaps.gaps(trace)
    if not kernels:
        assert idle == []
        return
    pieces = sorted([*gaps.busy(trace), *((gap.start, gap.end) for gap in idle)])
    assert all(start < end for start, end in pieces)
    assert pieces[0][0] == trace.start
    assert pieces[-1][1] == trace.end
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    grouped = gaps.grouped(trace, idle)
    assert sum(group.seconds for group in grouped) * 1e6 * trace.steps == pytest.approx(
        sum(gap.end - gap.start for gap in idle)
    )
    assert all(gap.phase == trace.parts.at(gap.start).phase for gap in idle if gap.cause in ("loader", "launch"))


@given(
    st.lists(
        st.tuples(times, times, st.sampled_from(["loader_wait", "h2d", "forward", "backward", "update"])), max_size=8
    ),
    times,
    times,
)
def test_the_parts_of_a_stretch_are_all_of_it(phases: list[tuple[int, int, str]], one: int, other: int) -> None:
    r = ProfileRecording()
    r.boundary(0)
    r.boundary(200)
    for start, end, name in phases:
        r.phase(name, min(start, end), max(start, end))
    trace = Trace(r.events)
    begin, end = min(one, other), max(one, other)
    parts = list(trace.parts.between(begin, end))
    assert sum(part.end - part.start for part in parts) == end - begin
    for part in parts:
        assert trace.parts.at(part.start).phase == part.phase
        assert trace.parts.at((part.start + part.end) / 2).phase == part.phase


def test_kernels_of_the_backward_threads_belong_to_the_backward() -> None:
    r = step()
    r.phase("forward", 0, 100)
    r.phase("backward", 100, 900)
    r.kernel(10, 20, 120, name="forward_kernel")
    r.kernel(200, 210, 810, name="backward_kernel", thread=AUTOGRAD)
    r.kernel(950, 960, 990, name="own_kernel")
    phases = operators.device_phases(Trace(r.events))
    assert phases["forward"] == pytest.approx(100e-6)
    assert phases["backward"] == pytest.approx(600e-6)
    assert phases["host_idle"] == pytest.approx(30e-6)


def test_an_operator_has_its_own_host_time_its_kernels_and_its_line() -> None:
    r = step()
    r.function("train.py(3): forward", 0, 200)
    r.function("<built-in function conv2d>", 5, 190, "train.py:5")
    r.host("aten::conv2d", 10, 110)
    r.host("aten::cudnn_convolution", 20, 90)
    r.kernel(30, 40, 540, name="conv_kernel")
    r.arrow("s", 20)
    r.arrow("f", 300, AUTOGRAD)
    r.host("autograd::engine::evaluate_function: ConvolutionBackward0", 299, 420, thread=AUTOGRAD)
    r.host("ConvolutionBackward0", 300, 410, thread=AUTOGRAD)
    r.host("aten::convolution_backward", 310, 400, thread=AUTOGRAD)
    r.kernel(320, 600, 900, name="backward_kernel", thread=AUTOGRAD)
    by_name = {operator.name: operator for operator in operators.operators(Trace(r.events))}
    assert by_name["aten::conv2d"].host_seconds == pytest.approx(30e-6)
    assert by_name["aten::conv2d"].device_seconds == 0
    forward, backward = by_name["aten::cudnn_convolution"], by_name["aten::convolution_backward"]
    assert (forward.device_seconds, forward.share) == (pytest.approx(500e-6), pytest.approx(0.5))
    assert (backward.device_seconds, backward.share) == (pytest.approx(300e-6), pytest.approx(0.3))
    assert forward.where == backward.where == "train.py:5"
    assert list(by_name)[:2] == ["aten::cudnn_convolution", "aten::convolution_backward"]
    assert operators.top_kernel(Trace(r.events)) == "conv_kernel"


def test_unmarked_copies_to_the_device_are_found() -> None:
    r = step()
    r.host("aten::to", 10, 200)
    r.host("aten::copy_", 20, 190)
    r.kernel(30, 40, 180, name="Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", takes=155)
    assert parts(r) == [(10, 200, "h2d")]


def test_only_the_copying_itself_is_a_copy() -> None:
    r = step()
    r.host("Torch-Compiled Region: 0/0", 10, 500)
    r.kernel(30, 40, 180, name="Memcpy HtoD (Pageable -> Device)", call="cudaMemcpyAsync", takes=155)
    assert parts(r) == [(30, 185, "h2d")]


def test_preparations_of_an_update_belong_to_the_update() -> None:
    r = step()
    r.function("torch/amp/grad_scaler.py(302): unscale_", 10, 20)
    r.function("torch/nn/utils/clip_grad.py(39): _no_grad_wrapper", 30, 40)
    r.function("torch/amp/grad_scaler.py(375): step", 50, 80)
    r.host("Optimizer.step#AdamW.step", 60, 70, "user_annotation")
    r.function("torch/optim/lr_scheduler.py(162): wrapper", 90, 100)
    r.host("Optimizer.zero_grad#AdamW.zero_grad", 110, 120, "user_annotation")
    r.function("torch/amp/grad_scaler.py(193): scale", 130, 140)
    spans = [(start, end) for start, end, phase in parts(r) if phase == "update"]
    assert spans == [(10, 20), (30, 40), (50, 80), (90, 100), (110, 120)]


def test_a_marked_phase_is_not_inferred_again() -> None:
    r = step()
    r.phase("loader_wait", 0, 50)
    r.phase("update", 700, 800)
    r.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 45, "user_annotation")
    r.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400, 450, "user_annotation")
    r.host("Optimizer.step#AdamW.step", 650, 850, "user_annotation")
    assert parts(r) == [(0, 50, "loader_wait"), (700, 800, "update")]


def test_training_is_distinguished_from_evaluation_without_marks() -> None:
    r = step()
    load = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    r.host(load, 0, 50, "user_annotation")
    r.function("nn.Module: Net_0", 60, 160)
    r.host("aten::addmm", 70, 150)
    r.host("aten::mse_loss", 180, 190)
    r.function("torch/autograd/graph.py(1059): _engine_run_backward", 200, 400)
    r.arrow("s", 70)
    r.arrow("f", 300)
    r.function("nn.Module: Net_0", 250, 290)  # second forward of a checkpoint
    r.host("Optimizer.step#AdamW.step", 400, 500, "user_annotation")
    r.host(load, 510, 600, "user_annotation")  # feeds an evaluation
    r.function("nn.Module: Net_0", 610, 700)
    r.host(load, 710, 720, "user_annotation")  # feeds no step, at the end of an epoch
    r.host(load, 730, 740, "user_annotation")
    assert parts(r) == [
        (0, 50, "loader_wait"),
        (60, 200, "forward"),
        (200, 400, "backward"),
        (400, 500, "update"),
        (710, 720, "loader_wait"),
        (730, 740, "loader_wait"),
    ]


def test_the_gpus_memory_comes_before_the_hosts_and_keeps_its_peak() -> None:
    r = step()
    r.phase("backward", 500, 600)
    for at in range(1, 999):
        for device, index, allocated in ((0, -1, 10**9), (1, 0, 5000 if at == 555 else at)):
            r.memory(at, {"Device Type": device, "Device Id": index, "Total Allocated": allocated})
    seen = memory_timeline.memory(Trace(r.events))
    assert seen is not None
    assert (seen.device, seen.peak, seen.peak_phase) == ("cuda:0", 5000, "backward")
    assert len(seen.timeline) <= 400
    assert max(allocated for _, allocated in seen.timeline) == 5000


def test_a_trace_without_steps_is_refused() -> None:
    r = ProfileRecording()
    r.boundary(3)
    with pytest.raises(ValueError, match=r"\b1\b"):
        Trace(r.events)


def test_advice_begins_with_the_largest_cost_and_omits_free_phases() -> None:
    r = step()
    r.phase("loader_wait", 0, 100)
    r.phase("forward", 100, 150)
    assert list(map(advice, summary_of(r).advice)) == [{"own-code"}, {"data-wait"}]


def test_advice_names_the_slowest_line() -> None:
    r = step()
    r.function("train.py(1): <module>", 0, 1000)
    r.phase("loader_wait", 0, 400)
    r.function("data.py(7): __getitem__", 10, 390)
    r.function("<built-in function sleep>", 20, 380, "data.py:9")
    r.phase("forward", 400, 450)
    r.function("train.py(30): log", 460, 990)
    own_code, data_wait = summary_of(r).advice
    assert (advice(own_code), advice(data_wait)) == ({"own-code"}, {"data-wait"})
    assert "train.py:30 (log)" in own_code
    assert "data.py:7 (__getitem__)" in data_wait
    assert "num_workers=" in data_wait  # the training thread makes the samples


def test_advice_names_no_line_for_samples_of_workers() -> None:
    r = step()
    r.function("train.py(1): <module>", 0, 1000)
    r.phase("loader_wait", 0, 400)
    r.phase("forward", 400, 1000)
    (data_wait,) = summary_of(r).advice
    assert advice(data_wait) == {"data-wait"}
    assert "num_workers=" not in data_wait
    assert "flatout.data.tune" in data_wait


def test_a_summary_names_the_cause_of_gpu_idle_time(tmp_path: Path) -> None:
    profile = sync_bound()
    assert profile.device_busy == pytest.approx(0.525)
    assert profile.gaps[0].cause == "sync"
    assert advice(profile.advice[0]) == {"sync"}
    assert "train<b>" in profile.advice[0]
    assert profile.commands == ("ncu -k gemm train.py",)
    plain = json.loads(profile.to_json())
    assert plain["gaps"][0]["cause"] == "sync"
    assert "trace" not in plain
    with pytest.raises(ValueError, match="trace"):
        profile.to_chrome_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("optimizer", "operator", "expected"),
    [
        ("AdamW", "aten::_foreach_addcdiv_", [{"update", "can-be-fused"}]),
        ("AdamW", "aten::_fused_adamw_", [{"update", "is-fused"}]),
        ("AdamW", "flatout::step_bucket_", [{"update", "is-fused"}]),
        ("LBFGS", "aten::dot", [{"update"}, {"operator"}]),
    ],
)
def test_advice_suggests_fusing_only_for_optimizers_that_can_be_fused(
    optimizer: str, operator: str, expected: list[set[str]]
) -> None:
    r = step()
    r.host(f"Optimizer.step#{optimizer}.step", 0, 900, "user_annotation")
    r.host(operator, 10, 800)
    assert [codes for codes in map(advice, summary_of(r).advice) if codes != {"own-code"}] == expected


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_terminal_shows_every_figure(width: int, ascii_only: bool) -> None:
    profile = sync_bound()
    text = in_terminal(profile, width, ascii_only)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert text.isascii() if ascii_only else "█" in text
    assert profile.verdict in " ".join(text.split())
    wide = in_terminal(profile, 300, ascii_only)
    assert len(list(sections(profile))) == 3
    for cell in (cell for section in sections(profile) for row in section.rows for cell in row):
        assert clean(cell) in wide


def test_a_page_shows_every_figure(tmp_path: Path) -> None:
    profile = sync_bound()
    profile.to_html(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text(encoding="utf-8")
    root = ET.fromstring(page)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "b>"}
    said = "".join(root.itertext()).replace("\u00a0", " ")
    assert profile.verdict in said
    for cell in (cell for section in sections(profile) for row in section.rows for cell in row):
        assert clean(cell) in said
    assert page.count('<rect class="step"') == len(profile.operators)
    assert json.loads(profile.to_json())["verdict"] == profile.verdict
    assert 'train<b>&".py:12' in said
    assert "model.py:3 (forward)" in said
    assert profile.commands[0] in said
    assert BOUNDARY not in said


@pytest.mark.parametrize("render", [partial(in_terminal, width=120), Profile._repr_html_])
def test_environment_and_advice_are_shown_everywhere(render: Callable[[Profile], str]) -> None:
    profile = sync_bound()
    said = " ".join(render(profile).split())
    for key, value in profile.environment.items():
        assert f"{key} {value}" in said
    for sentence in profile.advice:
        assert clean(sentence)[:50] in unescape(said)


def test_the_page_has_its_charts_with_a_legend() -> None:
    profile = sync_bound()
    root = root_of(profile)
    assert sum("aria-label" in element.attrib for element in root.iter()) == 3  # mean, steps, memory
    said = "".join(root.itertext())
    for phase, look in LOOKS.items():
        seconds = profile.phases[phase]
        assert (f"{look.name} {share(seconds / profile.seconds)}" in said) == (seconds > 0)


def numbers(element: ET.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def test_charts_are_drawn_to_scale() -> None:
    profile = sync_bound()
    mean = ET.fromstring(profile_page.mean_chart(profile))
    bars = [(share_of(rect, "x"), share_of(rect, "width")) for rect in bars_of(mean)]
    host = bars[: len(PHASES)]
    assert [x for x, _ in host[1:]] == pytest.approx([x + width for x, width in host[:-1]], abs=0.2)
    assert sum(host[-1]) == pytest.approx(100, abs=0.05)
    assert [width for _, width in bars] == pytest.approx(
        [100 * seconds / profile.seconds for seconds in (*profile.phases.values(), *profile.device_phases.values())],
        abs=0.1,
    )
    for column in ET.fromstring(profile_page.steps_chart(profile.steps)).iter("{http://www.w3.org/2000/svg}g"):
        bars = [numbers(rect, "y", "height") for rect in column if rect.tag.endswith("rect")]
        assert [y + height for y, height in bars[1:]] == pytest.approx([y for y, _ in bars[:-1]], abs=0.02)
        assert bars[-1][0] == pytest.approx(8, abs=0.1)  # equally long steps reach the top
    drawn = profile_page.memory_chart(Memory("cuda:0", ((0.1, 0), (0.2, 100), (0.3, 50)), 100, "forward"), 0.4)
    line = next(
        path for path in ET.fromstring(drawn).iter() if path.attrib.get("class") == "line" and "d" in path.attrib
    )
    assert line.attrib["d"].endswith("L1000.0 65.0")  # half of the peak, to the end


@pytest.mark.parametrize("width", [20, 40, 100])
def test_a_long_command_is_continued_as_a_shell_reads_it(width: int) -> None:
    command = shlex.join(["nsys", "profile", "--trace=cuda,nvtx", "train.py", "--name", "it's a name", "-x" * 20])
    shown = continued(command, width)
    assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)
    assert all(len(line) <= width or len(line.split()) <= 2 or "'" in line for line in shown.splitlines())
    assert ("\n" in shown) == (len(command) > width - 2)
