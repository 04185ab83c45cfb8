"""Effects of steps outside of memory: dropped in trials where they show nothing later, else no trial is made."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.effects import Containment, Unrepeatable
from tests.reasons import reasons
from tests.unseen import Unseen


def contained(action: Any) -> Unrepeatable | None:
    """Run an action inside a containment, and return the error of a forbidden effect."""
    containment = Containment()
    with containment.on(), contextlib.suppress(Unrepeatable):
        action()
    return containment.error


WRITES: dict[str, Any] = {
    "open": lambda path: path.open("a").close(),
    "write_text": lambda path: path.write_text("x"),
    "builtin": lambda path: open(path, "w").close(),
    "descriptor": lambda path: os.open(path, os.O_CREAT | os.O_WRONLY),
    "torch.save": lambda path: torch.save({}, path),
    "folder": lambda path: path.mkdir(),
    "program": lambda path: subprocess.run(["true"], check=False),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_forbidden_and_do_not_happen(write: Any, tmp_path: Path) -> None:
    assert contained(lambda: write(tmp_path / "file")) is not None
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "later")  # allowed again


def test_reads_and_memory_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert contained(lambda: (tmp_path / "file").read_text()) is None


def test_prints_and_records_are_dropped_and_warnings_are_not(capsys: Any, caplog: Any) -> None:
    def step() -> None:
        print("text")
        print("text", file=sys.stderr)
        logging.getLogger("users").warning("text")
        logging.getLogger("flatout.test").warning("kept")

    assert contained(step) is None
    assert capsys.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records] == ["kept"]
    with pytest.warns(UserWarning, match="seen"):
        contained(lambda: warnings.warn("seen", UserWarning, stacklevel=1))
    print("after")
    assert capsys.readouterr().out == "after\n"


def test_other_threads_print_and_write(capsys: Any, tmp_path: Path) -> None:
    def work() -> None:
        print("from a thread")
        (tmp_path / "file").write_text("x")

    def step() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert contained(step) is None
    assert capsys.readouterr().out == "from a thread\n"
    assert (tmp_path / "file").exists()


def make(hook: Any) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].register_forward_hook(hook)
    data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    return model, DataLoader(data, batch_size=16), torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_that_writes_a_file_is_not_tried(tmp_path: Path) -> None:
    path, unseen = tmp_path / "log", Unseen(calls=0)

    def hook(*_: Any) -> None:
        unseen.calls += 1
        with path.open("a") as file:
            file.write("call\n")

    model, loader, optimizer = make(hook)
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=2, plan=None)
    assert not path.exists()
    assert unseen.calls == 1  # the first step, which the guard ended
    assert {row.status for row in run.report.rows if row.technique in ("precision", "compile")} == {"not applicable"}
    assert "cannot-be-restored" in reasons(run.report.row("precision"))
    for batch in run.loader:
        run.step(batch)
    assert path.read_text() == 4 * "call\n"


@pytest.mark.parametrize("held", [queue.Queue(), threading.Thread(target=len, args=("",)), iter([1, 2])])
def test_a_step_that_reaches_a_channel_is_not_run(held: Any) -> None:
    unseen = Unseen(calls=0)

    def hook(*_: Any) -> None:
        unseen.calls += held is not None

    model, loader, optimizer = make(hook)
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=2, plan=None)
    assert unseen.calls == 0
    assert "cannot-be-restored" in reasons(run.report.row("compile"))
    with pytest.raises(ValueError, match="precision") as error:
        flatout.optimize(model, loader, optimizer, functional.cross_entropy, precision="bf16", plan=None)
    assert "cannot-be-restored" in reasons(str(error.value))
