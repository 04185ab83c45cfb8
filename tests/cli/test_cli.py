"""Command line: output and exit statuses."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import COMMANDS, main
from flatout.cli.command import Command
from tests.monitor.harness import System


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"flatout {flatout.__version__} (torch {torch.__version__}, Python ")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {command.name} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS], ids=lambda command: command.name if command else "flatout")
def test_help_has_examples(command: Command | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command.name, "--help"] if command else ["--help"])
    out = capsys.readouterr().out
    examples = out[out.index("examples:") :]
    assert f"  flatout {command.name}" in examples if command else "  flatout run" in examples
    assert max(map(len, out.splitlines())) <= 80
    if command:
        assert re.search(r"--json \[?FILE", out)


def test_demo_help_explains_jobs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for said in ("digits", "gpt", "--json FILE", "--html FILE", "--quick"):
        assert said in out


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ([], "COMMAND"),
        (["dmeo"], "'dmeo'"),
        (["demo", "--job", "digit"], "--job: .*'digit'"),
    ],
)
def test_wrong_arguments(argv: list[str], facts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert re.search(facts, capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("place", ["no/file", "."])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_trained(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / place)
    assert main(["demo", "--job", "digits", "--quick", option, path]) == 1
    captured = capsys.readouterr()
    assert option in captured.err
    assert path in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_extra_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # type: ignore[arg-type]
    assert main(["demo", "--job", "digits", "--quick"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Python's SIGINT handler, because a shell ignores SIGINT in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        if name == "nvmlInit":  # the first sample calls nvmlInit once
            os.kill(os.getpid(), signal.SIGINT)

    System(monkeypatch).nvml(before=interrupt)
    assert main(["monitor", "--interval", "0.05"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
