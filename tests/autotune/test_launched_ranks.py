"""Scripts with ``DistributedDataParallel`` of their own under ``torchrun -m flatout run``."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.distributed.launch import Ended, torchrun_module
from tests.reasons import reasons

pytestmark = pytest.mark.slow

SCRIPT = """
import gc, os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(512, 32), torch.randint(4, (512,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)

def tell(*words):  # at once, and not mixed with the lines of other ranks
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

def train(epochs, batches=lambda: loader):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in batches():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        tell("loss", rank, epoch, total / len(loader))

def end():
    global model
    tell("weights", rank, float(sum(p.detach().double().abs().sum() for p in model.parameters())))
    tell("keys", rank, *model.state_dict())
    dist.destroy_process_group()
    del model  # the model holds the group, and a thread of gloo that is at work when Python ends aborts the process
    gc.collect()
"""

TUNING = """
from flatout.autotune import engine, module_tuning
def on_begin(function):
    turn = module_tuning.ModuleTuning.turn
    def patched(self, seconds):
        function()
        return turn(self, seconds)
    module_tuning.ModuleTuning.turn = patched
"""
"""Code that calls a function at the beginning of each turn. Scripts of users have none of it."""


def under_flatout(script: str, tmp_path: Path, *options: str, **variables: str) -> Ended:
    (tmp_path / "train.py").write_text(script)
    files = ("--html", str(tmp_path / "report.html"), "--json", str(tmp_path / "report.json"))
    return torchrun_module("flatout", "run", *files, *options, str(tmp_path / "train.py"), **variables)


def plainly(script: str, tmp_path: Path) -> Ended:
    (tmp_path / "train.py").write_text(script)
    return torchrun_module("", str(tmp_path / "train.py"))


def told(ended: Ended, word: str) -> dict[tuple[str, ...], str]:
    """Return what the ranks told about a word, by rank and number."""
    lines = [line.split() for line in ended.out if line.startswith(f"{word} ")]
    return {tuple(line[1:-1]): line[-1] for line in lines}


def said(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("flatout: ")]


def test_an_unchanged_script_trains_as_without_flatout(tmp_path: Path) -> None:
    script = SCRIPT + "train(60)\nend()\n"
    expected = plainly(script, tmp_path)
    found = under_flatout(script, tmp_path, "--without", "compile", "--plan", "none")
    assert expected.status == found.status == [0], found.err
    losses, usual = told(found, "loss"), told(expected, "loss")
    assert losses.keys() == usual.keys()
    assert all(math.isclose(float(losses[key]), float(usual[key]), rel_tol=0.02, abs_tol=0.01) for key in usual)
    weights = set(told(found, "weights").values())
    assert len(weights) == 1
    keys = [{line for line in ended.out if line.startswith("keys")} for ended in (found, expected)]
    assert keys[0] == keys[1]
    data = json.loads((tmp_path / "report.json").read_text())
    assert [each["module"] for each in data["modules"]] == ["Sequential"]
    assert any(row["trials"] for row in data["modules"][0]["report"]["rows"])
    assert len(said(found)) == len(set(said(found)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_turn_ends_all_soon(rank: int, tmp_path: Path) -> None:
    dies = f"""
def dies():
    if rank == {rank}:
        tell("killed", time.time())
        os.kill(os.getpid(), 9)
on_begin(dies)
train(1000)
"""
    ended = under_flatout(SCRIPT + TUNING + dies, tmp_path)
    assert ended.status == [1]
    assert ended.seconds_since("killed") < 30


def test_a_rank_that_ends_in_a_turn_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """The ranks run without torchrun, which would kill the other rank."""
    ends = """
def ends():
    if rank == 1:
        tell("ended", time.time())
        os._exit(0)
on_begin(ends)
try:
    train(1000)
except RuntimeError as error:
    tell("failed")
    os._exit(3)
"""
    ended = under_flatout(SCRIPT + TUNING + ends, tmp_path)
    assert ended.seconds_since("ended") < 30
    assert "failed" in ended.out
    assert len(said(ended)) == 1


def test_uneven_data_under_join_does_not_hang(tmp_path: Path) -> None:
    uneven = """
batches = list(loader)[: 8 + 4 * rank]
with model.join():
    train(1, lambda: batches)
tell("updates", rank, len(batches))
end()
"""
    ended = under_flatout(SCRIPT + uneven, tmp_path)
    assert ended.status == [0], ended.err
    assert len(set(told(ended, "weights").values())) == 1
    assert [reasons(line) for line in said(ended)] == [{"several-ranks"}]


def test_an_error_of_the_script_ends_it_as_without_flatout(tmp_path: Path) -> None:
    fails = """
train(4)
if rank == 1:
    raise ValueError("of the script")
train(1000)
"""
    for launch in (plainly, under_flatout):
        ended = launch(SCRIPT + fails, tmp_path)
        assert ended.status == [1]
        assert len(re.findall("^ValueError: of the script|: ValueError: of the script", ended.err, re.MULTILINE)) >= 1


def test_compiled_code_trains_inside_of_ddp(tmp_path: Path) -> None:
    """The gradients take several buckets, for which Dynamo would make several parts of the model."""
    compiled = """
import flatout
tuning = flatout.auto(techniques={"compile": True}, plan=None)
train(20)
tell("compiled", rank, model.module._compiled_call_impl is not None)
end()
"""
    large = SCRIPT.replace("64, 64", "64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 64")
    ended = plainly(large.replace("Parallel(model)", "Parallel(model, bucket_cap_mb=2)") + compiled, tmp_path)
    assert ended.status == [0], ended.err
    assert told(ended, "compiled") == {("0",): "True", ("1",): "True"}
    assert len(set(told(ended, "weights").values())) == 1
