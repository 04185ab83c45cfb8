"""Processes of the demo, and its files."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.cli.command import CommandError
from flatout.cli.demo import Process, run_process


def ran(code: str) -> Process:
    """Return the result of a script."""
    return run_process("a title", [sys.executable, "-I", "-S", "-c", code], os.environ)


def test_a_process_is_read_from_its_output() -> None:
    process = ran("import time; time.sleep(0.2); print('epoch 1\\ntrained in 0.15 s\\na\\n b\\nheld-out loss 2')")
    assert (process.title, process.training_seconds, process.held_out) == ("a title", 0.15, "loss 2")
    assert process.receipt == "a\n b"
    assert process.seconds >= 0.2


def test_a_process_without_a_receipt() -> None:
    assert ran("print('trained in 0.15 s\\nheld-out loss 2')").receipt == ""


def figures(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.parametrize("code", ["raise SystemExit('out of\\nluck')", "print('trained in 0.15 s')"])
def test_a_failed_process_is_one_line(code: str) -> None:
    with pytest.raises(CommandError) as failure:
        ran(code)
    assert "\n" not in str(failure.value)
    assert "SystemExit" not in code or "luck" in str(failure.value)


@pytest.mark.slow
def test_each_job_trains_to_one_quality_and_leaves_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    cache = tmp_path / "cache"
    monkeypatch.setenv("FLATOUT_CACHE", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)  # short paths fit on one line
    data, page = Path("demo\u202e.json"), Path("demo.html")
    assert main(["demo", "--quick", "--json", str(data), "--html", str(page)]) == 0
    jobs = json.loads(data.read_text())["jobs"]
    shown = capsys.readouterr().out
    assert list(jobs) == ["digits", "gpt"]
    for plain, *through_flatout in jobs.values():
        for process in through_flatout:
            assert figures(process["held_out"]) == pytest.approx(figures(plain["held_out"]), rel=0.05)
            assert process["receipt"]
            assert 0 < process["training_seconds"] < process["seconds"]
        assert plain["held_out"] in page.read_text()
        assert plain["held_out"] in shown
    assert not cache.exists()
    assert "demo\\u202e.json" in shown
    assert "\u202e" not in shown
