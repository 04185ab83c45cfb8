"""Asynchronous writes: consistent states of one step, and reported errors."""

import collections
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from flatout.training.checkpoint import Writer, file, read
from flatout.training.checkpoint.writer import HostCopies, mapped


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.wait()


def test_a_state_is_that_of_the_step_it_was_written_at(writer, tmp_path, held_disk):
    """Training continues while the writing thread is blocked."""
    weights, groups = [torch.zeros(1000) for _ in range(4)], {"lr": 1.0}
    writer.write(tmp_path / "a.pt", {"weights": weights, "group": groups}, asynchronous=True)
    assert held_disk.reached.wait(60)
    for weight in weights:
        weight += 1
    groups["lr"] = 2.0
    held_disk.let_go.set()
    writer.wait()
    found = read(tmp_path / "a.pt")
    assert found["group"] == {"lr": 1.0}
    assert all(torch.equal(weight, torch.zeros(1000)) for weight in found["weights"])


def test_the_next_state_waits_for_the_one_before(writer, tmp_path):
    weight = torch.zeros(500_000)
    for step in range(5):
        weight.fill_(step)
        writer.write(tmp_path / f"{step}.pt", {"weight": weight, "step": step}, asynchronous=True)
    writer.wait()
    for step in range(5):
        found = read(tmp_path / f"{step}.pt")
        assert found["step"] == step
        assert torch.equal(found["weight"], torch.full_like(weight, step))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_to_come_then_comes_when_the_file_is_there(writer, tmp_path, asynchronous):
    seen = []
    path = tmp_path / "a.pt"
    writer.write(path, {"step": 3}, asynchronous=asynchronous, then=lambda: seen.append(read(path)))
    writer.wait()
    assert seen == [{"step": 3}]


@pytest.mark.filterwarnings("ignore:.*nowhere:RuntimeWarning")
def test_an_error_in_the_writing_thread_is_raised_once_by_the_next_call_which_writes(writer, tmp_path):
    writer.write(tmp_path / "nowhere" / "a.pt", {}, asynchronous=True)
    with pytest.raises(FileNotFoundError):
        writer.write(tmp_path / "b.pt", {}, asynchronous=True)
    writer.write(tmp_path / "c.pt", {}, asynchronous=True)
    writer.wait()
    assert sorted(os.listdir(tmp_path)) == ["b.pt", "c.pt"]


def test_an_interrupted_wait_leaves_the_memory_to_the_write_under_way(writer, tmp_path, held_disk):
    weight = torch.zeros(1000)
    writer.write(tmp_path / "a.pt", {"w": weight}, asynchronous=True)
    with held_disk.impatient(), pytest.raises(KeyboardInterrupt):
        writer.wait()
    weight += 1
    later = threading.Thread(target=lambda: writer.write(tmp_path / "b.pt", {"w": weight}, asynchronous=True))
    later.start()
    held_disk.let_go.set()
    later.join(60)
    writer.wait()
    assert torch.equal(read(tmp_path / "a.pt")["w"], torch.zeros(1000))
    assert torch.equal(read(tmp_path / "b.pt")["w"], torch.ones(1000))


def test_copies_reuse_their_memory():
    copies = HostCopies()
    state = {"a": torch.ones(10), "b": [torch.zeros(3, 2).t()]}
    first = copies.copy(state)
    memory = first["a"].data_ptr(), first["b"][0].data_ptr()
    second = copies.copy(state)
    assert (second["a"].data_ptr(), second["b"][0].data_ptr()) == memory
    assert second["b"][0].stride() == state["b"][0].stride()
    grown = copies.copy({"a": torch.ones(20), "b": state["b"]})
    assert torch.equal(grown["a"], torch.ones(20))
    assert torch.equal(grown["b"][0], state["b"][0])


def test_tied_weights_are_written_once(writer, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    writer.write(tmp_path / "a.pt", model.state_dict(), asynchronous=True)
    writer.wait()
    assert (tmp_path / "a.pt").stat().st_size < 1.5 * 64 * 64 * 4


def test_containers_keep_what_they_are(writer, tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    state["counts"] = collections.Counter({5: 2, np.int64(7): 1})
    state["numbers"] = (np.float64(0.5), np.int64(3), True, None)
    writer.write(tmp_path / "a.pt", state, asynchronous=True)
    writer.wait()
    found = read(tmp_path / "a.pt")
    assert type(found) is collections.OrderedDict
    assert found._metadata == state._metadata
    assert found["counts"] == state["counts"]
    assert found["numbers"] == (0.5, 3, True, None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unreadable_value_is_refused_with_its_path(writer, tmp_path, asynchronous):
    with pytest.raises(TypeError, match=r"state\['scheduler'\]\[1\].*function"):
        writer.write(tmp_path / "a.pt", {"scheduler": [1, lambda: 0]}, asynchronous=asynchronous)
    assert os.listdir(tmp_path) == []


class Part(torch.Tensor):
    """Stand-in for a tensor that is sharded over processes."""


def test_tensors_of_other_classes_are_refused():
    with pytest.raises(TypeError, match=r"state\[0\].*Part.* torch\.distributed\.checkpoint"):
        mapped([torch.ones(2).as_subclass(Part)], torch.clone)


def test_views_of_the_same_memory_stay_apart():
    memory = torch.arange(6.0)
    found = mapped([memory[:3], memory[3:], memory[:3]], torch.clone)
    assert [t.tolist() for t in found] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert found[0] is found[2]


@pytest.mark.slow
def test_a_process_that_ends_finishes_what_it_writes(tmp_path):
    script = (
        "import sys, torch; from flatout.training.checkpoint import Writer\n"
        "writer = Writer(); writer.write(sys.argv[1], {'w': torch.ones(3_000_000)}, asynchronous=True)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.pt"], check=True, timeout=120)
    assert torch.equal(file.read(tmp_path / "a.pt")["w"], torch.ones(3_000_000))
