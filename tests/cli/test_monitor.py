"""``flatout monitor``: output and exit status."""

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.monitor import HostSample, Sample, Sampler, read_samples
from flatout.monitor.view import View
from tests.monitor.fake_nvml import A100, H100, MIG, T4, FakeNvml
from tests.monitor.harness import System
from tests.reasons import missing
from tests.renderings.rendered import in_terminal

SAFETY = 60  # seconds: a timeout that only a failing test reaches


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    return System(monkeypatch, tmp_path).nvml()


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """Process that runs until its standard input closes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def drawn(samples: list[Sample], width: int, **options: object) -> str:
    return in_terminal(View(samples), width, **options)


def taken() -> Sample:
    """Take one sample."""
    sampler = Sampler()
    sample = sampler.take()
    sampler.close()
    return sample


def test_once_shows_gpu_host_and_process_without_control_codes(fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--pid", str(os.getpid())]) == 0
    out = capsys.readouterr().out
    for said in ("cuda:0", H100.name, "48 %", "648 of 700 W", "power limit", "RAM"):
        assert said in out
    assert str(os.getpid()) in out.splitlines()[0]
    assert "\x1b" not in out
    assert fake.open == 0
    assert "flatout-monitor" not in {thread.name for thread in threading.enumerate()}


def test_once_without_a_driver_shows_the_reason(fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failures["nvmlInit"] = "DriverNotLoaded"
    assert main(["monitor", "--once"]) == 0
    assert "driver-not-loaded" in missing(" ".join(capsys.readouterr().out.split()))


def test_json_lines_on_standard_output_and_in_a_file(fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--json", "-"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["gpus"][0]["tensor_active_percent"] == 47.8
    path = tmp_path / "run.jsonl"
    assert main(["monitor", "--once", "--json", str(path)]) == 0
    (sample,) = read_samples(path)
    assert sample.gpus[0].gpm == "NVML GPM"
    assert "cuda:0" in capsys.readouterr().out


def test_the_end_of_the_watched_process_is_said_and_ends_the_view(
    fake: FakeNvml, waiting: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psutil")
    looks = []

    def end_in_the_second_look(name: str) -> None:
        if name == "nvmlDeviceGetCount":
            looks.append(name)
            if len(looks) == 2:
                waiting.communicate(b"\n", timeout=SAFETY)

    fake.before = end_in_the_second_look
    assert main(["monitor", "--interval", "0.05", "--pid", str(waiting.pid)]) == 0
    assert str(waiting.pid) in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["--pid", "0"], r"\b0\b"),
        (["--pid", "99999999999"], "99999999999"),
        (["--once", "--json", "/no/such/folder/x"], "--json.*/no/such/folder/x"),
        (["--once", "--json", "/"], "--json.* / "),
    ],
)
def test_an_error_is_one_line(argv: list[str], facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", *argv]) == 1
    err = capsys.readouterr().err
    assert re.search(facts, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_the_interval_is_checked(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["monitor", f"--interval={value}"])
    assert exit_info.value.code == 2
    assert "--interval" in capsys.readouterr().err


def command(argv: list[str], stdout: int, stderr: int) -> int:
    """Run the command in a forked process, which need not import torch. Return the process number."""
    pid = os.fork()
    if pid == 0:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 256)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background jobs
        signal.alarm(SAFETY)
        try:
            status = main(argv)
        except SystemExit as end:
            status = int(str(end.code))
        sys.stderr.flush()
        os._exit(status)
    os.close(stdout)
    os.close(stderr)
    return pid


def everything(file: int) -> bytes:
    """Read a file descriptor until its other end is closed."""
    seen = b""
    with contextlib.suppress(OSError):  # Linux raises if the other end of a terminal is closed
        while more := os.read(file, 65536):
            seen += more
    os.close(file)
    return seen


def test_ctrl_c_ends_the_view_with_130_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], terminal, stderr)
    seen = b""
    while b"RAM" not in seen:
        seen += os.read(master, 65536)
    os.kill(pid, signal.SIGINT)
    seen += everything(master)
    assert everything(errors).count(b"\n") == 1  # no traceback
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1  # the cursor was hidden and is visible again


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    lines, stdout = os.pipe()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--json", "-", "--interval", "0.05"], stdout, stderr)
    assert b'"pid":null' in os.read(lines, 65536)
    os.close(lines)
    assert everything(errors) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_reader_that_leaves_the_view_ends_it_quietly() -> None:
    lines, stdout = os.pipe()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], stdout, stderr)
    assert os.read(lines, 65536)
    os.close(lines)
    assert everything(errors) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--json", "/dev/full"]) == 1
    err = capfd.readouterr().err
    assert re.search(f"/dev/full.*{os.strerror(errno.ENOSPC)}", err)
    assert err.count("\n") == 1


def test_a_terminal_that_cannot_move_its_cursor_gets_views_below_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, terminal = pty.openpty()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], terminal, stderr)
    seen = b""
    while seen.count(b"RAM") < 2:
        seen += os.read(master, 65536)
    os.kill(pid, signal.SIGINT)
    seen += everything(master)
    everything(errors)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"\x1b" not in seen


def test_sigterm_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], terminal, stderr)
    seen = b""
    while b"RAM" not in seen:
        seen += os.read(master, 65536)
    os.kill(pid, signal.SIGTERM)
    seen += everything(master)
    everything(errors)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1


def test_dcgm_is_called_only_on_request(fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.boards = (A100,)
    dcgm = System(monkeypatch, tmp_path).dcgm()
    assert main(["monitor", "--once"]) == 0
    assert dcgm.asked == []
    assert main(["monitor", "--once", "--dcgm"]) == 0
    assert dcgm.asked[0] == "Init"
    assert not dcgm.open


@pytest.mark.parametrize("width", [40, 60, 79, 80, 93, 94, 120, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_width_and_every_terminal_shows_the_figures(fake, width: int, ascii_only: bool) -> None:
    fake.boards = (H100, T4, MIG)
    fake.failures["nvmlDeviceGetTemperature"] = "Unknown"
    sampler = Sampler()
    samples = [sampler.take() for _ in range(3)]
    sampler.close()
    out = drawn(samples, width, ascii_only=ascii_only)
    assert max(map(len, out.splitlines())) <= width
    for said in ("57.0 GiB of 79.6 GiB", "648 of 700 W", "31 W", "1755 of 1980 MHz", "power limit", "93 %"):
        assert out.count(said) >= 1
    assert "heat (driver)" in out


def test_each_local_gpu_has_its_panel_and_its_figures(
    fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.boards = tuple(replace(H100, uuid=f"GPU-{rank}", power=1000 * (100 + rank)) for rank in range(4))
    path = tmp_path / "run.jsonl"
    assert main(["monitor", "--once", "--json", str(path)]) == 0
    titles_and_power = re.findall(r"cuda:\d|\d+ of 700 W", capsys.readouterr().out)
    assert titles_and_power == [text for rank in range(4) for text in (f"cuda:{rank}", f"{100 + rank} of 700 W")]
    (sample,) = read_samples(path)
    assert [(gpu.cuda_index, gpu.power_watts) for gpu in sample.gpus] == [(rank, 100 + rank) for rank in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # torch counts only visible GPUs
    assert [(gpu.index, gpu.cuda_index) for gpu in taken().gpus] == [(3, 0), (1, 1)]


def test_many_gpus_in_a_low_terminal_are_a_line_each(fake) -> None:
    fake.boards = (A100,) * 8
    sample = taken()
    low = drawn([sample], 100, force_terminal=True, height=40)
    tall = drawn([sample], 100, force_terminal=True, height=200)
    assert low.count("cuda:") == tall.count("cuda:") == 8
    assert low.count("\n") < 40 < tall.count("\n")


def test_workers_are_indented_below_their_parent_and_names_cannot_reach_the_terminal(fake) -> None:
    pytest.importorskip("psutil")
    sample = taken()
    root = sample.processes[0]
    child = replace(root, pid=2, parent_pid=root.pid, name="pt_data\x1b[31m_worker", cpu_percent=250.0)
    grandchild = replace(root, pid=3, parent_pid=2, name="[bold]sh")
    out = drawn([replace(sample, processes=(root, child, grandchild))], 80)
    assert re.search(r"^└ pt_data_worker +2 +250 %", out, re.MULTILINE)
    assert re.search(r"^  └ \[bold\]sh +3 ", out, re.MULTILINE)


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_format_character_in_a_name_is_shown_by_number(
    json_lines: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+202E reverses the text after it in a terminal and can disguise a name."""
    system = System(monkeypatch, tmp_path)
    system.psutil("Process", name=lambda process: "python\u202esj")
    system.nvml(boards=(replace(H100, name="H100\u202e08"),))
    assert main(["monitor", "--once", "--pid", str(os.getpid()), *(["--json", "-"] if json_lines else [])]) == 0
    out = capsys.readouterr().out
    assert "\u202e" not in out
    assert r"H100\u202e08" in out
    assert r"python\u202esj" in out
    if json_lines:
        sample = json.loads(out)
        assert (sample["gpus"][0]["name"], sample["processes"][0]["name"]) == ("H100\u202e08", "python\u202esj")


def columns(shown: str) -> int:
    """Return the number of columns of the table of processes."""
    (heading,) = (line for line in shown.splitlines() if re.search(r"\bPID\b", line, re.IGNORECASE))
    return len(re.split("  +", heading.strip()))


def test_private_memory_has_a_column_if_known_and_if_the_terminal_is_wide(fake) -> None:
    pytest.importorskip("psutil")
    sample = taken()
    process = replace(sample.processes[0], uss_bytes=3 * 2**20)
    with_it = drawn([replace(sample, processes=(process,))], 80)
    assert "3.00 MiB" in with_it
    assert "3.00 MiB" not in drawn([replace(sample, processes=(process,))], 40)
    without = drawn([replace(sample, processes=(replace(process, uss_bytes=None),))], 80)
    assert columns(with_it) == columns(without) + 1


def test_the_last_minute_is_drawn_in_wide_terminals(fake) -> None:
    percents = [None] * 4 + [0.0, 0.0, None, 40.0, 60.0, 100.0]
    busy = [Sample(0.0, (), "none", HostSample(1, cpu_percent=percent)) for percent in percents]
    assert "   ▁▃▆ │" in drawn(busy, 130)  # two samples a column: none, none, 0, 40, 80
    assert "▃" not in drawn(busy, 80)
