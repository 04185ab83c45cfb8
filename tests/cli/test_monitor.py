"""``flatout monitor``: what it prints, and how it ends."""

import contextlib
import io
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
from rich.console import Console

from flatout.cli import main
from flatout.monitor import HostSample, Sample, Sampler, read_samples
from flatout.monitor.view import View
from tests.monitor.fake_nvml import A100, H100, MIG, T4, FakeNvml

SAFETY = 60  # seconds, never reached where things work


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its standard input closes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def drawn(samples: list[Sample], width: int, **options: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **options).print(View(samples))  # type: ignore[arg-type]
    return out.getvalue()


def test_once_shows_gpu_host_and_process_without_control_codes(fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--pid", str(os.getpid())]) == 0
    out = capsys.readouterr().out
    for said in ("cuda:0 · NVIDIA H100", "tensor cores", "48 %", "648 of 700 W", "held down by: power limit", "RAM"):
        assert said in out
    assert f"process {os.getpid()}" in out
    assert "\x1b" not in out
    assert fake.open == 0
    assert "flatout-monitor" not in {thread.name for thread in threading.enumerate()}


def test_without_a_gpu_it_says_why(fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failures["nvmlInit"] = "DriverNotLoaded"
    assert main(["monitor", "--once"]) == 0
    out = capsys.readouterr().out
    assert "No GPU is shown: NVML cannot be used: the NVIDIA driver is not loaded" in out
    assert "the whole machine" in out


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
    waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psutil")
    take = Sampler.take

    def take_and_end(self: Sampler) -> Sample:
        sample = take(self)
        if len(self.recent) == 2:
            waiting.communicate(b"\n", timeout=SAFETY)
        return sample

    monkeypatch.setattr(Sampler, "take", take_and_end)
    assert main(["monitor", "--interval", "0.05", "--pid", str(waiting.pid)]) == 0
    assert f"Process {waiting.pid} has ended." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--pid", "0"], "there is none with number 0"),
        (["--pid", "99999999999"], "there is none with number 99999999999"),
        (
            ["--once", "--json", "/no/such/folder/x"],
            "--json must be a file that can be written; /no/such/folder/x is in",
        ),
        (["--once", "--json", "/"], "is a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", *argv]) == 1
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_the_interval_is_checked(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["monitor", f"--interval={value}"])
    assert exit_info.value.code == 2
    assert "--interval" in capsys.readouterr().err


def command(argv: list[str], stdout: int, stderr: int) -> int:
    """The command in a forked process, which saves it importing torch; gives the process's number."""
    pid = os.fork()
    if pid == 0:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 256)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
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
    """What comes until the other end is closed."""
    seen = b""
    with contextlib.suppress(OSError):  # Linux raises where a terminal's other end is closed
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
    assert everything(errors).strip() == b"flatout: interrupted"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1  # the cursor was hidden, and is shown again


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
    assert b"flatout monitor" in os.read(lines, 65536)
    os.close(lines)
    assert everything(errors) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--json", "/dev/full"]) == 1
    assert capfd.readouterr().err == "flatout: cannot write /dev/full: No space left on device\n"


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


def test_dcgm_is_asked_only_where_it_is_wanted(fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.boards = (A100,)
    assert main(["monitor", "--once"]) == 0
    assert "if asked" in capsys.readouterr().out
    assert main(["monitor", "--once", "--dcgm"]) == 0
    assert "if asked" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 60, 79, 80, 93, 94, 120, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_width_and_every_terminal_shows_the_figures(fake, width: int, encoding: str) -> None:
    fake.boards = (H100, T4, MIG)
    fake.failures["nvmlDeviceGetTemperature"] = "Unknown"
    sampler = Sampler()
    samples = [sampler.take() for _ in range(3)]
    sampler.close()
    sink = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=sink, width=width).print(View(samples))
    sink.seek(0)
    out = sink.read()
    assert max(map(len, out.splitlines())) <= width
    for said in ("57.0 GiB of 79.6 GiB", "648 of 700 W", "31 W", "1755 of 1980 MHz", "power limit", "93 %"):
        assert out.count(said) >= 1
    assert "heat (driver)" in out


def test_many_gpus_in_a_low_terminal_are_a_line_each(fake) -> None:
    fake.boards = (A100,) * 8
    sampler = Sampler()
    sample = sampler.take()
    sampler.close()
    low = drawn([sample], 100, force_terminal=True, height=40)
    tall = drawn([sample], 100, force_terminal=True, height=200)
    assert low.count("cuda:") == tall.count("cuda:") == 8
    assert low.count("\n") < 40 < tall.count("\n")


def test_workers_are_indented_below_their_parent_and_names_cannot_reach_the_terminal(fake) -> None:
    pytest.importorskip("psutil")
    sampler = Sampler()
    sample = sampler.take()
    sampler.close()
    root = sample.processes[0]
    child = replace(root, pid=2, parent_pid=root.pid, name="pt_data\x1b[31m_worker", cpu_percent=250.0)
    grandchild = replace(root, pid=3, parent_pid=2, name="[bold]sh")
    out = drawn([replace(sample, processes=(root, child, grandchild))], 80)
    assert re.search(r"^└ pt_data_worker +2 +250 %", out, re.MULTILINE)
    assert re.search(r"^  └ \[bold\]sh +3 ", out, re.MULTILINE)


def test_private_memory_has_a_column_where_it_is_known_and_there_is_room(fake) -> None:
    pytest.importorskip("psutil")
    sampler = Sampler()
    sample = sampler.take()
    sampler.close()
    process = replace(sample.processes[0], uss_bytes=3 * 2**20)
    assert "3.00 MiB" in drawn([replace(sample, processes=(process,))], 80)
    assert "private" not in drawn([replace(sample, processes=(process,))], 40)
    assert "private" not in drawn([replace(sample, processes=(replace(process, uss_bytes=None),))], 80)


def test_the_last_minute_is_drawn_where_there_is_room(fake) -> None:
    percents = [None] * 4 + [0.0, 0.0, None, 40.0, 60.0, 100.0]
    busy = [Sample(0.0, (), "none", HostSample(1, cpu_percent=percent)) for percent in percents]
    assert "   ▁▃▆ │" in drawn(busy, 130)  # two samples a column: none, none, 0, 40, 80
    assert "▃" not in drawn(busy, 80)
