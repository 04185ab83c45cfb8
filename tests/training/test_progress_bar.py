"""Progress of ``Run.fit`` at a terminal, in a notebook and in a log."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from torch.nn import functional

import flatout
from tests.jobs import NO_TECHNIQUES, make_job
from tests.terminal import Terminal

LINE = re.compile(r"epoch (\d)/2: loss \d+\.?\d*  \S.* samples/s.*")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FLATOUT_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run() -> flatout.Run:
    model, loader, optimizer = make_job()
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, plan=None, techniques=NO_TECHNIQUES)


@pytest.mark.parametrize(("setting", "progress"), [("", True), ("0", True), ("1", False)])
def test_a_log_has_no_progress(
    setting: str,
    progress: bool,
    run: flatout.Run,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", setting)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a log stays a log
    assert len(run.fit(2, progress=progress)) == 2
    assert capfd.readouterr() == ("", "")


def test_a_log_has_a_line_for_each_epoch_if_progress_is_on(
    run: flatout.Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", "1")
    run.fit(2)
    output, errors = capfd.readouterr()
    assert output == ""
    assert [LINE.fullmatch(line)[1] for line in errors.splitlines()] == ["1", "2"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_terminal_has_a_bar_that_lines_replace(
    columns: str, run: flatout.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with Terminal() as terminal:
        run.fit(2)
    assert "━" in terminal.written
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.written).replace("\r", "\n").splitlines()
    assert [found[1] for found in map(LINE.fullmatch, lines) if found] == ["1", "2"]


def test_a_terminal_has_no_bar_if_progress_is_off(run: flatout.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", "0")
    with Terminal() as terminal:
        run.fit(2)
    assert terminal.written == ""


TRAINING = """
import sys
sys.modules["ipywidgets"] = None  # as if it were not installed
from torch.nn import functional
import flatout
from tests.jobs import NO_TECHNIQUES, make_job
model, loader, optimizer = make_job()
run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, plan=None, techniques=NO_TECHNIQUES)
history = run.fit(2)
"""


@pytest.mark.slow
def test_a_notebook_without_ipywidgets_has_a_line_for_each_epoch() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(TRAINING)])
    root = {"metadata": {"path": str(Path(__file__).parents[2])}}  # the kernel imports `tests` from there
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=root).execute()
    tuning, *epochs = notebook.cells[0].outputs
    assert tuning.data["text/plain"].startswith("flatout: ")
    lines = [LINE.fullmatch(epoch.data["text/plain"].rstrip()) for epoch in epochs]
    assert [line and line[1] for line in lines] == ["1", "2"]
