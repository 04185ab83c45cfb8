"""Samples as JSON lines, sampler and its thread, host and processes."""

import collections
import contextlib
import dataclasses
import errno
import io
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor import GpuSample, HostSample, JsonLines, ProcessSample, Sample, Sampler, host, read_samples
from tests.helpers import in_child, room_for_files
from tests.monitor.fake_nvml import A100, H100
from tests.monitor.harness import System, remembers
from tests.reasons import missing

SAFETY = 30  # seconds: a timeout that only a failing test reaches


@given(st.data())
def test_json_lines_give_equal_samples_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    number = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    missing = st.dictionaries(st.text(), st.text())
    gpu = st.builds(
        GpuSample, st.integers(), name=st.none() | st.text(), power_watts=number,
        throttle=st.none() | st.lists(st.text()).map(tuple), missing=missing,
    )  # fmt: skip
    whole = st.builds(
        HostSample, st.integers(), number, st.none() | st.lists(st.floats(0, 100)).map(tuple), missing=missing
    )
    process = st.builds(
        ProcessSample, st.integers(), st.none() | st.integers(), st.text(), number, st.none(), st.integers()
    )
    samples = data.draw(
        st.lists(
            st.builds(
                Sample, st.floats(0, 2e9), st.lists(gpu, max_size=2).map(tuple), st.none() | st.text(), whole,
                st.none() | st.integers(), st.booleans(), st.lists(process, max_size=2).map(tuple),
            ),
            max_size=3,
        )
    )  # fmt: skip
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
    with pytest.raises(ValueError, match=r"run\.jsonl.* 1 .*'host'"):
        list(read_samples(path))


def test_nan_is_refused_and_every_field_names_its_unit() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match=r"nan|JSON compliant"):  # Python's message
        JsonLines(stream)(Sample(float("nan"), (), None, HostSample(1)))
    assert stream.getvalue() == ""
    units = ("percent", "bytes", "bytes_per_second", "watts", "mhz", "celsius")
    plain = {
        "index",
        "cuda_index",
        "name",
        "uuid",
        "mig",
        "throttle",
        "gpm",
        "missing",
        "cores",
        "load",
        "pid",
        "parent_pid",
    }
    for kind in (GpuSample, HostSample, ProcessSample):
        for field in dataclasses.fields(kind):
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
    sampler.take()
    assert got == list(sampler.recent)
    assert len(got) == 3


def test_a_warning_that_is_an_error_ends_neither_the_sampling_nor_the_other_writers(install) -> None:
    install()
    enough = threading.Event()
    got: list[Sample] = []
    raised: list[type[BaseException]] = []

    def broken(sample: Sample) -> None:
        raise OSError("disk full")

    def write(sample: Sample) -> None:
        got.append(sample)
        if len(got) == 3:
            enough.set()

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
        with Sampler([broken, write], interval=0.001) as sampler:
            assert enough.wait(SAFETY)
    assert got[:3] == list(sampler.recent)[:3]
    assert raised == [UserWarning]


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
        write(Sample(1.0, (), None, HostSample(1)))
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
    sampler = Sampler()
    sampler.start()
    assert inside.wait(SAFETY)
    closing = threading.Thread(target=sampler.close)
    closing.start()
    let_go.set()
    closing.join(SAFETY)
    assert not closing.is_alive()
    assert (fake.open, len(sampler.recent)) == (0, 1)


def _in_child(sampler: Sampler, results) -> None:  # type: ignore[no-untyped-def]
    alive = [thread.name for thread in threading.enumerate()]
    sampler.close()
    own = Sampler()
    sample = own.take()
    own.close()
    results.put((alive.count("flatout-monitor"), sample.pid == os.getpid(), sample.gpus[0].name))


def test_a_forked_child_has_no_thread_and_may_sample_for_itself(install) -> None:
    install()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with Sampler(interval=0.01) as sampler:
        child = context.Process(target=_in_child, args=(sampler, results))
        child.start()
        child.join(SAFETY)
    assert child.exitcode == 0
    assert results.get() == (0, True, H100.name)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf")])
def test_an_interval_must_be_positive(interval: float) -> None:
    with pytest.raises(ValueError, match=f"interval.* {interval}"):
        Sampler(interval=interval)


def test_the_watched_process_its_workers_and_its_end() -> None:
    pytest.importorskip("psutil")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sampler = Sampler(pid=process.pid)
        first, second = sampler.take(), sampler.take()
        process.communicate(b"\n", timeout=SAFETY)
        last = sampler.take()
    parent, worker = first.processes
    assert (parent.pid, worker.parent_pid) == (process.pid, process.pid)
    assert parent.rss_bytes > 0
    assert parent.cpu_percent is None
    assert second.processes[0].cpu_percent is not None
    assert second.processes[0].cpu_percent >= 0
    assert (first.pid_ended, last.pid_ended, last.processes) == (False, True, ())


def test_cuda_visible_devices_is_the_watched_process_s(install) -> None:
    install(boards=(A100, A100))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        (gpu,) = Sampler(pid=process.pid).take().gpus
        process.communicate(b"\n", timeout=SAFETY)
    assert (gpu.index, gpu.cuda_index) == (1, 0)


def test_without_psutil_memory_is_known_and_the_rest_has_a_reason(system: System) -> None:
    system.without("psutil")
    sampler = Sampler()
    sampler.take()
    sample = sampler.take()
    assert sample.host.ram_used_bytes + sample.host.ram_available_bytes == sample.host.ram_total_bytes
    for name in ("cpu_percent", "swap_used_bytes"):
        assert missing(sample.host.missing[name]) == {"psutil-not-installed"}
    assert (sample.processes, sample.pid_ended) == ((), False)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sampling_continues_without_free_file_descriptors() -> None:
    """psutil does not convert the system's own errors for a training without free file descriptors."""
    pytest.importorskip("psutil")

    def work() -> None:
        sampler, whole = Sampler(), Sampler(pid="all")
        sampler.take()
        next_file = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file + 1, next_file + 1))
        sample = sampler.take()
        assert not sample.pid_ended
        assert sample.processes == whole.take().processes == ()
        assert os.strerror(errno.EMFILE) in sample.host.missing["cpu_percent"]

    assert in_child(work) == 0


def test_a_process_that_is_hidden_has_not_ended(system: System) -> None:
    def hidden(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    psutil = system.psutil(Process=hidden)  # like a process of another user, under /proc with hidepid
    assert host.Processes(os.getpid()).sample() == ((), False)
    assert host.Processes(2**22 + 1).sample() == ((), True)


def test_a_process_that_may_not_be_read_has_not_ended(system: System) -> None:
    def denied(self: object, *args: object, **kwargs: object) -> None:
        raise psutil.AccessDenied

    psutil = pytest.importorskip("psutil")
    processes = host.Processes(os.getpid())
    system.psutil("Process", status=denied, children=denied, create_time=denied)
    assert processes.sample() == ((), False)


def test_a_zombie_has_ended() -> None:
    pytest.importorskip("psutil")
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        processes = host.Processes(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert host.exists(process.pid)
        assert processes.sample() == ((), True)


def test_processes_that_ended_are_forgotten() -> None:
    pytest.importorskip("psutil")
    processes = host.Processes(os.getpid())
    children = []
    for _ in range(3):
        with subprocess.Popen(["sleep", "60"]) as child:
            seen = {process.pid for process in processes.sample()[0]}
            kept = remembers(processes, child.pid)
            child.kill()
        assert child.pid in seen
        assert kept
        children.append(child.pid)
    processes.sample()
    assert not [pid for pid in children if remembers(processes, pid)]


VERSION_2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}


def test_a_containers_limits_replace_the_machines(system: System) -> None:
    pytest.importorskip("psutil")
    clock = system.clock()
    system.cpus(0, 1)
    memory = {"sys/fs/cgroup/memory.max": str(2**20), "sys/fs/cgroup/memory.current": str(2**19)}
    system.files({**VERSION_2, **memory, "sys/fs/cgroup/cpu.stat": "usage_usec 1000000"})
    looker = host.Host()
    looker.sample()
    clock.advance(2.0)
    system.files({"sys/fs/cgroup/cpu.stat": "usage_usec 1600000"})
    found = looker.sample()
    assert found.ram_total_bytes == 2**20
    assert found.ram_available_bytes == found.ram_used_bytes == 2**19
    assert found.cpu_percent == pytest.approx(60.0)  # 0.6 s in 2 s of half a core
    assert found.cores == 1


@pytest.mark.parametrize("accounts", ["cpu/a", "cpuacct/a"])
def test_cpu_time_of_the_first_version_of_control_groups(system: System, accounts: str) -> None:
    pytest.importorskip("psutil")
    clock = system.clock()
    system.cpus(0, 1)
    system.files(
        {
            "proc/self/cgroup": "2:cpuacct:/a\n1:cpu:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpuacct/cpuacct.usage": "9\n",
            "sys/fs/cgroup/cpuacct/a/tasks": "",
        }
    )
    usage = f"sys/fs/cgroup/{accounts}/cpuacct.usage"
    looker = host.Host()
    for nanoseconds in (1_500_000_000, 2_100_000_000):
        system.files({usage: f"{nanoseconds}\n"})
        found = looker.sample()
        clock.advance(2.0)
    assert found.cpu_percent == pytest.approx(60.0)
    system.files({usage: ""})
    assert missing(looker.sample().missing["cpu_percent"]) == {"container-silent"}


def test_only_the_cpus_that_may_be_used_count_and_waiting_for_a_disk_is_idle(system: System) -> None:
    times = collections.namedtuple("times", "user nice system idle iowait irq softirq steal guest guest_nice")
    looks = iter(
        [
            [times(*[0.0] * 10), times(*[0.0] * 10)],
            [times(4.0, *[0.0] * 9), times(0.5, 0.0, 0.5, 2.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0)],  # guests are in user
        ]
    )
    system.psutil(cpu_times=lambda percpu: next(looks))
    system.cpus(1)
    system.files({})  # no limits of a container
    clock = system.clock()
    looker = host.Host()
    assert looker.sample().cpu_percent is None
    clock.advance(4.0)
    found = looker.sample()
    assert found.per_cpu_percent == (25.0,)
    assert found.cpu_percent == 25.0


def test_rates_survive_counters_that_restart() -> None:
    rates = host.CounterRates()
    looks = [(100.0, 1.0), (300.0, 3.0), (50.0, 4.0), (50.0, 4.0), (60.0, 5.0)]
    assert [rates.per_second("x", *look) for look in looks] == [None, 100.0, None, None, 10.0]


def test_each_sample_reads_the_private_memory_of_at_most_one_process(system: System) -> None:
    """A reading walks all pages of a process, so the monitor spends only 1 % of the time on readings."""
    pytest.importorskip("psutil")
    asked: list[int] = []
    clock = system.clock()

    def costly(pid: int) -> int:
        asked.append(pid)
        clock.advance(1.0)
        return len(asked)

    system.private_memory(costly)
    with family() as (root, child):
        processes = host.Processes(root)
        for _ in range(2):
            found, _ = processes.sample()
        assert asked == [root]
        assert {one.pid: one.uss_bytes for one in found} == {root: 1, child: None}
        for _ in range(3):
            clock.advance(100.0)
            found, _ = processes.sample()
    assert asked == [root, child, root, child]
    assert {one.pid: one.uss_bytes for one in found} == {root: 3, child: 4}


@contextlib.contextmanager
def family() -> Iterator[tuple[int, int]]:
    """Start a process with a child. Kill both at the end of the block."""
    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as root:
        assert root.stdout is not None
        try:
            yield root.pid, int(root.stdout.readline())
        finally:
            os.killpg(root.pid, signal.SIGKILL)


def test_the_kernels_own_threads_are_left_out() -> None:
    processes, ended = host.Processes(None).sample()
    assert not ended
    assert processes
    assert all(one.rss_bytes for one in processes)


PIDS = {
    "own": (os.getpid(), True),
    "init": (1, True),
    "0": (0, False),
    "-1": (-1, False),
    "too large": (2**40, False),
}


@pytest.mark.parametrize(("pid", "there"), PIDS.values(), ids=PIDS)
def test_processes_exist_or_do_not(pid: int, there: bool) -> None:
    assert host.exists(pid) == there
