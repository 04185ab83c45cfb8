"""``make gpu-check``: order and limits of its phases, choice by name, and the figures of a phase that is cut."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import tool

check = tool("gpu_check")

STAGES = check.STAGES
PHASES = check.chosen(STAGES)
CORRECTNESS = ("tests", "kernels", "memcheck", "racecheck")


def test_figures_come_before_tests_of_correctness() -> None:
    names = [phase.name for phase in PHASES]
    assert list(STAGES) == ["figures", "jobs", "proof"]
    assert names[0] == "build"
    first = min(names.index(name) for name in CORRECTNESS)
    for name in ("update_path", "optimize_gpu", "kernel_times", "data_path_gpu", "optimize_gpu_large", "case_study"):
        assert names.index(name) < first
    assert names.index("update_path") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_the_limits_of_a_stage_fit_into_nine_minutes(stage: str) -> None:
    assert sum(phase.limit for phase in STAGES[stage]) <= check.LIMIT <= 540
    for phase in STAGES[stage]:
        assert phase.seconds <= phase.limit - check.GRACE, phase.name


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_builds_what_it_runs(stage: str) -> None:
    assert STAGES[stage][0].name == "build"


def test_phases_and_stages_are_chosen_by_name() -> None:
    assert check.chosen(["jobs"]) == STAGES["jobs"]
    assert [phase.name for phase in check.chosen(["tests", "build", "tests"])] == ["tests", "build"]
    with pytest.raises(ValueError, match="got speed"):
        check.chosen(["build", "speed"])


def machine(out: Path) -> Any:
    return check.Machine({"gpu": "none", "memory": 80 << 30}, "90a-real", out, full=False)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder for results. Logs go to another one."""
    for name in ("LOGS", "WORK"):
        monkeypatch.setattr(check, name, tmp_path / name.lower())
        (tmp_path / name.lower()).mkdir()
    out = tmp_path / "out"
    out.mkdir()
    return out


def test_arguments_of_a_phase_replace_its_selection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (phase,) = check.chosen(["optimize_gpu"])
    assert phase.commands(machine(tmp_path))[0][-2:] == ("-k", "seed_mlp or gpt2")
    monkeypatch.setenv("ARGS_optimize_gpu", shlex.join(["-x", "-k", "wide or gpt2"]))
    assert phase.commands(machine(tmp_path))[0][-3:] == ("-x", "-k", "wide or gpt2")
    (other,) = check.chosen(["optimize_gpu_large"])
    assert other.commands(machine(tmp_path))[0][-2:] == ("-k", "wide or resnet50")


def phase_of(program: str, limit: int = 60, **options: Any) -> Any:
    return check.Phase("tried", 1, limit, lambda machine: [(sys.executable, "-c", program)], **options)


class Clock:
    """Clock that stands at 0 until the phase has printed, and then shows the given times."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def monotonic(self) -> float:
        log = check.LOGS / "tried.log"
        if not log.exists() or "a figure" not in log.read_text():
            return 0.0
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_a_phase_near_its_limit_is_interrupted_and_keeps_what_it_has_printed(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import time\ntry:\n print('a figure')\n time.sleep(1000)\nexcept KeyboardInterrupt: print('its end')"
    monkeypatch.setattr(check, "time", Clock(60 - check.GRACE / 2))
    assert check.run_phase(phase_of(program, limit=60), machine(folders)).status == "timed out"
    assert (check.LOGS / "tried.log").read_text().split("\n")[:2] == ["a figure", "its end"]
    assert "a figure" in capsys.readouterr().out


def test_a_phase_that_ignores_the_interrupt_is_killed_at_its_limit(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('a figure')\ntime.sleep(1000)"
    near = 60 - check.GRACE / 2
    monkeypatch.setattr(check, "time", Clock(near, near, near, near, 61))
    assert check.run_phase(phase_of(program, limit=60), machine(folders)).status == "timed out"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_that_a_phase_leaves_behind_are_ended(folders: Path) -> None:
    left = "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)"
    assert check.run_phase(phase_of(left), machine(folders)).status == "passed"
    pid = int((check.LOGS / "tried.log").read_text())
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_phase_without_its_program_is_unsupported(folders: Path) -> None:
    result = check.run_phase(phase_of("raise SystemExit(1)", needs="no-such-program"), machine(folders))
    assert result.status == "unsupported"


@pytest.mark.slow
def test_figures_are_recorded_before_a_benchmark_ends(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders.parent / "broken.py").write_text("import flatout\nflatout.optimize = None\n")
    monkeypatch.setenv("PYTHONPATH", str(folders.parent))
    monkeypatch.setenv("ARGS_checklist", shlex.join(["-k", "perceptron and not torchscript", "-p", "broken"]))
    (phase,) = check.chosen(["checklist"])
    assert check.run_phase(phase, machine(folders)).status == "failed"
    (file,) = folders.glob("*.json")
    figures = json.loads(file.read_text())["benchmarks"]["checklist"]["results"]["test_perceptron"]
    assert set(figures["seconds of 20 steps"]) == {"float32", "AMP"}


def test_results_are_written_after_each_phase(folders: Path) -> None:
    report = check.Report(machine(folders), {"gpu": "none"})
    for program, status in (("", "passed"), ("raise SystemExit(3)", "failed")):
        report.add(check.run_phase(phase_of(program), machine(folders)))
        content = json.loads((folders / "results.json").read_text())
        assert content["phases"][-1]["status"] == status
        assert (folders / "log.txt").exists()


@pytest.fixture
def whole(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of results of the whole check, on a machine that has a GPU for the check alone."""
    monkeypatch.setattr(check, "probe", lambda: {"gpu": "a GPU", "capability": "90", "memory": 80 << 30})
    monkeypatch.setenv("OUT", str(folders))
    for name in ("PHASES", "WHEELS", "ARCHS"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield folders
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("codes", "status", "ran"),
    [
        ({"build": 0, "first": 0, "second": 0}, 0, ["build", "first", "second"]),
        ({"build": 0, "first": 1, "second": 0}, 1, ["build", "first", "second"]),
        ({"build": 1, "first": 0, "second": 0}, 1, ["build"]),
    ],
)
def test_later_phases_need_only_the_build(
    codes: dict[str, int], status: int, ran: list[str], whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [replace(phase_of(f"raise SystemExit({code})"), name=name) for name, code in codes.items()]
    monkeypatch.setattr(check, "STAGES", {"all": phases})
    assert check.main() == status
    content = json.loads((whole / "results.json").read_text())
    assert [phase["name"] for phase in content["phases"]] == ran
    assert content["environment"]["architectures"] == "90a-real"


def test_an_unknown_phase_is_refused_before_anything_runs(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASES", "build speed")
    assert check.main() == 2
    assert not (whole / "results.json").exists()


def test_a_machine_without_a_gpu_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "probe", lambda: {"gpu": "none"})
    assert check.main() == 2
    assert not (whole / "results.json").exists()
