"""Checkpoints of a training on a GPU: consistent state of one step while the host runs ahead, and resume."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.training.checkpoint import read, write
from flatout.training.checkpoint.writer import HostCopies
from tests.training.checkpoint.test_file import equal


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


def test_loading_takes_no_second_model_on_the_device_and_what_does_not_fit_changes_nothing(tmp_path):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(4096, 4096, bias=False).cuda()  # 64 MiB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(torch.randn(2, 4096), torch.zeros(2, dtype=torch.int64)) for _ in range(2)]
        return flatout.optimize(model, batches, optimizer, functional.cross_entropy, budget=0)

    run = made()
    run.save(tmp_path / "a.pt")
    state = read(tmp_path / "a.pt")
    write(tmp_path / "wrong.pt", {name: value for name, value in state.items() if name != "plan"})
    for batch in run.loader:
        run.step(batch)
    trained = run.model.weight.detach().cpu()
    run.optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match="of another training"):
        run.load(tmp_path / "wrong.pt")
    assert torch.equal(run.model.weight.cpu(), trained)
    run.load(tmp_path / "a.pt")
    assert torch.equal(run.model.weight.cpu(), state["job"]["modules"][0]["weight"])
    assert torch.cuda.max_memory_allocated() - before < 32 << 20
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
