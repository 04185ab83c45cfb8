"""``flatout compare``: exit statuses and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.cli import main
from tests.report.comparison_sample import pace, run, script, summary


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the present folder, with reports in it."""
    monkeypatch.chdir(tmp_path)
    run().to_json("a.json")
    run(pace(0.5, 3.0), rows=()).to_json("slow.json")
    run(pace(0.5, 3.0, stretches=()), rows=()).to_json("once.json")
    script(Net=summary()).to_json("script.json")
    Path("text.json").write_text("no report")
    return tmp_path


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["a.json", "a.json"], 0),
        (["a.json", "slow.json"], 0),
        (["a.json", "slow.json", "--fail-below", "0.95"], 1),
        (["a.json", "slow.json", "--fail-below", "0.5"], 0),
        (["slow.json", "a.json", "--fail-below", "0.95"], 0),
        (["a.json", "once.json", "--fail-below", "0.95"], 0),
    ],
)
def test_only_a_surely_slower_run_fails(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *argv]) == status
    captured = capsys.readouterr()
    assert "a.json" in captured.out
    assert captured.err == ""


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("b", ["missing.json", "text.json", "script.json", "."])
def test_unusable_inputs(b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a.json", b]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("ratio", ["0", "-1", "nan", "inf", "two"])
def test_invalid_ratios(ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["compare", "a.json", "b.json", f"--fail-below={ratio}"])
    assert exit_info.value.code == 2
    assert ratio in capsys.readouterr().err


@pytest.mark.usefixtures("files")
def test_the_result_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a.json", "slow.json", "--json", "out.json"]) == 0
    data = json.loads(Path("out.json").read_text())
    assert data["loops"][0]["verdict"] == "slower"
    assert "out.json" in capsys.readouterr().out


@pytest.mark.usefixtures("files")
def test_a_result_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a.json", "slow.json", "--json", "no/out.json"]) == 1
    assert "no/out.json" in capsys.readouterr().err
