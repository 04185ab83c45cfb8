"""Progress of tuning: one live line in a terminal or notebook, and one record for each technique in logs."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from rich.console import Console
from rich.live import Live

import flatout
from flatout.report.model import Gain, Row
from flatout.tuning import bench, progress
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.progress import NotebookLine, Progress, TerminalLine, own_progress
from tests.clock import Clock, TimedStep
from tests.jobs import make_job, only
from tests.terminal import Terminal, screen


@pytest.fixture(autouse=True)
def a_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "RANK", "WORLD_SIZE", "FLATOUT_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


class Shown:
    """Line that records its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.changed = threading.Event()
        self.last: str | None = None

    def show(self, text: str) -> None:
        self.texts.append(text)
        self.changed.set()

    def hide(self) -> None:
        self.texts.append("")

    def close(self, last: str) -> None:
        self.last = last


class Spent(Budget):
    """Budget of a minute, of which 12 seconds are spent."""

    shown = 12.4  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(60.0)


def of_a_terminal() -> Progress:
    """Return the progress that this process shows, with a budget."""
    shown = own_progress()
    shown.budget = Spent()
    return shown


def optimized(clock: Clock, **arguments: Any) -> flatout.Run:
    """Return a run whose decisions are a faster optimizer and a slower number of threads."""
    model, loader, optimizer = make_job()
    factors = {"fused_optimizer": 0.5, "cpu_threads": 1.5}
    step = TimedStep(clock, lambda _, active: 0.02 * torch.tensor([factors[name] for name in active]).prod().item())
    given = {"techniques": only("fused_optimizer", "cpu_threads"), "budget": 100, "expected_steps": 1000, "plan": None}
    return flatout.optimize(model, loader, optimizer, step.watch(model, optimizer), **(given | arguments))


# Content of the line


def test_a_stage_shows_what_is_tried_and_the_seconds_of_the_budget() -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("trying torch.compile"), shown.candidate("max-autotune"):
            pass
        shown.close()
    first, second = terminal.frames
    assert "trying torch.compile" in first
    assert "12 of 60 s" in first
    assert "max-autotune" in second
    assert screen(terminal.written) == [""]


def test_a_long_line_is_cut_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with Terminal() as terminal:
        shown = own_progress()
        with shown.stage("trying\n\x1b[31ma name of many\tlines"):
            shown.refresh()
        shown.close()
    (frame,) = terminal.frames
    assert len(frame) < 20
    assert screen(terminal.written) == [""]


def test_other_output_stays_as_it_is_above_the_line() -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("trying torch.compile"):
            print("a whole line")
            after_line = sys.stdout
            print("half a line, ", end="", flush=True)
            shown.refresh()
            with shown.candidate("default"):  # the unfinished line is not overwritten
                print("the other half")
            sys.stderr.writelines(["a warning\n", "of two lines\n"])
            print()
        shown.close()
        assert [sys.stdout, sys.stderr] == terminal.streams
        print("late", file=after_line)  # by code that has kept the stream
    printed = ["a whole line", "half a line, the other half", "a warning", "of two lines", "", "late", ""]
    assert screen(terminal.written) == printed
    assert terminal.frames[1] == terminal.frames[0], "the line comes back at once"


def test_output_of_other_ways_covers_the_line() -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("x"):
            os.write(terminal.streams[1].fileno(), b"a log record that is as long as the line, or longer\n")
        shown.close()
    assert screen(terminal.written) == ["a log record that is as long as the line, or longer", ""]


def test_a_fork_does_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("x"):
            monkeypatch.setattr(progress.os, "getpid", lambda: -1)
            print("of a worker process, which covers the line")
            shown.close()
    assert len(terminal.frames) == 1
    assert screen(terminal.written) == ["of a worker process, which covers the line", ""]


def test_a_stage_that_fails_leaves_nothing() -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with pytest.raises(ZeroDivisionError), shown.stage("x"), shown.candidate("y"), shown.ticking():
            raise ZeroDivisionError
        shown.refresh()
        shown.close()
        assert [sys.stdout, sys.stderr] == terminal.streams
    assert screen(terminal.written) == [""]


def test_streams_that_were_replaced_meanwhile_stay() -> None:
    with Terminal():
        shown = of_a_terminal()
        sys.stderr = own = io.StringIO()
        shown.close()
        assert sys.stderr is own


@pytest.mark.parametrize("failing", ["show", "hide", "close"])
def test_an_error_of_the_display_ends_the_line_alone(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the terminal is gone")

    line = Shown()
    monkeypatch.setattr(line, failing, fail)
    shown = Progress(line)
    for _ in range(2):
        with shown.stage("x"), shown.candidate("y"):
            shown.refresh()
    shown.close()


def test_a_terminal_that_is_gone_stops_no_print() -> None:
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("x"):
            terminal.streams[1].close()
            print("still here")
        shown.close()
    assert "still here" in terminal.written


# Where the line is shown


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_a_file_has_no_line(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.live_line() is None


def test_no_standard_error_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert progress.live_line() is None


def test_a_terminal_without_control_sequences_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Terminal():
        assert progress.live_line() is None


def test_one_live_line_uses_a_terminal() -> None:
    with Terminal():
        first = progress.live_line()
        assert isinstance(first, TerminalLine)
        assert progress.live_line() is None
        first.close("")
        with Live("of the user", console=Console(file=sys.stderr), auto_refresh=False):
            assert progress.live_line() is None


def test_a_notebook_has_a_line_but_not_its_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert isinstance(progress.live_line(), NotebookLine)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert progress.live_line() is None


@pytest.mark.parametrize(
    ("rank", "ranks", "is_child", "shows"),
    [
        (None, None, False, True),
        (None, None, True, False),  # one of several trainings that a process started
        ("0", "2", False, True),
        ("0", "2", True, True),  # the first of several ranks that a process started
        ("1", "2", False, False),
        ("1", "2", True, False),
    ],
)
def test_one_process_of_a_training_shows_a_line(
    rank: str | None, ranks: str | None, is_child: bool, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_child else None)
    with Terminal() as terminal:
        shown = own_progress()
        with shown.stage("x"):
            pass
        shown.close()
    assert bool(terminal.frames) is shows


# When the line is drawn


def test_the_seconds_are_updated_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    line = Shown()
    shown = Progress(line)
    shown.refresh()  # no stage has started
    with shown.stage("x"):
        for now in (0.1, 0.4, 0.5, 0.6, 0.9, 1.0):  # noqa: B007  (read by the clock)
            shown.refresh()
    assert len([text for text in line.texts if text]) == 3


def test_a_compilation_is_updated_by_a_thread_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.001)
    before = threading.active_count()
    with Progress().ticking():
        assert threading.active_count() == before, "nothing to show"
    line = Shown()
    shown = Progress(line)
    with shown.stage("x"):
        with shown.ticking():
            line.changed.clear()
            assert line.changed.wait(60)
        assert threading.active_count() == before
        drawn = len(line.texts)
    assert line.texts[drawn:] == [""]


def test_nothing_is_drawn_while_steps_are_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, threads, drawn = False, set[int](), list[bool]()
    own, show = bench.timed_block, TerminalLine.show

    def watched(*given: Any) -> Any:
        nonlocal timed
        timed = True
        threads.add(threading.active_count())
        try:
            return own(*given)
        finally:
            timed = False

    def noted(line: TerminalLine, text: str) -> None:
        drawn.append(timed)
        show(line, text)

    monkeypatch.setattr(bench, "timed_block", watched)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(TerminalLine, "show", noted)
    with Terminal():
        alone = threading.active_count()
        optimized(clock)
    assert threads == {alone}
    assert len(drawn) > 50
    assert not any(drawn)


# A whole tuning


def test_tuning_shows_its_stages_and_leaves_nothing(clock: Clock) -> None:
    with Terminal() as terminal:
        print("before")
        optimized(clock)
        assert [sys.stdout, sys.stderr] == terminal.streams
        print("after")
    assert screen(terminal.written) == ["before", "after", ""]
    assert any("of 100 s" in frame for frame in terminal.frames)
    assert len(set(terminal.frames)) > 5


def test_tuning_that_fails_leaves_nothing(clock: Clock) -> None:
    model, loader, optimizer = make_job()

    def loss_fn(*_: object) -> None:
        raise LookupError("of the user")

    with Terminal() as terminal:
        with pytest.raises(LookupError):
            flatout.optimize(model, loader, optimizer, loss_fn)  # type: ignore[arg-type]
        assert [sys.stdout, sys.stderr] == terminal.streams
    assert terminal.frames
    assert screen(terminal.written) == [""]


def test_the_line_changes_no_decision(clock: Clock) -> None:
    with Terminal():
        shown = optimized(clock)
    assert optimized(clock).plan.decisions == shown.plan.decisions == {"fused_optimizer": True}


# Logs


def records(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {(record.name, record.levelno) for record in caplog.records} <= {("flatout.tuning", logging.INFO)}
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Function that returns the messages so far of level INFO."""
    with caplog.at_level(logging.INFO, "flatout"):
        yield lambda: records(caplog)


def of(row: Row, messages: list[str]) -> list[str]:
    return [message for message in messages if message.startswith(f"{row.title}: ")]


def test_each_technique_has_one_record(clock: Clock, logs: Callable[[], list[str]]) -> None:
    run = optimized(clock)
    for row in run.report.rows:
        (message,) = of(row, logs())
        assert f"{row.status} {row.chosen}".strip() in message
    fused = run.report.row("fused_optimizer")
    assert fused.gain is not None
    assert f"+{100 * (fused.gain.ratio - 1):.0f} %" in of(fused, logs())[0]
    assert len(logs()) == len(run.report.rows) + 1  # and the total


def test_a_decision_that_is_reverted_has_another_record(logs: Callable[[], list[str]]) -> None:
    row = Row("a", None, "a", "kept", "", "fast", Gain(1.5, 1.4, 1.6))
    ledger = Ledger([Decision(row, "trial")])
    with progress.logged(ledger, logging.INFO):
        pass
    assert not logs()
    with progress.logged(ledger, logging.INFO):
        ledger.revert(ledger.won, lambda row: Row("a", None, "a", "rejected", ""))
    (message,) = logs()
    assert "rejected" in message


def test_a_stage_that_fails_has_no_record(logs: Callable[[], list[str]]) -> None:
    ledger = Ledger()

    def fail() -> None:
        with progress.logged(ledger, logging.INFO):
            ledger.add(Decision(Row("a", None, "a", "kept", "")))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not logs()


def test_a_cached_plan_that_fails_has_a_record(
    clock: Clock, plans: Any, logs: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimized(clock, plan="cached")

    def fail(*_: object) -> None:
        raise LookupError("no longer there")

    with monkeypatch.context() as patch:
        patch.setattr("flatout.tuning.agenda._apply", fail)
        run = optimized(clock, plan="cached")
    (note,) = [note for note in run.report.summary.notes if "no longer there" in note]
    assert logs().count(note) == 1


def test_only_the_first_rank_logs(clock: Clock, logs: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    optimized(clock)
    assert not logs()


def test_without_configuration_nothing_is_written(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("flatout")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert (logger.level, logging.getLogger("flatout.tuning").level) == (logging.NOTSET, logging.NOTSET)
    optimized(clock)
    assert capfd.readouterr() == ("", "")


# Notebooks


class Watched(NotebookClient):
    """Client that records the updates of outputs."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.updates: list[str] = []

    def process_message(self, message: Any, *given: Any) -> Any:
        if message["msg_type"] == "update_display_data":
            self.updates.append(message["content"]["data"]["text/plain"])
        return super().process_message(message, *given)


TUNING = """
from torch.nn import functional
import flatout
from tests.jobs import make_job, only

def tune(loss_fn):
    model, loader, optimizer = make_job()
    flatout.optimize(model, loader, optimizer, loss_fn, budget=2, plan=None, techniques=only("fused_optimizer"))
"""


@pytest.mark.slow
def test_a_notebook_has_one_line_that_is_replaced() -> None:
    cells = TUNING, "tune(functional.cross_entropy)", "tune(lambda *_: 1 / 0)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    root = {"metadata": {"path": str(Path(__file__).parents[2])}}  # the kernel imports `tests` from there
    client = Watched(notebook, timeout=300, kernel_name="python3", allow_errors=True, resources=root)
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == []
    (line,) = outputs[1]
    assert line.output_type == "display_data"
    assert line.data.keys() == {"text/plain"}
    assert line.data["text/plain"] in client.updates
    assert any("of 2 s" in text for text in client.updates)
    assert not any("\n" in text for text in client.updates)
    line, error = outputs[2]
    assert (line.data["text/plain"], error.ename) == ("", "ZeroDivisionError")


# The setting FLATOUT_PROGRESS


def test_no_line_is_shown_if_progress_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", "0")
    with Terminal() as terminal:
        shown = of_a_terminal()
        with shown.stage("trying torch.compile"):
            shown.refresh()
        shown.close()
    assert terminal.written == ""


def test_a_log_has_one_line_for_each_stage_if_progress_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    monkeypatch.setenv("FLATOUT_PROGRESS", "1")
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    shown = of_a_terminal()
    with shown.stage("trying torch.compile"):
        shown.budget = Budget(60.0)
        shown._due = 0.0
        shown.refresh()
        with shown.candidate("max-autotune"):
            pass
    shown.close()
    first, second = log.getvalue().splitlines()
    assert "trying torch.compile" in first
    assert "max-autotune" in second


def test_a_log_of_a_whole_tuning_has_few_lines_and_no_carriage_return(tmp_path: Path) -> None:
    program = f"{TUNING}\ntune(functional.cross_entropy)"
    with open(tmp_path / "log", "wb") as log:
        environment = {**os.environ, "FLATOUT_PROGRESS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", program], stderr=log, env=environment, check=True, timeout=300)
        seconds = time.monotonic() - begun
    written = (tmp_path / "log").read_bytes()
    lines = [line for line in written.decode().splitlines() if line.startswith("flatout: ")]
    assert 1 <= len(lines) <= 1 + seconds / progress.LOG_SECONDS
    assert b"\r" not in written
    assert b"\x1b" not in written


@pytest.mark.parametrize("setting", ["", "2"])
def test_a_log_has_no_line_by_default(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", setting)
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    shown = of_a_terminal()
    with shown.stage("trying torch.compile"):
        pass
    shown.close()
    assert log.getvalue() == ""
