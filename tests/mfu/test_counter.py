"""Arithmetic of the step counter on given times. test_phases.py tests the counter on the host's clock."""

from __future__ import annotations

import math
import re
import statistics
import threading
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flatout.mfu
from flatout.mfu import FlopCount, FlopNode, MfuCounter, TensorCores
from flatout.native._host import StepCounter
from tests.mfu.harness import core_of

seconds = st.floats(0, 1e4, allow_subnormal=False)
steps = st.lists(
    st.tuples(
        seconds,  # duration
        st.none() | st.floats(-1e4, 1e4, allow_subnormal=False),  # gap
        seconds,  # waited
        st.integers(0, 10**6),  # samples
        st.integers(0, 10**9),  # tokens
        st.none() | st.floats(0, 1e18),  # flops
        st.none() | st.floats(0, 1e18),  # hardware flops
    ),
    max_size=30,
)


def fed(window: int, fed_steps: Sequence[tuple[Any, ...]], **kwargs: float | None) -> MfuCounter:
    counter = MfuCounter(device="cpu", window=window, **kwargs)  # type: ignore[arg-type]
    for step in fed_steps:
        core_of(counter).add(*step)
    return counter


def period_of(step: tuple[Any, ...]) -> float:
    duration, gap, waited, *_ = step
    return max(0, duration + (waited if gap is None else gap))  # no time counts twice


def stall_of(gap: float | None, waited: float) -> float:
    return waited if gap is None else min(max(gap, 0), waited)


@pytest.mark.filterwarnings("ignore:MFU is")
@given(steps, st.integers(1, 12))
def test_readings_equal_the_plain_python_ones(fed_steps: list[tuple[Any, ...]], window: int) -> None:
    counter = fed(window, fed_steps, peak_flops=1e19)
    for reading, covered, middle in (
        (counter.window, fed_steps[-window:], statistics.median),
        (counter.total, fed_steps, statistics.fmean),
    ):
        period = sum(map(period_of, covered))
        stall = sum(stall_of(step[1], step[2]) for step in covered)
        assert reading.steps == len(covered)
        assert reading.samples == sum(step[3] for step in covered)
        assert reading.tokens == sum(step[4] for step in covered)
        assert reading.seconds == pytest.approx(period)
        if not covered:
            assert reading.step_seconds is None
            continue
        assert reading.step_seconds == pytest.approx(middle([step[0] for step in covered]))
        if period == 0:
            assert reading.samples_per_second is reading.mfu is reading.stall_fraction is None
            continue
        if reading.samples:
            assert reading.samples_per_second == pytest.approx(reading.samples / period)
        if reading.tokens:
            assert reading.tokens_per_second == pytest.approx(reading.tokens / period)
        assert reading.stall_fraction == pytest.approx(stall / period)
        for column, share in ((5, reading.mfu), (6, reading.hfu)):
            known = [step for step in covered if step[column] is not None]
            known_period = sum(map(period_of, known))
            if known_period == 0:
                assert share is None
            elif known_period > 1e-100:  # below, the rate overflows
                assert share == pytest.approx(sum(step[column] for step in known) / known_period / 1e19)


@given(steps)
def test_fractions_stay_within_bounds(fed_steps: list[tuple[Any, ...]]) -> None:
    for reading in (fed(5, fed_steps).window, fed(5, fed_steps).total):
        assert reading.stall_fraction is None or 0 <= reading.stall_fraction <= 1
        assert reading.seconds >= 0


def test_a_wait_that_a_busy_device_did_not_notice_is_no_stall() -> None:
    counter = fed(10, [(1.0, None, 0.0), (1.0, 0.25, 3.0)])
    assert counter.stall_fraction == pytest.approx(0.25 / 2.25)


def test_time_between_steps_counts_but_is_a_stall_only_where_the_loader_was_waited_for() -> None:
    counter = fed(10, [(1.0, None, 0.0, 8), (1.0, 2.0, 0.0, 8)])
    assert counter.stall_fraction == 0
    assert counter.samples_per_second == pytest.approx(4)
    assert counter.step_seconds == 1


def test_an_end_before_its_beginning_counts_as_nothing() -> None:
    counter = fed(10, [(-1e-6, -1e-6, 1.0, 8)])
    assert counter.window.seconds == 0


def test_mfu_is_unknown_without_flops_or_peak() -> None:
    step = (2.0, None, 0.0, 4, 0, 6.0)
    assert fed(10, [step]).mfu is None
    assert fed(10, [(*step[:5], None)], peak_flops=6.0).mfu is None
    assert fed(10, [step], peak_flops=6.0).mfu == 0.5


def test_steps_of_unknown_flops_do_not_dilute_the_others() -> None:
    known, unknown = (1.0, None, 0.0, 1, 0, 3.0), (5.0, None, 0.0, 1, 0, None)
    counter = fed(10, [unknown, known, known])
    assert counter.flops_per_second == 3.0
    assert counter.total.flops_per_second == 3.0


def test_hfu_counts_what_is_computed_again() -> None:
    count = FlopCount(2, 4, 3, 6, FlopNode("", 2, 4, 3, ()), {}, {})
    counter = MfuCounter(count, peak_flops=1e30, device="cpu")
    for flops in (None, count, None):
        with counter.step(flops=flops):
            pass
    assert counter.total.hfu == pytest.approx(counter.total.mfu * 9 / 6)
    assert "HFU" in str(counter.total)
    with counter.step(flops=6.0):  # hardware FLOPs are unknown, so not in HFU
        pass
    assert counter.hfu is not None


class FloatCount(FlopCount):
    def __float__(self) -> float:
        return 1.0


class One:
    def __index__(self) -> int:
        return 1


def test_numbers_of_a_step_may_be_of_any_type() -> None:
    count = FloatCount(2, 4, 3, 6, FlopNode("", 2, 4, 3, ()), {}, {})
    counter = MfuCounter(peak_flops=1e30, device="cpu")
    for samples, tokens, flops in (
        (np.int64(2), torch.tensor(3), np.float32(4)),
        (One(), True, Fraction(1, 2)),
        (np.uint8(1), 0, torch.tensor(5.5)),
        (0, 0, count),  # a FlopCount
    ):
        with counter.step(samples, tokens, flops):
            pass
    total = counter.total
    assert (total.samples, total.tokens) == (4, 4)
    assert total.flops_per_second == pytest.approx((4 + 0.5 + 5.5 + 6) / total.seconds)
    assert total.hfu is not None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"samples": 1.5}, TypeError),
        ({"tokens": "1"}, TypeError),
        ({"samples": 10**30}, OverflowError),
        ({"flops": "1"}, TypeError),
        ({"flops": 1j}, TypeError),
        ({"flops": 10**400}, OverflowError),
        ({"flops": np.float32("nan")}, ValueError),
        ({"flops": SimpleNamespace(total=1)}, AttributeError),
    ],
)
def test_what_is_no_number_is_refused_before_the_step(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        MfuCounter(device="cpu").step(**arguments)


def test_behind_a_bad_argument_no_other_is_read() -> None:
    with pytest.raises(TypeError, match="'str'"):
        StepCounter(1).step("no number", One(), None)  # type: ignore[arg-type]


def test_each_reading_above_one_warns() -> None:
    counter = fed(10, [(1.0, None, 0.0, 1, 0, 2.0)], peak_flops=1.0)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"MFU.* 2\.00.*peak_flops.*\b1 FLOP/s"):
            assert counter.mfu == 2.0


def test_a_watch_reports_the_activity_of_tensor_cores() -> None:
    asked = []
    counter = MfuCounter(device="cpu", tensor_watch=lambda counter: asked.append(counter) or TensorCores(0.8, None))
    assert counter.tensor_cores == TensorCores(0.8, None)
    assert "80.0 %" in repr(counter)
    counter.pause()
    assert asked == [counter] * 3
    assert MfuCounter(device="cpu").tensor_cores is None


def figures(shown: str) -> list[float]:
    return [float(figure.replace(",", "")) for figure in re.findall(r"[\d,]*\d(?:\.\d+)?", shown)]


def test_known_figures_are_shown_in_one_line() -> None:
    counter = fed(10, [(0.0123, None, 0.0002, 64, 640, 1e9)] * 2, peak_flops=1e12)
    assert {name: figures(shown) for name, shown in counter.total.told().items()} == {
        "step_seconds": [12.3],  # ms
        "samples_per_second": [5120],
        "tokens_per_second": [51200],
        "flops_per_second": [0.08],  # TFLOP/s
        "mfu": [8.0],  # %
        "stall_fraction": [1.6],  # %
    }
    assert figures(str(counter.total)) == [2, 12.3, 5120, 51200, 0.08, 8.0, 1.6]
    assert figures(repr(counter)) == figures(str(counter.total))
    assert figures(repr(fed(10, []))) == [0]
    assert figures(repr(fed(10, [(0.5, None, 0.0)]))) == [1, 500, 0]


def test_flops_of_a_step_override_the_general_ones() -> None:
    counter = MfuCounter(flops_per_step=5.0, device="cpu")
    with counter.step(flops=2.0):
        pass
    with counter.step():
        pass
    assert counter.total.flops_per_second == pytest.approx(7.0 / counter.total.seconds)


def test_a_failed_step_is_not_counted() -> None:
    counter = MfuCounter(device="cpu")
    with pytest.raises(KeyError), counter.step(samples=1):
        raise KeyError
    assert counter.steps == 0


def test_reset_forgets_everything() -> None:
    counter = fed(10, [(1.0, None, 0.0, 8, 0, 1.0)])
    counter.waited(1e6)
    counter.reset()
    assert counter.total.steps == 0
    with counter.step(samples=1):
        pass
    assert counter.total.stall_fraction == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"flops_per_step": -1.0}, r"^flops_per_step.* -1.0$"),
        ({"flops_per_step": math.nan}, r"^flops_per_step.* nan$"),
        ({"peak_flops": 0.0}, r"^peak_flops.* 0.0$"),
        ({"window": 0}, r"^window.* 0$"),
        ({"phases_every": -1}, r"^phases_every.* -1$"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MfuCounter(device="cpu", **kwargs)


def test_bad_step_arguments_are_named() -> None:
    counter = MfuCounter(device="cpu")
    with pytest.raises(ValueError, match=r"^samples .*-1$"):
        counter.step(samples=-1)
    with pytest.raises(ValueError, match=r"^tokens .*-2$"):
        counter.step(tokens=-2)
    with pytest.raises(ValueError, match=r"^flops .*inf$"):
        counter.step(flops=math.inf)
    with pytest.raises(ValueError, match=r"^seconds .*-1$"):
        counter.waited(-1)


def test_many_threads_lose_no_step() -> None:
    core, threads, each = StepCounter(50), 8, 2000

    def run() -> None:
        for _ in range(each):
            core.add(0.5, None, 0.5, 3, 0, 1.0)
            core.window()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total = core.total()
    assert (total.steps, total.samples, total.seconds) == (threads * each, 3 * threads * each, threads * each)


def test_concurrent_steps_of_one_counter() -> None:
    counter = MfuCounter(device="cpu")

    def run() -> None:
        for _ in range(500):
            with counter.step(samples=2):
                pass

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (counter.steps, counter.samples) == (2000, 4000)


def test_ranges_nest_and_let_exceptions_pass() -> None:
    with pytest.raises(KeyError), flatout.mfu.nvtx_range("outer"), flatout.mfu.nvtx_range("inner"):
        raise KeyError


def test_ranges_show_in_a_torch_profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with flatout.mfu.nvtx_range("seen"):
            torch.ones(2)
        with pytest.raises(KeyError), flatout.mfu.nvtx_range("left by an exception"):
            raise KeyError
    assert {"seen", "left by an exception"} <= {event.key for event in profile.key_averages()}
