"""The compiled call: compiled for the inputs of the trial, plain for all others, gone when switched off."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.job import Job
from flatout.mfu import count_flops
from flatout.techniques.calls import signature
from flatout.techniques.compile import (
    MOST_RECOMPILATIONS,
    RELEARN_AFTER,
    Compile,
    CompiledCall,
    CompileSwitch,
    _cached_for,
    _entry,
    why_no_compiler,
)


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
    assert model._compiled_call_impl is None
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
        techniques={"compile": True, "precision": False, "workers": False, "fused_optimizer": True},
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

    call = CompiledCall(module, torch.compile(_entry(module), backend=backend))
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

    call = model._compiled_call_impl = CompiledCall(model, breaks)
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
    call = other._compiled_call_impl = CompiledCall(other, hungry)
    call._learn(signature((x,), {})._replace(kind=(True, signature((x,), {}).kind)))
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
    call = model._compiled_call_impl = CompiledCall(model, torch.compile(_entry(model), backend=backend))
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

    call = CompiledCall(module, replay, reuses_outputs=True)
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
