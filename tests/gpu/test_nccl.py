"""Data-parallel training over NCCL on two GPUs, and a process group of a single process."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.launch import IMPORTS, JOIN, plainly, torchrun
from tests.distributed.test_training import records
from tests.gpu import rank_checks
from tests.ranks import RankPool

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SECONDS = 30.0
"""Limit from the death of a rank to the end of the others."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RankPool(2, tmp_path_factory.mktemp("ranks"), "nccl", "spawn") as pool:
        yield pool


@two_gpus
@pytest.mark.parametrize("name", rank_checks.CASES)
def test_two_ranks(pool, name):
    pool(rank_checks.case, name)


@two_gpus
@pytest.mark.parametrize("weight", [False, True])
def test_a_step_waits_for_no_gpu(pool, weight):
    pool(rank_checks.a_step_waits_for_no_gpu, weight)


@two_gpus
def test_an_unchanged_script_trains_as_in_one_process(tmp_path):
    environment = {"FLATOUT_BUDGET": "0", "OMP_NUM_THREADS": "1"}
    (reference,) = records("quickstart", tmp_path / "one", 1, **environment)
    found = records("quickstart", tmp_path / "two", 2, **environment)
    assert found[1]["weights"] == found[0]["weights"]
    torch.testing.assert_close(found[0]["losses"], reference["losses"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0]["state"], reference["state"], rtol=1e-3, atol=1e-4)


@two_gpus
def test_a_tuned_script_trains_alike_on_both_ranks(tmp_path):
    found = records("quickstart", tmp_path / "two", 2, FLATOUT_BUDGET="8")
    assert found[1]["decisions"] == found[0]["decisions"]
    assert found[1]["weights"] == found[0]["weights"]


@two_gpus
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_all(lost):
    kill = f"""
assert dist.get_backend() == "nccl"
value = torch.ones(1, device=process_group.local_device())
dist.all_reduce(value)
torch.cuda.synchronize()
if dist.get_rank() == {lost}:
    time.sleep(1)
    tell(f"failed {{time.time()}}")
    os.kill(os.getpid(), 9)
while True:
    dist.all_reduce(value)
    torch.cuda.synchronize()
"""
    ended = plainly(JOIN + kill)
    assert ended.seconds_since("failed") < SECONDS
    assert ended.status[lost] == -9
    assert all(ended.status)


def test_a_group_of_one_process_is_not_data_parallel():
    script = """
import flatout
device = process_group.local_device()
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
batches = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(4)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = flatout.optimize(model, batches, optimizer, torch.nn.functional.mse_loss, budget=0, plan=None)
losses = [run.step(batch).item() for _ in range(20) for batch in run.loader]
assert losses[-1] < losses[0]
value = torch.ones(1, device=device)
dist.all_reduce(value)
tell(f"{run.report.row('data_parallel').status}, sum {value.item():g}, on {next(model.parameters()).device}")
run.undo()
dist.destroy_process_group()
"""
    ended = torchrun(IMPORTS + script, ranks=1)
    assert ended.status == [0], ended.err
    assert ended.out == ["not applicable, sum 1, on cuda:0"]
    assert re.search("flatout: ", ended.err) is None
