"""The compiled call: compiled for the inputs of the trial, plain for all others, gone when switched off."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.job import Job
from flatout.mfu import MfuCounter, count_flops
from flatout.techniques.calls import signature
from flatout.techniques.compile import (
    MOST_RECOMPILATIONS,
    RELEARN_AFTER,
    Compile,
    CompiledCall,
    CompileLossSwitch,
    CompileSwitch,
    _cached_for,
    _model_entry,
    why_no_compiler,
)
from tests.helpers import snapshot
from tests.jobs import FORCED, Net, make_data, make_job


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
    return module, recorder, CompiledCall(module._call_impl, recorder, [module])


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
    call = run._job.compiled_loss
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
    assert run._job.compiled_loss is None


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
            patch.setattr(torch, "compile", lambda call, mode: compile_(call, backend=backend))
            switch = CompileSwitch(model)
        switch.enable()
        model(torch.ones(3, 4))
    assert len(compiled) == limit + 2


def test_a_compiler_that_fails_is_a_rejection_with_its_reason(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here\nand a long trace")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, mode: compile_(call, backend=broken))
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
    assert model._compiled_call_impl is run._job.compiled_loss is None
    run.step(next(iter(run.loader)))


def in_place(model):
    model.compile(backend="eager")
    return model


def in_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.jit.script, "ScriptModule"),
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod. in front"),
        (in_place, "the model comes compiled already"),
        (in_part, "the model's part '0' comes compiled already"),
    ],
    ids=["scripted", "compiled", "compiled in place", "compiled in part"],
)
def test_models_that_come_compiled_are_accepted_and_left_alone(make, said):
    torch._dynamo.reset()
    model = make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    keys, own_call = list(model.state_dict()), model._compiled_call_impl
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 4
    run = flatout.optimize(
        model,
        batches,
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques={"precision": False, "workers": False, "fused_optimizer": True},
        budget=0,
    )
    row = next(row for row in run.report.rows if row.technique == "compile")
    assert row.status == "not applicable"
    assert said in row.why
    before = float(run.step(batches[0]))
    assert float(run.step(batches[0])) < before
    assert list(model.state_dict()) == keys
    run.undo()
    assert model._compiled_call_impl is own_call


def test_a_compile_of_the_users_own_after_optimize_survives_undo():
    model = nn.Linear(4, 2)
    switch = CompileSwitch(model)
    switch.enable()
    model.compile(backend="eager")
    own = model._compiled_call_impl
    switch.disable()
    assert model._compiled_call_impl is own


def test_switched_off_it_leaves_no_attribute():
    model = nn.Linear(4, 2)
    names = set(vars(model))
    switch = CompileSwitch(model)
    switch.enable()
    switch.disable()
    assert set(vars(model)) == names


def counted(module):
    """A CompiledCall over Dynamo without a code generator, and the list of what was compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = CompiledCall(module._call_impl, torch.compile(_model_entry(module), backend=backend), [module])
    module._compiled_call_impl = call
    return call, graphs


def test_sizes_that_varied_in_the_trial_are_served_at_any_size_and_others_are_not():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    call, graphs = counted(model)
    for length in (3, 5):
        model(torch.randn(2, length, 4))
    call.learning = False
    assert len(graphs) == 2
    for length in (3, 5, 7, 11):
        model(torch.randn(2, length, 4))
    assert (len(graphs), call.plain_calls) == (2, 0)
    model(torch.randn(6, 5, 4))  # this size did not vary
    model(torch.randn(2, 1, 4))  # 1 is compiled for by itself
    assert (len(graphs), call.plain_calls) == (2, 2)


def test_sizes_that_begin_to_vary_in_training_are_learnt():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    call, graphs = counted(model)
    model(torch.randn(2, 3, 4))
    call.learning = False
    for length in range(4, 4 + RELEARN_AFTER):
        model(torch.randn(2, length, 4))
    assert call.plain_calls == RELEARN_AFTER
    for length in range(100, 110):
        model(torch.randn(2, length, 4))
    assert call.plain_calls == RELEARN_AFTER
    assert len(graphs) == 2
    assert not call.why_off


def test_what_is_tuned_under_inference_mode_serves_under_no_grad_and_for_inference_tensors():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    call, graphs = counted(model)
    x = torch.randn(8, 4)
    expected = model._call_impl(x)
    with torch.inference_mode():
        model(x)
        call.learning = False
        made_there = x * 1
        for inputs in (x, made_there):
            torch.testing.assert_close(model(inputs), expected)
    with torch.no_grad():
        for inputs in (x, made_there):
            torch.testing.assert_close(model(inputs), expected)
    assert (len(graphs), call.plain_calls) == (1, 0)


@pytest.mark.filterwarnings("error")
def test_flips_a_tail_batch_and_a_schedule_do_not_trip_the_watchdog():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
    call, graphs = counted(model)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    model(torch.randn(8, 4)).sum().backward()
    call.learning = False
    for _ in range(5):
        model.train()
        for samples in (8, 8, 3):
            opt.zero_grad()
            model(torch.randn(samples, 4)).sum().backward()
            opt.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
    assert not call.why_off
    assert (len(graphs), call.plain_calls) == (1, 10)


def repeat(times, work):
    for _ in range(times):
        work()


class Counting(nn.Linear):
    """An integer in Python that every step changes: Dynamo compiles for each value."""

    def __init__(self):
        super().__init__(4, 2)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) * self.steps


def test_a_model_that_keeps_compiling_falls_back_once_and_the_guard_is_named():
    torch._dynamo.reset()
    model = Counting()
    call, graphs = counted(model)
    model(torch.randn(8, 4))
    call.learning = False
    with pytest.warns(RuntimeWarning, match=r"torch.compile is off .* eager: .*no longer held: .*steps") as said:
        repeat(2 * MOST_RECOMPILATIONS, lambda: model(torch.randn(8, 4)))
    assert len(said) == 1
    assert len(graphs) == 1 + MOST_RECOMPILATIONS
    assert model.steps == 1 + 2 * MOST_RECOMPILATIONS
    assert CompileSwitch(model).why_off == ""


def test_compiling_again_and_again_in_the_trial_is_a_rejection(monkeypatch):
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, mode: compile_(call, backend="eager"))
    monkeypatch.setattr("flatout.measure.tuner.HOPELESS", float("inf"))
    monkeypatch.setattr("flatout.measure.bench.TRIAL_SECONDS", 0.2)
    model = Counting()
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    with pytest.warns(RuntimeWarning, match="torch.compile is off"):
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
    assert any("no longer held" in trial.failure for trial in row.trials)


def test_a_failure_while_training_falls_back_to_eager_with_its_first_line():
    model, x = nn.Linear(4, 2), torch.randn(8, 4)

    def breaks(*args):
        if not call.learning:
            raise RuntimeError("a kernel broke\nand a long trace")
        return model._call_impl(*args)

    call = model._compiled_call_impl = CompiledCall(model._call_impl, breaks, [model])
    model(x)
    call.learning = False
    with pytest.warns(RuntimeWarning, match="eager: RuntimeError: a kernel broke$") as said:
        repeat(2, lambda: torch.testing.assert_close(model(x), model._call_impl(x)))
    assert len(said) == 1
    assert call.plain_calls == 1


def test_a_mistake_of_the_users_own_and_a_lack_of_memory_stay_theirs():
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    call, _ = counted(model)
    model(x)
    call.learning = False
    model.weight.data = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x)
    assert not call.why_off

    def hungry(*args):
        raise torch.OutOfMemoryError("no memory")

    other = nn.Linear(4, 2)
    call = other._compiled_call_impl = CompiledCall(other._call_impl, hungry, [other])
    call._learn(signature((x,), {})._replace(kind=((True,), signature((x,), {}).kind)))
    call.learning = False
    with pytest.raises(torch.OutOfMemoryError):
        other(x)
    assert not call.why_off


def test_a_backward_that_cannot_be_compiled_falls_back_where_the_call_can_still_be_mended():
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    broken = []

    def backward(graph, inputs):
        if broken:
            raise RuntimeError("no backward here")
        return graph.forward

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)
    call = model._compiled_call_impl = CompiledCall(
        model._call_impl, torch.compile(_model_entry(model), backend=backend), [model]
    )
    model(x).sum().backward()
    call.learning = False
    broken.append(True)
    other = torch.randn(8, 4, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="off"):
        repeat(RELEARN_AFTER + 1, lambda: model(other).sum().backward())


def test_the_modes_that_can_serve(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda call, mode: asked.append(mode) or call)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def job(device, **changes):
        settings = {"optimizer": opt, "loss_fn": None, "compute_loss": None} | changes
        return Job(model=model, loader=[], source=[], device=torch.device(device), **settings)

    def labels(*args, **changes):
        return [candidate.label for candidate in Compile().candidates(job(*args, **changes))]

    assert labels("cpu") == ["default"]
    assert labels("cuda") == ["default", "reduce-overhead"]
    assert labels("cuda", accumulate=2) == labels("cuda", optimizer=None) == ["default"]
    assert labels("cuda", optimizer=None, inference=True) == ["default", "reduce-overhead"]
    assert Compile().forced(job("cuda"), "max-autotune").call._reuses_outputs
    assert Compile().forced(job("cpu"), "max-autotune").value == "max-autotune"
    assert asked[-1] == "max-autotune"
    with pytest.raises(ValueError, match="accumulate"):
        Compile().forced(job("cuda", accumulate=2), "max-autotune")
    with pytest.raises(ValueError, match="needs a GPU"):
        Compile().forced(job("cpu"), "reduce-overhead")
    with pytest.raises(ValueError, match="max-autotune"):
        Compile().forced(job("cpu"), "fastest")


def test_outputs_that_the_next_call_overwrites_are_copied():
    module = nn.Linear(4, 2)
    static = torch.zeros(8, 2)

    def replay(x):
        return {"out": static.copy_(x[:, :2])}

    call = CompiledCall(module._call_impl, replay, [module], reuses_outputs=True)
    x = torch.randn(8, 4)
    first = call(x)["out"]
    call(x + 1)
    assert torch.equal(first, x[:, :2])


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("CXX", "no-such-compiler", "no 'no-such-compiler' here"), ("TORCHDYNAMO_DISABLE", "1", "switched off")],
)
def test_a_machine_that_cannot_compile_is_told_so_without_a_trial(variable, value, said, monkeypatch):
    assert why_no_compiler(torch.device("cpu")) == ""
    monkeypatch.setenv(variable, value)
    assert said in why_no_compiler(torch.device("cpu"))


# -- model and loss as one -----------------------------------------------------------------------------------

CROSS_ENTROPY = functional.cross_entropy
ALONE = FORCED | {"precision": False, "compile": True}
"""Nothing that changes a number, and nothing measured."""


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile without a code generator: receives what it compiles."""
    torch._dynamo.reset()
    made, compile_ = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_(call, backend=backend))
    return made


def by_hand(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def breaking(output, target):
    torch._dynamo.graph_break()
    return functional.cross_entropy(output, target)


class ItsOwnLoss(Net):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


def compiled_job(compute_loss=by_hand, **settings):
    """A job whose loss is compiled, and the batches that it was not compiled for yet."""
    torch.manual_seed(0)
    model = settings.pop("model", None) or Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"optimizer": opt, "loss_fn": None, "compute_loss": compute_loss} | settings
    job = Job(model=model, loader=[], source=[], device=torch.device("cpu"), **settings)
    switch = CompileLossSwitch(job)
    switch.enable()
    return job, switch


LOSSES = {
    "a function": lambda: {"loss_fn": CROSS_ENTROPY},
    "a module": lambda: {"loss_fn": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]))},
    "compute_loss": lambda: {"compute_loss": by_hand},
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", [False, "bf16", "fp16"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_model_and_loss_are_one_graph_for_a_whole_training(loss, precision, accumulate, graphs):
    losses = []
    for choice in (True, False):
        torch.manual_seed(0)
        model = Net()
        opt = torch.optim.Adam(model.parameters(), 0.01)
        loader = DataLoader(make_data(90), batch_size=16)
        run = flatout.optimize(
            model,
            loader,
            opt,
            **LOSSES[loss](),
            scheduler=torch.optim.lr_scheduler.ExponentialLR(opt, 0.99),
            accumulate=accumulate,
            techniques=ALONE | {"compile": choice, "precision": precision},
            budget=0,
        )
        losses.append([])
        torch.manual_seed(1)
        for _ in range(3):
            for batch in run.loader:
                losses[-1].append(run.step(batch))
            losses[-1].append(run.evaluate(loader)["loss"])
        if choice:
            call = run._job.compiled_loss
            assert (len(graphs), call.plain_calls, call.why_off) == (1, 3, "")  # an epoch's last batch is smaller
            assert "cross_entropy" in graphs[0].code
    assert all(value.shape == () and not value.requires_grad for value in losses[0] if isinstance(value, torch.Tensor))
    assert list(map(float, losses[0])) == pytest.approx(list(map(float, losses[1])), rel=1e-6)


def test_the_model_stays_as_it_was_and_runs_plain_outside_of_the_step(graphs):
    model, loader, opt = make_job()
    before, names = snapshot(model)["keys"], set(vars(model))
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    call, compiled = run._job.compiled_loss, len(graphs)
    run.step(next(iter(run.loader)))
    assert model._compiled_call_impl is None
    assert (set(vars(model)), list(model.state_dict())) == (names, before)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net
    model(torch.randn(16, 8))
    assert (len(graphs), call.plain_calls) == (compiled, 0)
    run.undo()
    assert run._job.compiled_loss is None
    assert run.loader is loader


@pytest.mark.usefixtures("graphs")
def test_optimizing_twice_and_from_a_plan_compile_the_loss_again():
    model, loader, opt = make_job()
    first = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    assert first.plan.decisions["compile"] == "default"
    second = flatout.optimize(model, loader, opt, CROSS_ENTROPY, plan=first.plan)
    assert first._job.compiled_loss is None
    assert isinstance(second._job.compiled_loss, CompiledCall)
    first.undo()  # it was replaced
    assert isinstance(second._job.compiled_loss, CompiledCall)


@pytest.mark.usefixtures("graphs")
def test_a_compiled_loss_keeps_nothing_alive():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    run.step(next(iter(run.loader)))
    switch = next(switch for switch in run._switches if isinstance(switch, CompileLossSwitch))
    gone = weakref.ref(model), weakref.ref(run._job)
    del run
    gc.collect()
    assert gone[1]() is None  # while the model lives
    assert (switch.call, switch.why_off) == (None, "")
    flatout.undo(model)
    del model, opt
    gc.collect()
    assert gone[0]() is None


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("model", "given"),
    [
        (Net, {}),
        (lambda: Net().eval(), {}),
        (Net, {"loss_fn": CROSS_ENTROPY}),
        (ItsOwnLoss, {"optimizer": True}),
    ],
    ids=["two values", "inference", "two values with a loss", "a loss of the model's own"],
)
def test_where_no_step_computes_a_loss_of_the_users_the_model_is_compiled(model, given):
    model, loader = model(), [{"x": torch.randn(16, 8)}] * 4
    if "loss_fn" in given:
        loader = DataLoader(make_data(), batch_size=16)
    opt = torch.optim.SGD(model.parameters(), 0.1) if "optimizer" in given else None
    techniques = {"compile": True, "precision": False, "workers": False}
    run = flatout.optimize(model, loader, opt, given.get("loss_fn"), techniques=techniques, budget=0)
    assert isinstance(model._compiled_call_impl, CompiledCall)
    assert run._job.compiled_loss is None


class Unlisted:
    """What no signature looks into."""

    def __init__(self, x, y):
        self.x, self.y = x, y


BATCHES = {
    "tensors": (lambda i, x, y: {"x": x, "y": y}, True),
    "a value that stays": (lambda i, x, y: {"x": x, "y": y, "task": "digits", "weights": [1.0, None]}, True),
    "names": (lambda i, x, y: {"x": x, "y": y, "files": [f"{i}.png"]}, False),
    "lists of other lengths": (lambda i, x, y: {"x": x, "y": y, "boxes": [torch.zeros(4)] * i}, False),
    "bytes": (lambda i, x, y: {"x": x, "y": y, "key": bytes([i])}, False),
    "objects": (lambda i, x, y: {"x": x, "y": y, "rest": Unlisted(x, y)}, False),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_that_do_not_tell_what_was_compiled_for_them_have_the_model_compiled_alone(kind):
    make, whole = BATCHES[kind]
    model = Net()
    job = Job(
        model=model,
        loader=[],
        source=[],
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=None,
        compute_loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]),
        device=torch.device("cpu"),
    )
    job.batches = [make(i, torch.randn(16, 8), torch.zeros(16, dtype=torch.long)) for i in range(3)]
    (candidate,) = Compile().candidates(job)
    assert type(candidate) is type(Compile().forced(job, True)) is (CompileLossSwitch if whole else CompileSwitch)


def test_a_pair_is_a_pair_for_a_loss_function(graphs):
    job, switch = compiled_job(None, loss_fn=CROSS_ENTROPY)
    x, y = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    job.step([x, y])
    switch.freeze()
    job.step((x, y))
    job.step([x, y])
    assert (len(graphs), switch.call.plain_calls) == (1, 0)
    with pytest.raises(TypeError, match=r"got tuple of 3"):
        job.step([x, y, y])


def test_the_modes_of_model_and_loss_are_part_of_what_was_compiled(graphs):
    class Noisy(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return super().forward(functional.dropout(output, 0.5, self.training), target)

    job, switch = compiled_job(None, loss_fn=Noisy())
    batch = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    job.step(batch)
    switch.freeze()
    for module in job.modules:
        module.eval()
        before = switch.call.plain_calls
        job.step(batch)
        assert switch.call.plain_calls == before + 1
        module.train()
    job.step(batch)
    assert (len(graphs), switch.call.plain_calls) == (1, 2)


def test_a_counter_around_the_model_hears_of_every_step(graphs):
    job, _ = compiled_job()
    batch = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    assert isinstance(Compile().forced(job, True), CompileLossSwitch)
    job.step(batch)
    counter = MfuCounter(device=job.device)
    counter.wrap(job.model)
    for _ in range(3):
        job.step(batch)
    job.model.eval()
    job.model(batch[0])
    assert counter.total.steps == 3
    assert len(graphs) == 1
    assert isinstance(Compile().forced(job, True), CompileSwitch)


def test_losses_that_break_the_graph_train_and_do_not_use_up_each_others_compilations(graphs):
    batch = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        before = len(graphs)
        model = type("Another", (Net,), {})()
        plain = by_hand(model.eval(), batch)
        job, switch = compiled_job(None, loss_fn=breaking, model=model)
        torch.testing.assert_close(job.step(batch), plain.detach())
        assert len(graphs) > before
        assert (switch.call.plain_calls, switch.why_off) == (0, "")


@pytest.mark.usefixtures("graphs")
def test_a_loss_that_fails_compiled_goes_on_plain(monkeypatch):
    job, switch = compiled_job()
    batch = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    job.step(batch)
    switch.freeze()
    monkeypatch.setattr(switch.call, "_compiled", lambda batch: 1 / 0)
    with pytest.warns(RuntimeWarning, match=r"off from here on, .*eager: ZeroDivisionError"):
        loss = job.step(batch)
    assert float(loss) > 0
    assert "ZeroDivisionError" in switch.why_off


# -- attention kernels in the keys of torch's caches ---------------------------------------------------------


def test_a_tag_of_the_users_own_is_added_to_and_comes_back():
    config = torch.compiler.config
    with config.patch(cache_key_tag="mine"):
        with _cached_for("math"):
            assert config.cache_key_tag == "mine attention math"
        assert config.cache_key_tag == "mine"


ATTENDING = """
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import profile
from flatout.techniques.compile import CompileSwitch

class Attention(nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).unflatten(-1, (3, 1, 8)).transpose(1, 3).unbind(2)
        return functional.scaled_dot_product_attention(q, k, v)

for flash in (True, False):
    torch._dynamo.reset()
    torch.backends.cuda.enable_flash_sdp(flash)
    model, x = Attention(8, 24), torch.randn(2, 16, 8)
    CompileSwitch(model).enable()
    with torch.no_grad():
        model(x)
        with profile() as seen:
            model(x)
    print(sum("flash" in event.key for event in seen.key_averages()), "flash operators")
"""


@pytest.mark.slow
def test_what_was_compiled_with_flash_attention_is_not_served_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", ATTENDING], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 flash operators", "0 flash operators"]
