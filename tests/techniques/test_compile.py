"""The compiled call: compiled for the inputs of the trial, plain for all others, gone when switched off."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.mfu import count_flops
from flatout.techniques.compile import RELEARN_AFTER, CompiledCall, CompileSwitch


class Recorder:
    """Stands where torch.compile's result stands, and counts."""

    def __init__(self, module):
        self.module = module
        self.shapes = []

    def __call__(self, *args, **kwargs):
        self.shapes.append(tuple(args[0].shape))
        return self.module._call_impl(*args, **kwargs)


@pytest.fixture
def recorded():
    module = nn.Linear(4, 2)
    recorder = Recorder(module)
    return module, recorder, CompiledCall(module, recorder)


def test_inputs_seen_while_learning_run_compiled_and_others_plain(recorded):
    _, recorder, call = recorded
    call(torch.ones(8, 4))
    call.learning = False
    call(torch.ones(8, 4))
    call(torch.ones(3, 4))
    call(torch.ones(8, 4, dtype=torch.float32).requires_grad_())
    with torch.no_grad():
        call(torch.ones(8, 4))
    assert recorder.shapes == [(8, 4), (8, 4)]
    assert call.plain_calls == 3


def test_counting_flops_runs_plain_and_is_not_noted(recorded):
    module, recorder, call = recorded
    module._compiled_call_impl = call
    for call.learning in (True, False):
        assert count_flops(module, torch.ones(8, 4)).forward == 2 * 8 * 4 * 2
    call(torch.ones(8, 4))
    assert recorder.shapes == []
    assert call.plain_calls == 1


def test_the_mode_is_part_of_what_was_compiled(recorded):
    module, recorder, call = recorded
    call(torch.ones(8, 4))
    call.learning = False
    module.eval()
    call(torch.ones(8, 4))
    assert len(recorder.shapes) == 1
    module.train()
    call(torch.ones(8, 4))
    assert len(recorder.shapes) == 2


def test_what_training_uses_all_the_time_is_learnt_once(recorded):
    _, recorder, call = recorded
    call.learning = False
    x, other = torch.ones(8, 4), torch.ones(9, 4)
    for _ in range(RELEARN_AFTER + 3):
        call(x)
    assert recorder.shapes == [(8, 4)] * 3
    for _ in range(RELEARN_AFTER + 3):
        call(other)
    assert len(recorder.shapes) == 3
    assert call.plain_calls == 2 * RELEARN_AFTER + 3


def test_switching_leaves_nothing_behind():
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    keys = list(module.state_dict())
    switch = CompileSwitch(module)
    for _ in range(2):
        switch.enable()
        assert isinstance(module._compiled_call_impl, CompiledCall)
        assert list(module.state_dict()) == keys
        switch.disable()
        assert module._compiled_call_impl is None
    switch.enable()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied._compiled_call_impl is None
        assert list(copied.state_dict()) == keys


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one_and_the_tail_batch_runs_plain():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 8), torch.randint(0, 3, (40,)))
    models = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    loader = DataLoader(data, batch_size=9)
    rest = {"precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}
    run = flatout.optimize(
        models[0], loader, opts[0], functional.cross_entropy, techniques=rest | {"compile": True}, budget=0
    )
    call = models[0]._compiled_call_impl
    losses = [run.step(batch).item() for _ in range(2) for batch in run.loader]
    assert call.plain_calls == 2  # 40 = 4 * 9 + 4: one tail batch an epoch
    expected = []
    for _ in range(2):
        for x, y in loader:
            opts[1].zero_grad()
            loss = functional.cross_entropy(models[1](x), y)
            loss.backward()
            opts[1].step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-3)
    assert run.evaluate(loader)["loss"] > 0
    run.undo()
    assert models[0]._compiled_call_impl is None


def test_models_do_not_use_up_each_others_compilations():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    limit = torch._dynamo.config.recompile_limit
    compile_ = torch.compile
    for _ in range(limit + 2):
        model = nn.Linear(4, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda call: compile_(call, backend=backend))
            switch = CompileSwitch(model)
        switch.enable()
        model(torch.ones(3, 4))
    assert len(compiled) == limit + 2


def test_a_compiler_that_fails_is_a_rejection_with_its_reason(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand a long trace")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: compile_(call, backend=broken))
    model = nn.Linear(8, 3)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    run = flatout.optimize(
        model,
        DataLoader(data, batch_size=8),
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques={"precision": False, "workers": False, "in_memory": False, "fused_optimizer": False},
        expected_steps=10**9,
    )
    row = next(row for row in run.report.rows if row.technique == "compile")
    assert row.status == "rejected"
    assert "no compiler here" in row.why
    assert "\n" not in row.why
    assert model._compiled_call_impl is None
    run.step(next(iter(run.loader)))


@pytest.mark.parametrize("make", [torch.jit.script, torch.compile])
def test_models_that_come_compiled_are_left_alone(make):
    torch._dynamo.reset()
    model = make(nn.Linear(8, 3))
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 4
    run = flatout.optimize(
        model,
        batches,
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques={"compile": True, "precision": False},
        budget=0,
    )
    row = next(row for row in run.report.rows if row.technique == "compile")
    assert row.status == "not applicable"
