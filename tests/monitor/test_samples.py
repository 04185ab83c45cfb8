"""Samples as JSON lines, and the sampler with its thread."""

import dataclasses
import errno
import io
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor import GpuSample, JsonLines, Sample, Sampler, read_samples
from tests.helpers import room_for_files
from tests.monitor.fake_nvml import A100, H100
from tests.monitor.monitor_sample import without_gpu

SAFETY = 30  # seconds: a timeout that only a failing test reaches


@given(st.data())
def test_json_lines_give_equal_samples_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    number = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    missing = st.dictionaries(st.text(), st.text())
    gpu = st.builds(
        GpuSample, st.integers(), name=st.none() | st.text(), power_watts=number,
        throttle=st.none() | st.lists(st.text()).map(tuple), missing=missing,
    )  # fmt: skip
    samples = data.draw(
        st.lists(
            st.builds(Sample, st.floats(0, 2e9), st.lists(gpu, max_size=2).map(tuple), st.none() | st.text()),
            max_size=3,
        )
    )
    stream = io.StringIO()
    write = JsonLines(stream)
    for sample in samples:
        write(sample)
    assert stream.getvalue().count("\n") == len(samples)
    path = tmp_path_factory.getbasetemp() / "samples.jsonl"
    path.write_text(stream.getvalue(), encoding="utf-8")
    assert list(read_samples(path)) == samples


def test_a_file_is_continued_and_a_real_sample_comes_back(install, tmp_path: Path) -> None:
    install(boards=(H100, A100))
    path = tmp_path / "run.jsonl"
    taken = []
    for _ in range(2):
        with JsonLines(path) as write:
            sampler = Sampler([write, taken.append])
            sampler.take()
            sampler.take()
            sampler.close()
    assert list(read_samples(path)) == taken
    assert len(taken) == 4
    path.write_text('{"time": 1}\n')
    with pytest.raises(ValueError, match=r"run\.jsonl.* 1 .*'gpus'"):
        list(read_samples(path))


def test_nan_is_refused_and_every_field_names_its_unit() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match=r"nan|JSON compliant"):  # Python's message
        JsonLines(stream)(Sample(float("nan"), (), None))
    assert stream.getvalue() == ""
    units = ("percent", "bytes", "watts", "mhz", "celsius")
    plain = {"index", "cuda_index", "name", "uuid", "throttle", "gpm", "missing"}
    for field in dataclasses.fields(GpuSample):
        assert field.name in plain or field.name.endswith(units)


@pytest.mark.filterwarnings("error")
def test_a_writer_that_fails_is_reported_once_and_the_others_go_on(install) -> None:
    install()
    got: list[Sample] = []

    def broken(sample: Sample) -> None:
        raise OSError("disk full")

    sampler = Sampler([broken, got.append])
    with pytest.warns(UserWarning, match="disk full"):
        sampler.take()
    sampler.take()  # a second warning would be an error
    assert len(got) == 2


@pytest.mark.slow
def test_a_program_that_ends_while_sampling_ends_quietly() -> None:
    code = """
        import threading
        from flatout.monitor import Sampler
        begun = threading.Event()
        Sampler(lambda sample: begun.set(), interval=1e-4).start()
        begun.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=4 * SAFETY, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_disk_that_fills_up_is_an_error_and_not_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as write, room_for_files(5), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(without_gpu())
    assert path.stat().st_size == 5


def test_the_thread_samples_until_closed(install) -> None:
    fake = install()
    enough = threading.Event()
    got: list[Sample] = []

    def write(sample: Sample) -> None:
        got.append(sample)
        if len(got) == 3:
            enough.set()

    with Sampler(write, interval=0.001) as sampler:
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "flatout-monitor")
        assert thread.daemon
        assert enough.wait(SAFETY)
        with pytest.raises(RuntimeError):
            sampler.start()
    assert not thread.is_alive()
    assert fake.open == 0
    sampler.close()
    assert fake.open == 0


def test_closing_waits_for_a_driver_that_hangs_for_a_while(install) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "nvmlDeviceGetPowerUsage":
            inside.set()
            let_go.wait(SAFETY)

    fake = install(before=hang)
    taken: list[Sample] = []
    sampler = Sampler(taken.append)
    sampler.start()
    assert inside.wait(SAFETY)
    closing = threading.Thread(target=sampler.close)
    closing.start()
    let_go.set()
    closing.join(SAFETY)
    assert not closing.is_alive()
    assert (fake.open, len(taken)) == (0, 1)


def _in_child(sampler: Sampler, results) -> None:  # type: ignore[no-untyped-def]
    alive = [thread.name for thread in threading.enumerate()]
    sampler.close()
    own = Sampler()
    sample = own.take()
    own.close()
    results.put((alive.count("flatout-monitor"), sample.gpus[0].name))


def test_a_forked_child_has_no_thread_and_may_sample_for_itself(install) -> None:
    install()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with Sampler(interval=0.01) as sampler:
        child = context.Process(target=_in_child, args=(sampler, results))
        child.start()
        child.join(SAFETY)
    assert child.exitcode == 0
    assert results.get() == (0, H100.name)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf")])
def test_an_interval_must_be_positive(interval: float) -> None:
    with pytest.raises(ValueError, match=f"interval.* {interval}"):
        Sampler(interval=interval)
