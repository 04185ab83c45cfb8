"""Compiled calls: compiled for the inputs of the trial, eager for all others, reverted when disabled."""

import copy
import gc
import importlib.util
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.mfu import MfuCounter, count_flops
from flatout.techniques.compile import MOST_RECOMPILATIONS, RELEARN_AFTER
from tests.helpers import snapshot
from tests.jobs import FORCED, NO_TECHNIQUES, Net, job_of, make_data, make_job, only
from tests.reasons import reasons
from tests.techniques.harness import candidates, decided, forced, refusal, step

ROOT = Path(__file__).parents[2]
CROSS_ENTROPY = functional.cross_entropy
ALONE = FORCED | {"precision": False, "compile": True}
"""Techniques without changes of numbers, and without measurements."""


def repeat(times, work):
    for _ in range(times):
        work()


# -- which calls are compiled --------------------------------------------------------------------------------


@pytest.fixture
def linear(compiler):
    """Layer whose call is compiled, and its candidate."""
    model = nn.Linear(4, 2)
    with forced("compile", True, job_of(model)) as candidate:
        yield model, candidate


def test_inputs_of_the_warmup_run_compiled_and_others_plain(linear, compiler):
    model, candidate = linear
    model(torch.ones(8, 4))
    candidate.end_warmup()
    model(torch.ones(8, 4))
    assert compiler.runs == 2
    model(torch.ones(3, 4))
    model(torch.ones(8, 4, dtype=torch.float32).requires_grad_())
    with torch.no_grad():
        model(torch.ones(8, 4))
    assert compiler.runs == 2


def test_counting_flops_runs_plain_and_is_not_noted(linear, compiler):
    model, candidate = linear
    for end in (candidate.end_warmup, lambda: None):
        assert count_flops(model, torch.ones(8, 4)).forward == 2 * 8 * 4 * 2
        end()
    model(torch.ones(8, 4))
    assert (compiler.runs, compiler.graphs) == (0, [])


def test_the_mode_is_part_of_what_was_compiled(linear, compiler):
    model, candidate = linear
    model(torch.ones(8, 4))
    candidate.end_warmup()
    model.eval()
    model(torch.ones(8, 4))
    assert compiler.runs == 1
    model.train()
    model(torch.ones(8, 4))
    assert compiler.runs == 2


def test_one_repeated_kind_of_call_is_compiled_later(linear, compiler):
    model, candidate = linear
    candidate.end_warmup()
    repeat(RELEARN_AFTER, lambda: model(torch.ones(8, 4)))
    assert compiler.runs == 0
    repeat(3, lambda: model(torch.ones(8, 4)))
    assert compiler.runs == 3
    for other in (torch.ones(9, 4), torch.ones(8, 4, 4)):
        repeat(RELEARN_AFTER + 3, lambda other=other: model(other))
    assert compiler.runs == 3


def test_sizes_that_varied_in_the_trial_are_served_at_any_size_and_others_are_not(linear, compiler):
    model, candidate = linear
    for length in (3, 5):
        model(torch.randn(2, length, 4))
    candidate.end_warmup()
    assert len(compiler.graphs) == 2
    for length in (3, 5, 7, 11):
        model(torch.randn(2, length, 4))
    assert (len(compiler.graphs), compiler.runs) == (2, 6)
    model(torch.randn(6, 5, 4))  # this size did not vary
    model(torch.randn(2, 1, 4))  # compiled separately for size 1
    assert (len(compiler.graphs), compiler.runs) == (2, 6)


def test_sizes_that_begin_to_vary_in_training_are_learnt(linear, compiler):
    model, candidate = linear
    model(torch.randn(2, 3, 4))
    candidate.end_warmup()
    for length in range(4, 4 + RELEARN_AFTER):
        model(torch.randn(2, length, 4))
    assert compiler.runs == 1
    for length in range(100, 110):
        model(torch.randn(2, length, 4))
    assert (len(compiler.graphs), compiler.runs) == (2, 11)
    assert not candidate.stopped


def test_a_call_tuned_under_inference_mode_works_under_no_grad_and_for_inference_tensors(compiler):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(8, 4)
    expected = model(x)
    with forced("compile", True, job_of(model)) as candidate:
        with torch.inference_mode():
            model(x)
            candidate.end_warmup()
            made_there = x * 1
            for inputs in (x, made_there):
                torch.testing.assert_close(model(inputs), expected)
        with torch.no_grad():
            for inputs in (x, made_there):
                torch.testing.assert_close(model(inputs), expected)
    assert (len(compiler.graphs), compiler.runs) == (1, 5)


@pytest.mark.filterwarnings("error")
def test_flips_a_tail_batch_and_a_schedule_do_not_trip_the_watchdog(compiler):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    with forced("compile", True, job_of(model)) as candidate:
        model(torch.randn(8, 4)).sum().backward()
        candidate.end_warmup()
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
        assert not candidate.stopped
    assert (len(compiler.graphs), compiler.runs) == (1, 11)


# -- on and off ----------------------------------------------------------------------------------------------


def test_switching_leaves_no_trace(compiler):
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    keys, names, x = list(model.state_dict()), set(vars(model)), torch.randn(8, 4)
    candidate = forced("compile", True, job_of(model))
    for turn in (1, 2):
        with candidate:
            model(x)
            assert compiler.runs == turn
            assert list(model.state_dict()) == keys
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                copied(x)
                assert list(copied.state_dict()) == keys
        model(x)
        assert set(vars(model)) == names
        assert compiler.runs == turn


def test_a_compile_of_the_users_own_after_optimize_survives_undo():
    model = nn.Linear(4, 2)
    with forced("compile", True, job_of(model)):
        model.compile(backend="eager")
        own = model._compiled_call_impl
    assert model._compiled_call_impl is own


def test_models_do_not_use_up_each_others_compilations(compiler):
    models = [nn.Linear(4, 2) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for model in models:
        with forced("compile", True, job_of(model)):
            model(torch.ones(3, 4))
    assert len(compiler.graphs) == compiler.runs == len(models)


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one_and_the_tail_batch_runs_plain():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 8), torch.randint(0, 3, (40,)))
    models = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    loader = DataLoader(data, batch_size=9)
    run = flatout.optimize(
        models[0], loader, opts[0], CROSS_ENTROPY, techniques=NO_TECHNIQUES | {"compile": True}, budget=0
    )
    compilations = torch._dynamo.utils.counters["frames"]["total"]
    losses = [run.step(batch).item() for _ in range(2) for batch in run.loader]
    assert torch._dynamo.utils.counters["frames"]["total"] == compilations  # 40 = 4 * 9 + 4: one tail batch per epoch
    expected = []
    for _ in range(2):
        for x, y in loader:
            opts[1].zero_grad()
            loss = CROSS_ENTROPY(models[1](x), y)
            loss.backward()
            opts[1].step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-3)
    assert run.evaluate(loader)["loss"] > 0
    run.undo()


# -- applicability -------------------------------------------------------------------------------------------


def in_place(model):
    model.compile(backend="eager")
    return model


def in_part(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (torch.jit.script, "ScriptModule"),
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod."),
        (in_place, "the model"),
        (in_part, "'0'"),
    ],
    ids=["scripted", "compiled", "compiled in place", "compiled in part"],
)
def test_models_that_come_compiled_are_accepted_and_left_alone(make, fact):
    torch._dynamo.reset()
    model = make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    keys, own_call = list(model.state_dict()), model._compiled_call_impl
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 4
    techniques = only("compile") | {"fused_optimizer": True}
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, batches, opt, CROSS_ENTROPY, techniques=techniques, budget=0)
    row = run.report.row("compile")
    assert row.status == "not applicable"
    assert "comes-compiled" in reasons(row)
    assert fact in row.why
    before = float(run.step(batches[0]))
    assert float(run.step(batches[0])) < before
    assert list(model.state_dict()) == keys
    run.undo()
    assert model._compiled_call_impl is own_call


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [("CXX", "no-such-compiler", "no-compiler"), ("TORCHDYNAMO_DISABLE", "1", "compile-disabled")],
)
def test_a_machine_that_cannot_compile_gets_a_reason_without_a_trial(variable, value, code, monkeypatch):
    assert refusal("compile", job_of(nn.Linear(4, 2))) is None
    monkeypatch.setenv(variable, value)
    assert code in refusal("compile", job_of(nn.Linear(4, 2)))


@pytest.fixture
def triton(monkeypatch):
    """Make Triton findable. No test imports it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "triton" else find_spec(name, *rest)
    )


@pytest.mark.usefixtures("triton")
def test_modes_that_can_serve(compiler):
    model = nn.Linear(4, 2)

    def job(device, **changes):
        settings = {"optimizer": torch.optim.SGD(model.parameters(), 0.1)} | changes
        return job_of(model, device=device, **settings)

    def labels(*args, **changes):
        return [candidate.label for candidate in candidates("compile", job(*args, **changes))]

    assert labels("cpu") == ["default"]
    assert labels("cuda") == ["default", "reduce-overhead"]
    assert labels("cuda", accumulate=2) == labels("cuda", optimizer=None) == ["default"]
    assert labels("cuda", optimizer=None, inference=True) == ["default", "reduce-overhead"]
    assert forced("compile", "max-autotune", job("cpu")).value == "max-autotune"
    assert compiler.modes[-1] == "max-autotune"
    for value, where in (
        ("max-autotune", job("cuda", accumulate=2)),
        ("reduce-overhead", job("cpu")),
        ("fastest", job("cpu")),
    ):
        with pytest.raises(ValueError, match=rf"techniques\['compile'\].*{value!r}"):
            forced("compile", value, where)


def test_outputs_that_the_next_call_overwrites_are_copied(monkeypatch):
    static = torch.zeros(8, 2)

    def replay(x):
        return {"out": static.copy_(x[:, :2])}

    monkeypatch.setattr(torch, "compile", lambda call, **how: replay)
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    with forced("compile", "max-autotune", job_of(model, device="cuda", inference=True)):
        first = model(x)["out"]
        model(x + 1)
    assert torch.equal(first, x[:, :2])


# -- failures ------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails_is_a_rejection_with_its_reason(compiler):
    compiler.error = RuntimeError("no compiler here\nand a long trace")
    model = nn.Linear(8, 3)
    names, batches = set(vars(model)), list(DataLoader(make_data(64), batch_size=8))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    job = job_of(model, batches, optimizer=opt, loss_fn=CROSS_ENTROPY, expected_steps=10**9)
    with decided("compile", job=job) as outcome:
        assert set(vars(model)) == names
        step(job, batches[0])
    row = outcome.rows["compile"]
    assert row.status == "rejected"
    assert "no compiler here" in row.why  # the compiler's message
    assert "\n" not in row.why


class Counting(nn.Linear):
    """Layer with a Python integer that every step changes, so that Dynamo recompiles for each value."""

    def __init__(self):
        super().__init__(4, 2)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) * self.steps


def test_a_model_that_keeps_compiling_falls_back_once_and_the_guard_is_named(compiler):
    model = Counting()
    with forced("compile", True, job_of(model)) as candidate:
        model(torch.randn(8, 4))
        candidate.end_warmup()
        with pytest.warns(RuntimeWarning, match=r"torch\.compile.*steps") as said:
            repeat(2 * MOST_RECOMPILATIONS, lambda: model(torch.randn(8, 4)))
        assert "keeps-recompiling" in candidate.stopped
    assert len(said) == 1
    assert len(compiler.graphs) == 1 + MOST_RECOMPILATIONS
    assert model.steps == 1 + 2 * MOST_RECOMPILATIONS
    assert not forced("compile", True, job_of(model)).stopped


@pytest.mark.usefixtures("compiler")
def test_compiling_again_and_again_in_the_trial_is_a_rejection(clock):
    class TimedSGD(torch.optim.SGD):
        def step(self, closure=None):
            clock.advance(0.01)
            return super().step(closure)

    model = Counting()
    batches = list(DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=8))
    opt = TimedSGD(model.parameters(), 0.1)
    job = job_of(model, batches, optimizer=opt, loss_fn=CROSS_ENTROPY, expected_steps=10**9)
    with pytest.warns(RuntimeWarning, match=r"torch\.compile"), decided("compile", job=job) as outcome:
        pass
    row = outcome.rows["compile"]
    assert row.status == "rejected"
    assert any("keeps-recompiling" in reasons(trial.failure) for trial in row.trials)


def test_a_failure_while_training_falls_back_to_eager_with_its_first_line(linear, compiler):
    model, candidate = linear
    x = torch.randn(8, 4)
    expected = model(x)
    candidate.end_warmup()
    compiler.run_error = RuntimeError("a kernel broke\nand a long trace")
    with pytest.warns(RuntimeWarning, match=r"torch\.compile.*RuntimeError: a kernel broke$") as said:
        repeat(2, lambda: torch.testing.assert_close(model(x), expected))
    assert len(said) == 1
    assert compiler.runs == 2
    assert candidate.stopped


def test_a_mistake_of_the_users_own_stays_theirs(linear):
    model, candidate = linear
    model(torch.randn(8, 4))
    candidate.end_warmup()
    model.weight.data = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(8, 4))
    assert not candidate.stopped


def test_a_lack_of_memory_is_raised_and_changes_nothing(linear, compiler):
    model, candidate = linear
    model(torch.randn(8, 4))
    candidate.end_warmup()
    compiler.run_error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, 4))
    assert not candidate.stopped


def test_a_backward_that_cannot_be_compiled_falls_back_where_the_call_can_still_be_mended(compiler):
    broken = []

    def backward(graph, inputs):
        if broken:
            raise RuntimeError("no backward here")
        return graph.forward

    compiler.backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)
    model = nn.Linear(4, 2)
    with forced("compile", True, job_of(model)) as candidate:
        model(torch.randn(8, 4)).sum().backward()
        candidate.end_warmup()
        broken.append(True)
        other = torch.randn(8, 3, 4)
        with pytest.warns(RuntimeWarning, match=r"torch\.compile"):
            repeat(RELEARN_AFTER + 1, lambda: model(other).sum().backward())
        assert candidate.stopped


# -- model and loss as one -----------------------------------------------------------------------------------


def by_hand(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def breaking(output, target):
    torch._dynamo.graph_break()
    return functional.cross_entropy(output, target)


class ItsOwnLoss(Net):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


BATCH = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))


def trained_job(compute_loss=by_hand, model=None, **settings):
    torch.manual_seed(0)
    model = model or Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    return job_of(model, optimizer=opt, compute_loss=compute_loss, **settings)


LOSSES = {
    "a function": lambda: {"loss_fn": CROSS_ENTROPY},
    "a module": lambda: {"loss_fn": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]))},
    "compute_loss": lambda: {"compute_loss": by_hand},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_code_that_is_compiled_is_that_of_the_plain_step(loss, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **how: call)
    model = Net().eval()
    job = trained_job(model=model, **{"compute_loss": None, **LOSSES[loss]()})
    expected = step(job_of(copy.deepcopy(model), **{"compute_loss": None, **LOSSES[loss]()}), BATCH)
    with forced("compile", True, job):
        assert torch.equal(step(job, BATCH), expected)
    with forced("compile", True, job_of(model)):
        assert torch.equal(model(BATCH[0]), copy.deepcopy(model)(BATCH[0]))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", [False, "bf16", "fp16"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_model_and_loss_are_one_graph_for_a_whole_training(loss, precision, accumulate, compiler):
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
        before = compiler.runs
        torch.manual_seed(1)
        for _ in range(3):
            for batch in run.loader:
                losses[-1].append(run.step(batch))
            losses[-1].append(run.evaluate(loader)["loss"])
        assert compiler.runs - before == (15 if choice else 0)  # 6 batches per epoch, and the last one is smaller
        assert len(compiler.graphs) == 1
        assert "cross_entropy" in compiler.graphs[0].code
    assert all(value.shape == () and not value.requires_grad for value in losses[0] if isinstance(value, torch.Tensor))
    assert list(map(float, losses[0])) == pytest.approx(list(map(float, losses[1])), rel=1e-6)


def test_the_model_stays_as_it_was_and_runs_plain_outside_of_the_step(compiler):
    model, loader, opt = make_job()
    before, names = snapshot(model)["keys"], set(vars(model))
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    batch = next(iter(run.loader))
    graphs, runs = len(compiler.graphs), compiler.runs
    run.step(batch)
    assert compiler.runs == runs + 1
    assert (set(vars(model)), list(model.state_dict())) == (names, before)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net
    model(torch.randn(16, 8))
    run.undo()
    run.step(batch)
    assert (len(compiler.graphs), compiler.runs) == (graphs, runs + 1)
    assert run.loader is loader


def test_optimizing_twice_and_from_a_plan_compile_the_loss_again(compiler):
    model, loader, opt = make_job()
    first = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    assert first.plan.decisions["compile"] == "default"
    second = flatout.optimize(model, loader, opt, CROSS_ENTROPY, plan=first.plan, budget=0)

    def compiled_runs(run):
        before = compiler.runs
        run.step(next(iter(loader)))
        return compiler.runs - before

    assert (compiled_runs(first), compiled_runs(second)) == (0, 1)
    first.undo()  # the second run has replaced it
    assert compiled_runs(second) == 1


@pytest.mark.usefixtures("compiler")
def test_a_compiled_loss_keeps_nothing_alive():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=ALONE, budget=0)
    run.step(next(iter(run.loader)))
    of_model, of_loader = weakref.ref(model), weakref.ref(loader)
    del run, loader
    gc.collect()
    assert of_loader() is None  # while the model lives
    flatout.undo(model)
    del model, opt
    gc.collect()
    assert of_model() is None


@pytest.mark.parametrize("loss", [None, CROSS_ENTROPY])
def test_compiled_code_is_freed_with_its_model(compiler, loss):
    compiler.backend = aot_autograd(fw_compiler=boxed_nop)  # its code refers to the code object of the model
    graphs = []
    for _ in range(3):
        model, loader, opt = make_job()
        run = flatout.optimize(model, loader, opt, loss, techniques=ALONE, budget=0)
        for x, y in loader:
            run.step((x, y)) if loss else functional.cross_entropy(model(x), y).backward()
        del run, model, opt
        gc.collect()
        graphs.append(sum(type(one).__name__ == "GraphModule" for one in gc.get_objects()))
    assert graphs[1] == graphs[2]  # torch keeps those of the latest compilation


@pytest.mark.usefixtures("compiler")
def test_a_candidate_whose_job_is_gone_does_nothing():
    job = trained_job()
    candidate, gone = forced("compile", True, job), weakref.ref(job)
    with candidate:
        step(job, BATCH)
        del job
        gc.collect()
        assert gone() is None
        candidate.end_warmup()
        assert not candidate.stopped


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
def test_where_no_step_computes_a_loss_of_the_users_the_model_is_compiled(model, given, compiler):
    model, loader = model(), [{"x": torch.randn(16, 8)}] * 4
    if "loss_fn" in given:
        loader = DataLoader(make_data(), batch_size=16)
    opt = torch.optim.SGD(model.parameters(), 0.1) if "optimizer" in given else None
    techniques = NO_TECHNIQUES | {"compile": True}
    flatout.optimize(model, loader, opt, given.get("loss_fn"), techniques=techniques, budget=0)
    runs = compiler.runs
    with torch.set_grad_enabled(model.training):
        model(torch.randn(16, 8)) if "loss_fn" in given else model(x=torch.randn(16, 8))
    assert compiler.runs == runs + 1


class Unlisted:
    """Batch class whose fields no signature includes."""

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
def test_batches_that_do_not_tell_what_was_compiled_for_them_have_the_model_compiled_alone(kind, compiler):
    make, whole = BATCHES[kind]
    model = Net()
    job = job_of(
        model,
        [make(i, torch.randn(16, 8), torch.zeros(16, dtype=torch.long)) for i in range(3)],
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        compute_loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]),
    )
    for candidate in (*candidates("compile", job), forced("compile", True, job)):
        with candidate:
            runs = compiler.runs
            model(torch.randn(16, 8))
            assert compiler.runs - runs == (0 if whole else 1)


def test_a_pair_is_a_pair_for_a_loss_function(compiler):
    job = trained_job(None, loss_fn=CROSS_ENTROPY)
    x, y = BATCH
    with forced("compile", True, job) as candidate:
        step(job, [x, y])
        candidate.end_warmup()
        step(job, (x, y))
        step(job, [x, y])
        assert (len(compiler.graphs), compiler.runs) == (1, 3)
        with pytest.raises(TypeError, match="tuple of 3"):
            step(job, [x, y, y])


def test_the_modes_of_model_and_loss_are_part_of_what_was_compiled(compiler):
    class Noisy(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return super().forward(functional.dropout(output, 0.5, self.training), target)

    model, loss = Net(), Noisy()
    job = trained_job(None, model, loss_fn=loss)
    with forced("compile", True, job) as candidate:
        step(job, BATCH)
        candidate.end_warmup()
        for module in (model, loss):
            module.eval()
            step(job, BATCH)
            assert compiler.runs == 1
            module.train()
        step(job, BATCH)
    assert (len(compiler.graphs), compiler.runs) == (1, 2)


def test_a_counter_around_the_model_counts_every_step(compiler):
    model = Net()
    job = trained_job(model=model)
    with forced("compile", True, job):
        step(job, BATCH)
        counter = MfuCounter(device="cpu")
        counter.wrap(model)
        for _ in range(3):
            step(job, BATCH)
        model.eval()
        model(BATCH[0])
    assert counter.total.steps == 3
    assert (len(compiler.graphs), compiler.runs) == (1, 1)
    model.train()
    with forced("compile", True, job):
        model(BATCH[0])
    assert compiler.runs == 2  # the model alone


def test_losses_that_break_the_graph_train_and_do_not_use_up_each_others_compilations(compiler):
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        before = len(compiler.graphs), compiler.runs
        model = type("Another", (Net,), {})()
        expected = by_hand(model.eval(), BATCH)
        job = trained_job(None, model, loss_fn=breaking)
        with forced("compile", True, job) as candidate:
            torch.testing.assert_close(step(job, BATCH), expected.detach())
            assert not candidate.stopped
        assert len(compiler.graphs) > before[0]
        assert compiler.runs > before[1]


def test_a_loss_that_fails_compiled_continues_eagerly(compiler):
    job = trained_job()
    with forced("compile", True, job) as candidate:
        step(job, BATCH)
        candidate.end_warmup()
        compiler.run_error = ZeroDivisionError("division by zero")
        with pytest.warns(RuntimeWarning, match=r"torch\.compile.*ZeroDivisionError"):
            assert float(step(job, BATCH)) > 0
        assert candidate.stopped


# -- attention kernels in the keys of torch's caches ---------------------------------------------------------


def test_a_tag_of_the_users_own_is_added_to_and_comes_back(monkeypatch):
    config, tags = torch.compiler.config, []

    def compiled(x):
        tags.append(config.cache_key_tag)
        return x

    monkeypatch.setattr(torch, "compile", lambda call, **how: compiled)
    model = nn.Linear(4, 2)
    with forced("compile", True, job_of(model)), config.patch(cache_key_tag="mine"):
        model(torch.ones(8, 4))
        torch.backends.cuda.enable_flash_sdp(False)
        model(torch.ones(8, 4))
        torch.backends.cuda.enable_math_sdp(False)
        model(torch.ones(8, 4))
        assert config.cache_key_tag == "mine"
    assert tags[0] == "mine"
    assert all(tag.startswith("mine ") for tag in tags[1:])
    assert len(set(tags)) == 3


ATTENDING = """
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import profile
from tests.jobs import job_of
from tests.techniques.harness import forced

class Attention(nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).unflatten(-1, (3, 1, 8)).transpose(1, 3).unbind(2)
        return functional.scaled_dot_product_attention(q, k, v)

for flash in (True, False):
    torch._dynamo.reset()
    torch.backends.cuda.enable_flash_sdp(flash)
    model, x = Attention(8, 24), torch.randn(2, 16, 8)
    with forced("compile", True, job_of(model)), torch.no_grad():
        model(x)
        with profile() as seen:
            model(x)
    print(sum("flash" in event.key for event in seen.key_averages()), "flash operators")
"""


@pytest.mark.slow
def test_code_that_was_compiled_with_flash_attention_does_not_serve_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", ATTENDING], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["1 flash operators", "0 flash operators"]
