"""``flatout profile train.py``: unchanged scripts, and their exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from flatout.cli import main
from tests.clock import simulated_time
from tests.reasons import advice

TRAIN = """\
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MARKED = sys.argv[1]

def mark(where):
    if where == MARKED:
        time.sleep(10)

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index % 8 == 0:
            mark("loader_wait")
        return torch.full((4,), float(index)), index % 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        if self.training:
            mark("forward")
        return self.second(torch.relu(self.first(x)))

def evaluate(model):
    model.eval()
    with torch.no_grad():
        for x in DataLoader(torch.ones(16, 4), 16):
            mark("evaluation")
            model(x)
    model.train()

def criterion(out, y):
    mark("loss")
    return nn.functional.cross_entropy(out, y)

def main():
    torch.manual_seed(0)
    model = Net()
    model.first.weight.register_hook(lambda grad: mark("backward"))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    opt.register_step_pre_hook(lambda *_: mark("update"))
    for epoch in range(2):
        for x, y in DataLoader(Samples(), 8):
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()
            mark("host_idle")
            evaluate(model)
            loss.item()  # the sync
    print("trained", *sys.argv[1:], sum(p.double().sum().item() for p in model.parameters()))

if __name__ == "__main__":
    main()
"""


def timed_steps(shown: str) -> int:
    """Return the number of steps in the only profile of this text."""
    (number,) = re.findall(r"Mean of (\d+) step", shown)
    return int(number)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_module_is_profiled_with_its_own_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    package, figures = tmp_path / "package", tmp_path / "figures.json"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("")
    (package / "train.py").write_text("from . import other\n" + script.read_text())
    monkeypatch.chdir(tmp_path)
    brief = ["--steps", "2", "--warmup", "1", "--json", str(figures)]
    assert main(["profile", *brief, "-m", "package.train", "nowhere"]) == 0
    assert len(json.loads(figures.read_text())["steps"]) == 2


def profile(tmp_path: Path, script: Path, *args: str) -> dict[str, Any]:
    """Return the profile's figures on simulated time, and the phases in which the script sleeps."""
    file = tmp_path / "profile.json"
    brief = ["--steps", "2", "--warmup", "1", "--json", str(file)]
    with simulated_time(tick=0.001):
        assert main(["profile", *brief, str(script), *args]) == 0
    found = json.loads(file.read_text())
    return found | {"marked": {phase for phase, seconds in found["phases"].items() if seconds > 5}}


@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ("loader_wait", "loader_wait"),
        ("forward", "forward"),
        ("loss", "forward"),
        ("backward", "backward"),
        ("update", "update"),
        ("host_idle", "host_idle"),
        ("evaluation", "host_idle"),
    ],
)
def test_a_call_is_found_in_its_phase(where: str, phase: str, script: Path, tmp_path: Path) -> None:
    found = profile(tmp_path, script, where)
    assert found["marked"] == {phase}
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"])


def test_syncs_name_the_scripts_lines(script: Path, tmp_path: Path) -> None:
    found = profile(tmp_path, script, "-")
    lines = TRAIN.splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the sync"))
    assert [(sync["what"], sync["where"], sync["per_step"]) for sync in found["syncs"]] == [
        ("item", f"train.py:{line}", 1)
    ]
    (would_wait,) = [sentence for sentence in found["advice"] if advice(sentence) == {"would-wait"}]
    assert f"train.py:{line}" in would_wait


def test_a_script_is_ended_when_the_profile_is_done(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--steps", "1", "--warmup", "1", str(script), "-"]) == 0
    out = capfd.readouterr().out
    assert "profiler" in out
    assert "trained" not in out


@pytest.mark.parametrize("caught", ["Exception", "BaseException", "SystemExit"])
def test_a_script_that_catches_its_end_is_ended_at_its_next_update(
    caught: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    once = f"try:\n    for _ in range(9):\n        step()\nexcept {caught}:\n    print('caught')\n"
    path = write(tmp_path, LOOP + once + "print('goes on')\nstep()\nprint('unreachable')\n")
    assert main(["profile", "--steps", "1", "--warmup", "5", path]) == 0
    out = capfd.readouterr().out
    assert "unreachable" not in out
    assert ("goes on" in out) == (caught != "Exception")


def test_a_script_that_tries_again_and_again_trains_to_its_own_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = "for _ in range(20):\n    try:\n        step()\n    except BaseException:\n        print('caught')\n"
    path = write(tmp_path, f"{LOOP}{again}print('own end')\n")
    assert main(["profile", "--steps", "1", "--warmup", "5", path]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "own end" in lines
    assert lines.count("caught") == 3


def test_a_sync_of_an_evaluation_is_not_in_every_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loop = "for i in range(9):\n    step()\n    opt.param_groups[0]['params'][0].sum().item()\n    if i == 2:\n"
    path = write(tmp_path, f"{LOOP}{loop}        [x.item() for x in torch.ones(4)]\n")
    figures = tmp_path / "profile.json"
    assert main(["profile", "--steps", "1", "--warmup", "8", "--json", str(figures), path]) == 0
    syncs = json.loads(figures.read_text())["syncs"]
    places = {sync["where"].removeprefix(f"{tmp_path}/"): sync["is_in_every_step"] for sync in syncs}
    assert places == {"script.py:12": True, "script.py:14": False}


@pytest.mark.slow
def test_a_script_that_keeps_going_trains_to_the_same_weights(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = subprocess.run([sys.executable, script, "-", "--lr", "1"], capture_output=True, text=True, check=True)
    assert main(["profile", "--keep-going", "--steps", "1", "--warmup", "1", str(script), "-", "--lr", "1"]) == 0
    assert plain.stdout.startswith("trained - --lr 1 ")
    assert plain.stdout.strip() in capfd.readouterr().out.splitlines()


LOOP = """\
import torch
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    opt.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    opt.step()
for _ in range(6):
    step()
"""
LONGER_LOOP = LOOP.replace("range(6)", "range(9)")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_the_exit_status_is_the_scripts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    brief = ["profile", "--keep-going", "--steps", "2", "--warmup", "1"]
    assert main([*brief, write(tmp_path, LOOP + "import sys; sys.exit(3)")]) == 3
    assert main([*brief, write(tmp_path, LOOP + "import sys; sys.exit()")]) == 0
    assert main([*brief, write(tmp_path, LOOP + "raise SystemExit('went wrong')")]) == 1
    assert "went wrong" in capfd.readouterr().err


ENDS = {
    "a number": ("sys.exit(3)", 3),
    "a text": ("sys.exit('went wrong')", 1),
    "nothing": ("sys.exit()", 0),
    "None": ("sys.exit(None)", 0),
    "True": ("sys.exit(True)", 1),
    "an exception": ("raise KeyError('lost')", 1),
    "an interrupt": ("raise KeyboardInterrupt", 130),
    "its end": ("", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_exit_status_is_the_scripts_however_it_ends(name: str, tmp_path: Path) -> None:
    """A script's own exit status takes precedence. A script that exits with 0 and leaves no profile ends with 1."""
    end, status = ENDS[name]
    path = write(tmp_path, f"import sys\n{LOOP}{end}\n")
    brief = ["profile", "--warmup", "1", "--steps", "3", "--keep-going"]
    assert main([*brief, path]) == status
    assert main([*brief, "--warmup", "9", path]) == (status or 1)


@pytest.mark.parametrize(
    ("end", "status"),
    [("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM), ("os._exit(4)", 4), ("sys.exit(-1)", 255)],
)
def test_a_script_that_ends_the_process_ends_it_as_ever(end: str, status: int, tmp_path: Path) -> None:
    path = write(tmp_path, f"import os, signal, sys\n{end}\n")
    done = subprocess.run([sys.executable, "-m", "flatout", "profile", path], capture_output=True, timeout=300)
    assert done.returncode == status


@pytest.mark.parametrize("status", [0, 3])
def test_an_error_of_the_profiler_does_not_hide_the_scripts_status(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_space(profiler: object, file: str) -> None:
        raise OSError("no space left")

    path = write(tmp_path, LOOP + f"raise SystemExit({status})")
    brief = ["profile", "--warmup", "1", "--steps", "2", "--keep-going", path]
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", no_space)
        assert main(brief) == (status or 1)
    assert "no space left" in capfd.readouterr().err
    folder = tmp_path / "folder"
    folder.mkdir()
    write(tmp_path, LOOP + f"import os; os.rmdir({str(folder)!r}); raise SystemExit({status})")
    assert main([*brief[:-1], "--html", str(folder / "page.html"), path]) == (status or 1)
    assert "page.html" in capfd.readouterr().err


def test_the_needed_steps_are_printed_before_the_script_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "import sys; print('it begins', file=sys.stderr)\n" + LOOP)
    assert main(["profile", "--warmup", "2", "--steps", "4", path]) == 0
    captured = capfd.readouterr()
    before, after = captured.err.split("it begins")
    assert re.search(r"\b5\b.*\b12\b.*--steps 4", before)  # steps of the smallest profile and of --steps 4
    assert re.search(r"\b2\b.*\b4\b", after)
    assert timed_steps(captured.out) == 2


NAMES = ['a"b', "back\\slash", "tab\t", "esc\x1b[31m", "\u202eright", "\x7f\x85", "%s{}<b>"]


def test_names_of_files_may_be_anything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{name}.py" for name in NAMES]
    for file in files:
        file.write_text("import torch\ndef call(x):\n    return torch.relu(x).sum().item()\n")
    path = write(
        tmp_path,
        f"import runpy, torch\ncalls = [runpy.run_path(name)['call'] for name in {list(map(str, files))!r}]\n"
        + LOOP.replace("    step()", "    step()\n    [call(torch.ones(3)) for call in calls]"),
    )
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    assert main(["profile", "--warmup", "1", "--steps", "2", "--html", str(page), "--json", str(figures), path]) == 0
    shown = capfd.readouterr().out + page.read_text(encoding="utf-8")
    assert not set(shown) & set("\x1b\u202e\x7f\x85")
    syncs = json.loads(figures.read_text(encoding="utf-8"))["syncs"]
    assert {sync["where"].removeprefix(f"{tmp_path}/") for sync in syncs} >= {f"{name}.py:3" for name in NAMES}


def test_names_that_a_user_gives_may_be_anything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "\u202e\x1b[31mtrain.py", tmp_path / "\u202e\x1b[31mpage.html"
    path.write_text(LOOP)
    assert main(["profile", "--warmup", "1", "--steps", "9", "--html", str(page), str(path)]) == 0
    assert main(["profile", "--warmup", "9", str(path)]) == 1
    captured = capfd.readouterr()
    assert page.exists()
    assert not set(captured.out + captured.err) & set("\x1b\u202e")


def test_an_exception_shows_pythons_traceback_and_the_profile_so_far(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's hook adds the number of the rank
    path = write(tmp_path, LOOP + "raise KeyError('lost')")
    assert main(["profile", "--steps", "50", "--warmup", "1", path]) == 1
    captured = capfd.readouterr()
    shown = captured.err[captured.err.index("Traceback") :].splitlines()
    assert shown[1] == f'  File "{path}", line 10, in <module>'
    assert [line for line in shown if not line.startswith("flatout:")][-1] == "KeyError: 'lost'"
    assert timed_steps(captured.out) == 3  # six steps: one warms up, two search for syncs


def test_too_few_updates_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", write(tmp_path, LOOP)]) == 0  # just enough for one step
    assert timed_steps(capfd.readouterr().out) == 1
    assert main(["profile", "--warmup", "4", write(tmp_path, LOOP)]) == 1
    assert re.search(r"\b6\b.*\b7\b", capfd.readouterr().err.splitlines()[-1])
    assert main(["profile", write(tmp_path, "print('no training')")]) == 1
    captured = capfd.readouterr()
    assert re.search(r"\b0\b", captured.err.splitlines()[-1])
    assert captured.out == "no training\n"


def test_timed_steps_come_before_the_profiler_and_without_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noting = LONGER_LOOP.replace("    step()", "    step()\n    print('profiled', torch.autograd._profiler_enabled())")
    path, figures = write(tmp_path, noting), tmp_path / "figures.json"
    assert main(["profile", "--keep-going", "--warmup", "1", "--steps", "2", "--json", str(figures), path]) == 0
    seen = re.findall(r"^profiled (\w+)", capfd.readouterr().out, re.MULTILINE)
    # One warms up, two search, and two are timed. The fifth update starts the profiler, and the seventh ends it.
    assert seen == ["False"] * 4 + ["True"] * 2 + ["False"] * 3
    found = json.loads(figures.read_text())
    assert (len(found["steps"]), found["before"], found["profiled_steps"]) == (2, 3, 2)


def test_a_script_that_ends_before_the_profiler_has_a_profile_without_a_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, trace, figures = write(tmp_path, LOOP), tmp_path / "trace.json", tmp_path / "figures.json"
    brief = ["profile", "--warmup", "1", "--steps", "9"]
    assert main([*brief, "--json", str(figures), path]) == 0
    captured = capfd.readouterr()
    assert timed_steps(captured.out) == 3
    assert re.search(r"\b3 of 9\b.*\b0\b", captured.err)
    found = json.loads(figures.read_text())
    assert (found["profiled_steps"], found["profiled_seconds"], found["operators"]) == (0, None, [])
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"])
    assert main([*brief, "--trace", str(trace), path]) == 1
    assert "trace.json" in capfd.readouterr().err
    assert not trace.exists()


def test_several_optimizers_accumulation_and_a_scaler(tmp_path: Path) -> None:
    text = """
import torch
models = [torch.nn.Linear(4, 2) for _ in range(2)]
opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
scaler = torch.amp.GradScaler("cpu")
for _ in range(8):
    for _ in range(3):
        scaler.scale(sum(m(torch.ones(8, 4)).sum() for m in models)).backward()
    for opt in opts:
        scaler.step(opt)
        opt.zero_grad()
    scaler.update()
"""
    path = tmp_path / "two.py"
    path.write_text(text)
    found = profile(tmp_path, path)
    assert len(found["steps"]) == 2
    phases = found["phases"]
    assert min(phases["forward"], phases["backward"], phases["update"]) > 0
    addmm = next(operator for operator in found["operators"] if operator["name"] == "aten::addmm")
    assert addmm["calls"] == 6


def test_the_forward_of_a_script_without_modules_is_found_by_its_backward(tmp_path: Path) -> None:
    path = tmp_path / "functional.py"
    path.write_text("""
import time, torch
w = torch.randn(4, 2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.1)
for _ in range(8):
    out = torch.ones(8, 4) @ w
    time.sleep(10)
    loss = out.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    found = profile(tmp_path, path)
    assert found["marked"] == {"forward"}


def test_closures_of_lbfgs_are_not_part_of_the_update(tmp_path: Path) -> None:
    path = tmp_path / "lbfgs.py"
    path.write_text("""
import time, torch
model = torch.nn.Linear(4, 2)
opt = torch.optim.LBFGS(model.parameters(), max_iter=1)
def closure():
    opt.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    time.sleep(10)
    loss.backward()
    return loss
for _ in range(8):
    opt.step(closure)
""")
    found = profile(tmp_path, path)
    assert found["marked"] == {"forward"}
    assert found["phases"]["update"] > 0


def alone(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flatout", "profile", "--steps", "2", "--warmup", "1", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert timed_steps(done.stdout) == 2  # the profile is shown once
    return done


def test_an_end_in_a_thread_is_quiet(tmp_path: Path) -> None:
    start = "t = threading.Thread(target=train)\nt.start()\nt.join()\n"
    path = write(tmp_path, f"import threading\ndef train():\n{textwrap.indent(LONGER_LOOP, '    ')}{start}")
    assert "Traceback" not in alone(path).stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_children_end_as_themselves_and_take_nothing_along(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
import os
for idle in (True, False):
    child = os.fork()
    if child == 0:
        if not idle:
{textwrap.indent(LOOP, " " * 12)}
        raise SystemExit(3 if idle else 4)
    print("ended with", os.waitpid(child, 0)[1] >> 8)
if os.fork() == 0:
    pass  # runs off the script's end
else:
{textwrap.indent(LONGER_LOOP, "    ")}
""",
    )
    done = alone(path)
    assert "ended with 3\nended with 4\n" in done.stdout
    assert done.stderr.count("flatout:") == 1  # before the script starts, and children print no line


def test_a_script_with_flatout_is_not_marked_twice(tmp_path: Path) -> None:
    path = tmp_path / "with_flatout.py"
    path.write_text("""
import torch, flatout, time
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(80, 4), torch.zeros(80, dtype=torch.long))
loss = lambda out, y: (time.sleep(10), torch.nn.functional.cross_entropy(out, y))[1]
off = {"compile": False, "workers": False, "precision": False}
run = flatout.optimize(model, DataLoader(data, batch_size=8), opt, loss, budget=0, techniques=off)
for batch in run.loader:
    run.step(batch)
""")
    found = profile(tmp_path, path)
    assert found["marked"] == {"forward"}
    assert 0 < found["phases"]["forward"] < found["seconds"]
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"])


def test_a_profile_restores_the_interpreters_state(script: Path) -> None:
    before = sys.argv, list(sys.path), sys.modules["__main__"], dict(_global_optimizer_post_hooks)
    assert main(["profile", "--steps", "1", "--warmup", "1", str(script), "-"]) == 0
    after = sys.argv, list(sys.path), sys.modules["__main__"], dict(_global_optimizer_post_hooks)
    assert after == before
    assert not torch.autograd._profiler_enabled()


def test_bad_arguments(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path / "none.py")]) == 1
    assert "none.py" in capsys.readouterr().err
    assert main(["profile", "--html", str(tmp_path / "no" / "file"), str(script)]) == 1
    assert re.search("--html.*no/file", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["profile", "--steps", "0", str(script)])
    assert re.search(r"--steps: .*\b0\b", capsys.readouterr().err)


@pytest.mark.slow
def test_workers_of_a_script_that_spawns_find_their_main(tmp_path: Path) -> None:
    path = tmp_path / "spawning.py"
    path.write_text("""
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(4)

if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Samples(), 4, num_workers=1, multiprocessing_context="spawn"):
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
""")
    alone(str(path))
