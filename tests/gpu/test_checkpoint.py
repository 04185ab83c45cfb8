"""Checkpoints of a training on a GPU: of one step, however far the host is ahead, and gone on from."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.checkpoint import read
from flatout.checkpoint.copies import HostCopies
from tests.checkpoint.test_file import equal


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(32, 64), torch.arange(32) % 10) for _ in range(6)]
    options = {"techniques": {"fused_optimizer": True}, "budget": 0, "deterministic": True, "seed": 3} | options
    return flatout.optimize(model, batches, optimizer, functional.cross_entropy, **options)


def test_a_copy_is_of_its_step_though_the_host_runs_ahead():
    weight = torch.zeros(1 << 22, device="cuda")
    copies = HostCopies()
    for step in range(20):
        torch.cuda._sleep(1_000_000)
        weight.fill_(step)
        found = copies.copy({"weight": weight})
        for later in range(5):
            weight.fill_(100 + later)
        copies.wait()
        assert torch.equal(found["weight"], torch.full((1 << 22,), float(step)))
        assert found["weight"].is_pinned()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_goes_on_bit_for_bit(precision, asynchronous, tmp_path):
    run = make(precision=precision)
    try:
        batches = iter(run.loader)
        for _ in range(3):
            run.step(next(batches))
        run.save(tmp_path / "a.pt", asynchronous=asynchronous)
        losses = [run.step(batch) for batch in batches]
        run.flush_saves()
        other = make(precision=precision)
        other.load(tmp_path / "a.pt")
        assert equal([other.step(batch) for batch in other.loader], losses)
        assert equal(other.state_dict()["job"], run.state_dict()["job"])
        other.undo()
    finally:
        run.undo()


def test_a_graphed_step_goes_on_from_what_was_loaded(tmp_path):
    forced = {"techniques": {"fused_optimizer": True, "cuda_graph": True, "compile": False}}
    run = make(deterministic=False, seed=None, **forced)
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
    run.save(tmp_path / "a.pt")
    expected = [run.step(batch) for batch in run.loader]
    run.load(tmp_path / "a.pt")
    again = [run.step(batch) for batch in run.loader]
    torch.testing.assert_close(torch.stack(again), torch.stack(expected), rtol=1e-3, atol=1e-4)
    assert read(tmp_path / "a.pt")["steps"] == 18
    run.undo()
