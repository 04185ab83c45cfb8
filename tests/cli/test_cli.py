"""The command line: what it answers, and with which exit status."""

from pathlib import Path

import pytest
import torch

import flatout
from flatout.cli import COMMANDS, demo, main


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


def test_demo_help_explains_jobs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for said in ("digits", "gpt", "--budget SECONDS", "--json FILE", "--html FILE", "--epochs N", "--quick"):
        assert said in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--job", "digit"], "invalid choice: 'digit'"),
        (["demo", "--epochs", "0"], "--epochs: must be at least 1, got 0"),
        (["demo", "--epochs", "two"], "--epochs: invalid whole number value: 'two'"),
        (["demo", "--budget", "-1"], "--budget: must be at least 0, got -1"),
        (["demo", "--budget", "inf"], "--budget: must be at least 0"),
        (["demo", "--budget", "nan"], "--budget: must be at least 0"),
    ],
)
def test_wrong_arguments(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_trained(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *args, **kwargs: pytest.fail("trained first"))
    assert main(["demo", option, str(tmp_path / "no" / "file")]) == 1
    assert f"{option} must be a file that can be written" in capsys.readouterr().err
    assert main(["demo", option, str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_a_missing_extra_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    assert main(["demo", "--job", "digits", "--quick"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "flatout: interrupted"
