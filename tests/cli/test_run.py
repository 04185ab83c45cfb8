"""``flatout run``: scripts are tuned, and behave as under ``python``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.jobs import NO_TECHNIQUES
from tests.reasons import reasons

pytestmark = pytest.mark.slow

PLAIN = [sys.executable]
ON_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
UNDER_FLATOUT = [sys.executable, "-m", "flatout", "run"]

TRAINING = """
import os, sys
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.arange(16) % 3
def train(updates=8):
    for _ in range(updates):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""

SPAWNS = """
import multiprocessing, sys
def task(i):
    return i, __name__, sys.modules["__main__"].__dict__.get("__file__") is not None, "flatout" in sys.modules
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(task, [1, 2]))
"""

SAVES = """
train()
torch.save(model.state_dict(), "weights.pt")
model.load_state_dict(torch.load("weights.pt", weights_only=True))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "both.pt")
print(sorted(torch.load("both.pt", weights_only=True)["model"]))
torch.save(model, "model.pt")
with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
    again = torch.load("model.pt", weights_only=True)
print(type(again), torch.equal(again(x), model(x)))
"""

FAILS = """
train()
def inner():
    raise KeyError("x")
inner()
"""

SIGNALS_ITSELF = """
import signal, time
train()
os.kill(os.getpid(), signal.{})
time.sleep(60)
"""

FORKS = """
train()
child = os.fork()
if child == 0:
    train()
    sys.exit(5)
print(os.waitpid(child, 0)[1] >> 8)
"""

AT_EXIT = """
import atexit, pickle
class K:
    pass
atexit.register(lambda: print(pickle.loads(pickle.dumps(K())).__class__))
train()
"""

BY_CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss
for _ in range(5):
    optimizer.step(closure)
print(float(closure()))
"""

LONG = """
import time
end = time.time() + 6
while time.time() < end:
    train()
"""

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
train()
dist.destroy_process_group()
"""

SCRIPTS = {
    "trains": TRAINING + "train(); print(float(model(x).sum()), file=sys.stdout)",
    "trains nothing": "import sys; print(sys.argv, __name__)",
    "crashes": TRAINING + FAILS,
    "fails to parse": "print(1\n",
    "exits with 3": TRAINING + "train(); sys.exit(3)",
    "exits with a message": TRAINING + "train(); sys.exit('what happened')",
    "exits at once": TRAINING + "train(); sys.stdout.flush(); os._exit(4)",
    "interrupts itself": TRAINING + SIGNALS_ITSELF.format("SIGINT"),
    "is terminated": TRAINING + SIGNALS_ITSELF.format("SIGTERM"),
    "forks": TRAINING + FORKS,
    "spawns": SPAWNS,
    "saves and loads": TRAINING + SAVES,
    "ends with a function at exit": TRAINING + AT_EXIT,
    "uses LBFGS": TRAINING + BY_CLOSURE,
    "fails in a backward": TRAINING + "train(3)\nmodel(x).backward()",
}


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run(command: list[str], cwd: Path, **variables: str) -> Done:
    environment = os.environ | {"FLATOUT_CACHE": "off"} | variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def statuses_after_a_line(folder: Path, act: Callable[[Any], object]) -> list[int]:
    """Run script.py under python and under flatout, act on its process after a line, and return both statuses."""
    statuses = []
    for command in (PLAIN, UNDER_FLATOUT):
        with subprocess.Popen(
            [*command, "script.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore SIGINT
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            act(process)
            statuses.append(process.wait(timeout=120))
    return statuses


def without_flatouts(stderr: str) -> str:
    """Return the lines that flatout did not write."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("flatout: "))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_under_python(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    arguments = ["script.py", "--lr", "0.1", "-m", "x"]
    expected = run([*PLAIN, *arguments], tmp_path)
    found = run([*UNDER_FLATOUT, "--dry-run", *arguments], tmp_path)
    assert found._replace(stderr=without_flatouts(found.stderr)) == expected


def test_a_module_is_run_as_by_python(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NAME = __name__")
    (package / "train.py").write_text(
        "import sys\nfrom .other import NAME\nprint(NAME, __name__, __spec__.name, sys.argv)"
    )
    expected = run([*PLAIN, "-m", "package.train", "--lr", "1"], tmp_path)
    found = run([*UNDER_FLATOUT, "-m", "package.train", "--lr", "1"], tmp_path)
    assert found._replace(stderr=without_flatouts(found.stderr)) == expected


def test_a_closed_pipe_ends_the_script_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("for i in range(100_000): print(i)")
    expected, found = statuses_after_a_line(tmp_path, lambda process: process.stdout.close())
    assert expected == found != 0


def test_what_is_kept_is_reported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING + LONG)
    done = run([*UNDER_FLATOUT, "--only", "fused_optimizer", "script.py"], tmp_path)
    assert done.status == 0
    data = json.loads((tmp_path / "flatout-report.json").read_text())
    assert [each["module"] for each in data["modules"]] == ["Sequential"]
    rows = {row["technique"]: row["status"] for row in data["modules"][0]["report"]["rows"]}
    assert rows["fused_optimizer"] in ("kept", "rejected", "not tried")
    assert {rows[name] for name in NO_TECHNIQUES if name != "fused_optimizer"} <= {"not tried", "not applicable"}
    assert (tmp_path / "flatout-report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_budget_of_0_tunes_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING + LONG.replace("6", "2"))
    done = run([*UNDER_FLATOUT, "script.py"], tmp_path, FLATOUT_BUDGET="0")
    assert done.status == 0
    assert not (tmp_path / "flatout-report.json").exists()
    assert [reasons(line) for line in done.stderr.splitlines()] == [{"budget-spent"}]


def test_a_wrong_budget_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = run([*UNDER_FLATOUT, "script.py"], tmp_path, FLATOUT_BUDGET="soon")
    assert (done.status, done.stdout) == (1, "")
    assert "FLATOUT_BUDGET" in done.stderr


@pytest.mark.parametrize("trains", [True, False])
def test_of_several_ranks_one_says_once_why_nothing_is_tuned(trains: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING + RANKS * trains)
    done = run([*ON_RANKS, *UNDER_FLATOUT[1:], "script.py"], tmp_path)
    assert done.status == 0, done.stderr
    said = [reasons(line) for line in done.stderr.splitlines() if line.startswith("flatout: ")]
    assert said == [{"several-ranks"} if trains else {"no-update"}]


def test_a_script_that_tunes_itself_is_not_said_to_have_no_updates(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING + "import flatout\nflatout.auto()\ntrain()")
    done = run([*UNDER_FLATOUT, "script.py"], tmp_path)
    assert (done.status, done.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--only", "--without"])
def test_unknown_techniques_are_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = run([*UNDER_FLATOUT, option, "fused_optimiser", "script.py"], tmp_path)
    assert (done.status, done.stdout) == (1, "")
    assert "fused_optimizer" in done.stderr


def test_an_interrupted_script_dies_of_the_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    statuses = statuses_after_a_line(tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert statuses == [-signal.SIGINT, -signal.SIGINT]


def test_precisions_have_the_names_of_other_libraries(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    assert run([*UNDER_FLATOUT, "--precision", "bf16-mixed", "script.py"], tmp_path).stdout == "ran\n"
    refused = run([*UNDER_FLATOUT, "--precision", "fp8", "script.py"], tmp_path)
    assert (refused.status, refused.stdout) == (2, "")
    assert "'fp8'" in refused.stderr


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_script_runs(option: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = run([*UNDER_FLATOUT, option, "missing/file", "script.py"], tmp_path)
    assert (done.status, done.stdout) == (1, "")
    assert option in done.stderr
