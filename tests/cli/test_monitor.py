"""``flatout monitor``: output and exit status."""

import contextlib
import errno
import json
import os
import pty
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.cli.monitor import table
from flatout.monitor import Sample, Sampler, read_samples
from tests.monitor.fake_nvml import H100, MIG, T4, FakeNvml
from tests.monitor.harness import System
from tests.reasons import missing
from tests.renderings.rendered import in_terminal

SAFETY = 60  # seconds: a timeout that only a failing test reaches


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setenv("COLUMNS", "140")  # wide enough for one line per GPU
    return System(monkeypatch).nvml()


def taken() -> Sample:
    """Return a second sample, which has the activity of tensor cores."""
    sampler = Sampler()
    sampler.take()
    sample = sampler.take()
    sampler.close()
    return sample


def test_once_shows_the_gpu_without_control_codes(fake, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["monitor", "--once"]) == 0
    out = capsys.readouterr().out
    for said in (H100.name, "cuda:0", "48 %", "57.0 GiB of 79.6 GiB", "648 of 700 W"):
        assert said in out
    assert "\x1b" not in out
    assert fake.open == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert "flatout-monitor" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("options", [[], ["--once"], ["--json", "-"]])
def test_without_a_driver_the_reason_is_one_line(fake, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake.failures["nvmlInit"] = "DriverNotLoaded"
    assert main(["monitor", *options]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert missing(err) == {"nvml-unusable", "driver-not-loaded"}


def test_json_lines_on_standard_output_and_in_a_file(fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--json", "-"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["gpus"][0]["tensor_active_percent"] == 47.8
    path = tmp_path / "run.jsonl"
    assert main(["monitor", "--once", "--json", str(path)]) == 0
    (sample,) = read_samples(path)
    assert sample.gpus[0].gpm == "NVML GPM"
    out = capsys.readouterr().out
    assert "cuda:0" in out
    assert str(path) in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["--once", "--json", "/no/such/folder/x"], "--json.*/no/such/folder/x"),
        (["--once", "--json", "/"], "--json.* / "),
        *((["--interval", value], f"--interval .*{value}") for value in ("0.0", "-1.0", "nan", "inf")),
    ],
)
def test_an_error_is_one_line(fake, argv: list[str], facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", *argv]) == 1
    err = capsys.readouterr().err
    assert re.search(facts, err)
    assert err.count("\n") == 1


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_table_with_130_and_gives_the_terminal_back(
    fake, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], terminal, stderr)
    seen = b""
    while b"cuda:0" not in seen:
        seen += os.read(master, 65536)
    os.kill(pid, number)
    seen += everything(master)
    assert everything(errors).count(b"\n") == 1  # no traceback
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1  # the cursor was hidden and is visible again


def test_a_reader_that_leaves_ends_it_quietly(fake) -> None:
    lines, stdout = os.pipe()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--json", "-", "--interval", "0.05"], stdout, stderr)
    assert b'"cuda_index":0' in os.read(lines, 65536)
    os.close(lines)
    assert everything(errors) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_reader_that_leaves_the_table_ends_it_quietly(fake) -> None:
    lines, stdout = os.pipe()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], stdout, stderr)
    assert os.read(lines, 65536)
    os.close(lines)
    assert everything(errors) == b""
    assert os.WIFEXITED(os.waitpid(pid, 0)[1])


def test_a_full_disk_is_one_line(fake, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--json", "/dev/full"]) == 1
    err = capfd.readouterr().err
    assert re.search(f"/dev/full.*{os.strerror(errno.ENOSPC)}", err)
    assert err.count("\n") == 1


def test_a_terminal_that_cannot_move_its_cursor_gets_tables_below_one_another(
    fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, terminal = pty.openpty()
    errors, stderr = os.pipe()
    pid = command(["monitor", "--interval", "0.05"], terminal, stderr)
    seen = b""
    while seen.count(b"cuda:0") < 2:
        seen += os.read(master, 65536)
    os.kill(pid, signal.SIGINT)
    seen += everything(master)
    everything(errors)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"\x1b" not in seen


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_width_and_every_terminal_shows_the_figures(fake, width: int, ascii_only: bool) -> None:
    fake.boards = (H100, T4, MIG)
    fake.failures["nvmlDeviceGetTemperature"] = "Unknown"
    out = in_terminal(table(taken()), width, ascii_only=ascii_only)
    assert max(map(len, out.splitlines())) <= width
    assert all(said in out for said in ("98 %", "48 %", "57.0", "648", "31 W"))


def test_each_gpu_has_its_row_and_its_figures(
    fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.boards = tuple(replace(H100, uuid=f"GPU-{rank}", power=1000 * (100 + rank)) for rank in range(4))
    path = tmp_path / "run.jsonl"
    assert main(["monitor", "--once", "--json", str(path)]) == 0
    numbers_and_power = re.findall(r"cuda:\d|\d+ of 700 W", capsys.readouterr().out)
    assert numbers_and_power == [text for rank in range(4) for text in (f"cuda:{rank}", f"{100 + rank} of 700 W")]
    (sample,) = read_samples(path)
    assert [(gpu.cuda_index, gpu.power_watts) for gpu in sample.gpus] == [(rank, 100 + rank) for rank in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # torch counts only visible GPUs
    assert [(gpu.index, gpu.cuda_index) for gpu in taken().gpus] == [(3, 0), (1, 1)]


def test_gpus_that_are_lost_while_the_table_is_shown_leave_the_reason(fake) -> None:
    fake.failures["nvmlDeviceGetCount"] = "GpuIsLost"
    out = " ".join(in_terminal(table(taken()), 200).split())
    assert "NVMLError_GpuIsLost" in out
    assert "cuda:0" not in out


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_format_character_in_a_name_is_shown_by_number(
    fake, json_lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+202E reverses the text after it in a terminal and can disguise a name."""
    fake.boards = (replace(H100, name="[b]H\u202e08"),)
    assert main(["monitor", "--once", *(["--json", "-"] if json_lines else [])]) == 0
    out = capsys.readouterr().out
    assert "\u202e" not in out
    assert r"[b]H\u202e08" in out
    if json_lines:
        assert json.loads(out)["gpus"][0]["name"] == "[b]H\u202e08"
