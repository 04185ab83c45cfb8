"""Issues that users reported about one-call tuning in other libraries, and that ``optimize`` avoids."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.techniques import REGISTRY, Rule
from tests.clock import Clock, TimedSamples, TimedStep
from tests.compiler import Compiler
from tests.helpers import bits, snapshot, trained_state
from tests.jobs import FORCED, QUICK, Net, make_data, make_job, only, train
from tests.reasons import reasons
from tests.unseen import Unseen

CROSS_ENTROPY = functional.cross_entropy


class Pictures(nn.Module):
    """Model with convolutions, for techniques that change the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def pictures(n: int = 32, **how: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 3), **how)


# -- intel-extension-for-pytorch -------------------------------------------------------------------------------


def test_the_result_has_one_shape_with_and_without_an_optimizer() -> None:
    """ipex.optimize returns a model, or a model and an optimizer, and callers unpack the wrong number."""
    for with_optimizer in (True, False):
        model, loader, opt = make_job()
        given = (opt, CROSS_ENTROPY) if with_optimizer else ()
        run = flatout.optimize(model, loader, *given, techniques=QUICK, budget=0)
        ours, batches = run
        assert (ours, batches) == (run.model, run.loader)
        assert run.optimizer is (opt if with_optimizer else None)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_neither_mode_is_an_error(training: bool, with_optimizer: bool, clock: Clock) -> None:
    """accelerate #1642, caikit-nlp #317: "The optimizer should be given for training mode", and the opposite.

    A model from a checkpoint is in eval mode and gets an optimizer. ``optimize`` keeps both unchanged.
    """
    model, loader, opt = make_job()
    model.train(training)
    modes = [module.training for module in model.modules()]
    clock.slow_down(model)
    given = (opt, CROSS_ENTROPY) if with_optimizer else ()
    flatout.optimize(model, loader, *given, techniques=QUICK, budget=100)
    assert [module.training for module in model.modules()] == modes


def test_weights_are_where_they_were() -> None:
    """ipex #356 (weights lost after inplace=True), #216 (shapes changed), and its deep copies."""
    torch.manual_seed(0)
    model, loader = Pictures(), pictures(batch_size=8)
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    held = list(model.parameters())
    saved = copy.deepcopy(model.state_dict())
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=FORCED | {"channels_last": True}, budget=0)
    assert run.model is model
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), held, strict=True))
    assert all(ours is theirs for ours, theirs in zip(opt.param_groups[0]["params"], held, strict=True))
    state = model.state_dict()
    assert {name: (value.shape, bits(value)) for name, value in state.items()} == {
        name: (value.shape, bits(value)) for name, value in saved.items()
    }
    model.load_state_dict(state)
    run.step(next(iter(run.loader)))
    assert bits(held[0]) != bits(saved["conv.weight"])  # earlier references are the trained parameters


def test_frozen_weights_stay_frozen() -> None:
    """ipex #255, BigDL-Nano #4846: convolutions came back with requires_grad=True."""
    torch.manual_seed(0)
    model = Pictures()
    model.conv.requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    frozen = bits(model.conv.weight)
    run = flatout.optimize(
        model, pictures(batch_size=8), opt, CROSS_ENTROPY, techniques=FORCED | {"channels_last": True}, budget=0
    )
    run.fit(1, progress=False)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]
    assert bits(model.conv.weight) == frozen
    assert model.conv.weight.grad is None
    run.undo()
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_hooks_stay_attached() -> None:
    """ipex #684: optimize removed the hooks of the model."""
    model, loader, opt = make_job()
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("outer"))
    model.body[0].register_full_backward_hook(lambda *_: seen.append("inner"))
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=FORCED, budget=0)
    seen.clear()
    run.step(next(iter(run.loader)))
    assert seen == ["outer", "inner"]


# -- accelerate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_scheduler_steps_once_an_update(accumulate: int, clock: Clock) -> None:
    """accelerate #1382, #2318, #2773: schedules ran num_processes times too fast."""
    model, loader, opt = make_job(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda update: 1 / (1 + update))
    run = flatout.optimize(
        model,
        loader,
        opt,
        TimedStep(clock),
        scheduler=scheduler,
        accumulate=accumulate,
        techniques=QUICK,
        budget=100,
        expected_steps=1000,
    )
    assert scheduler.last_epoch == 0  # trials do not count
    run.fit(2, progress=False)
    assert scheduler.last_epoch == 2 * 6 // accumulate
    assert opt.param_groups[0]["lr"] == pytest.approx(0.01 / (1 + 2 * 6 // accumulate))


def test_a_second_call_wraps_nothing_twice(tmp_path: Any) -> None:
    """accelerate #2882, #3967: prepare() wrapped a model again and saved it twice."""
    model, loader, opt = make_job()
    once = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=FORCED, budget=0)
    kinds, keys = (type(model).__mro__, type(opt).__mro__), list(model.state_dict())
    twice = flatout.optimize(model, once.loader, opt, CROSS_ENTROPY, techniques=FORCED, budget=0)
    assert tuple(map(len, (type(model).__mro__, type(opt).__mro__))) == tuple(map(len, kinds))
    assert list(model.state_dict()) == keys
    assert twice.plan == once.plan
    assert len(list(twice.loader)) == 6
    twice.undo()
    assert (type(model), type(opt)) == (Net, torch.optim.Adam)


# -- torch.compile ---------------------------------------------------------------------------------------------


COMPILED = FORCED | {"compile": True, "precision": False}


def test_a_compiled_models_keys_have_no_prefix(compiler: Compiler) -> None:
    """nanoGPT #325, timm #2003, pytorch #101107, #158519, torchtitan #2622: ``_orig_mod.`` in every checkpoint."""
    model, loader, opt = make_job()
    keys = list(model.state_dict())
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=COMPILED, budget=0)
    run.step(next(iter(run.loader)))
    assert compiler.graphs
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    plain = Net()
    plain.load_state_dict(loaded["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(loaded["optimizer"])
    model.load_state_dict(plain.state_dict())
    whole = io.BytesIO()
    torch.save(model, whole)
    assert type(torch.load(io.BytesIO(whole.getvalue()), weights_only=False)) is Net


def test_many_shapes_do_not_use_up_the_compiler(compiler: Compiler) -> None:
    """TensorRT-LLM #6142: after eight recompilations everything ran eager, the first shape included."""
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=COMPILED, budget=0)
    compiled = len(compiler.graphs)
    assert compiled
    compiler.runs = 0
    for size in range(2, 15):
        run.step((torch.randn(size, 8), torch.zeros(size, dtype=torch.long)))
    assert len(compiler.graphs) == compiled
    assert compiler.runs == 0
    run.step((torch.randn(16, 8), torch.zeros(16, dtype=torch.long)))
    assert compiler.runs == 1  # the shape of the trial still runs compiled


def test_learning_rates_recompile_nothing(compiler: Compiler) -> None:
    """pytorch #107076: a float learning rate under a scheduler recompiled the optimizer in every step."""
    model, loader, opt = make_job()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, scheduler=scheduler, techniques=COMPILED, budget=0)
    compiled = len(compiler.graphs)
    rates = set()
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
            rates.add(opt.param_groups[0]["lr"])
    assert len(rates) == 12
    assert len(compiler.graphs) == compiled


# -- GradScaler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed_with", ["a new scaler", "a used scaler", "torch's scaler"])
def test_a_scaler_resumes_from_its_saved_state(resumed_with: str) -> None:
    """fairseq2 #1346, accelerate #4289, composer #1376: scale, growth count or factors were lost or altered."""

    def make_scaler() -> flatout.amp.GradScaler:
        kind = torch.amp.GradScaler if resumed_with == "torch's scaler" else flatout.amp.GradScaler
        return kind("cpu", init_scale=2.0, growth_interval=100)

    def steps(model: Net, opt: Any, scaler: Any, count: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        scales = []
        for i in range(count):
            opt.zero_grad()
            loss = model(torch.randn(8, 8)).square().mean() * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    scaler = flatout.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
    steps(model, opt, scaler, 5, seed=1)
    file = io.BytesIO()
    parts = {"model": model, "opt": opt, "scaler": scaler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    expected = steps(model, opt, scaler, 5, seed=2)

    again = Net()
    opt_again, scaler_again = torch.optim.Adam(again.parameters(), 0.5), make_scaler()
    if resumed_with == "a used scaler":
        steps(again, opt_again, scaler_again, 2, seed=3)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, part in {"model": again, "opt": opt_again, "scaler": scaler_again}.items():
        part.load_state_dict(saved[name])
    assert scaler_again.state_dict() == saved["scaler"]
    assert steps(again, opt_again, scaler_again, 5, seed=2) == expected
    assert [bits(p) for p in again.parameters()] == [bits(p) for p in model.parameters()]


def test_trials_do_not_advance_the_scaler() -> None:
    """accelerate #4289, second part: a dummy step changed the scale."""
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=FORCED | {"precision": "fp16"}, budget=0)
    fresh = flatout.amp.GradScaler("cpu").state_dict()
    assert run.scaler.state_dict() == fresh
    run.step(next(iter(run.loader)))
    assert run.scaler.state_dict() != fresh


# -- Lightning's finders ---------------------------------------------------------------------------------------


def test_modes_are_as_they_were_module_by_module(clock: Clock) -> None:
    """Lightning #18813, #18826: BatchSizeFinder left the model in train mode, so validation used dropout."""
    model, loader, opt = make_job()
    model.body[1].eval()  # a frozen BatchNorm in a model that trains
    modes = [module.training for module in model.modules()]
    clock.slow_down(model)
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=QUICK, budget=100)
    run.evaluate(loader)
    assert [module.training for module in model.modules()] == modes
    x = torch.randn(4, 8)
    quiet = flatout.optimize(model.eval(), loader, techniques=QUICK, budget=100).model
    assert torch.equal(quiet(x), quiet(x))


def test_trials_keep_no_memory(clock: Clock) -> None:
    """Lightning #8028, #20231: training ran out of memory only after the search."""

    def held() -> int:
        gc.collect()
        tensors = {id(t): t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)}
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}.values())

    model, loader, opt = make_job()
    train(model, loader, opt)
    before = held()
    run = flatout.optimize(model, loader, opt, TimedStep(clock), techniques=QUICK | {"in_memory": False}, budget=1000)
    assert any(row.trials for row in run.report.rows)
    run.undo()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held() - before < parameters  # no copy of weights, moments or batches is left


def test_candidates_really_train(clock: Clock) -> None:
    """Lightning #13696, #13851: the search counted trials that had not run a single training step."""
    model, loader, opt = make_job()
    unseen = Unseen(trained=0)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        unseen.trained += output.requires_grad
        clock.advance(1.0)
        return functional.cross_entropy(output, target)

    run = flatout.optimize(model, loader, opt, loss_fn, techniques=QUICK | {"in_memory": False}, budget=1000)
    pairs = sum(trial.pairs for row in run.report.rows for trial in row.trials)
    assert pairs > 0
    assert unseen.trained >= 2 * pairs


def test_techniques_that_were_not_tried_have_a_reason(clock: Clock) -> None:
    """Lightning #13696: the search stopped without a message."""
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, CROSS_ENTROPY, budget=1e-6)
    assert all(row.why for row in run.report.rows)
    fused = run.report.row("fused_optimizer")
    assert fused.status == "not tried"
    assert "budget-spent" in reasons(fused)


class TooMany(TimedSamples):
    """Dataset that is larger than any machine's memory."""

    def __len__(self) -> int:
        return 10**12


def test_host_memory_is_not_exhausted(clock: Clock) -> None:
    """Lightning #11295: a batch size that fit the GPU exhausted the host's memory, and the node killed the job."""
    model, _, opt = make_job()
    loader = DataLoader(TooMany(clock, 1.0), batch_size=16)
    with pytest.raises(ValueError, match="in_memory"):
        flatout.optimize(model, loader, opt, CROSS_ENTROPY, techniques=QUICK | {"in_memory": True}, budget=0)
    others = {t.name: False for t in REGISTRY if not isinstance(t, Rule) and t.name != "in_memory"}
    how = {"techniques": others, "budget": 1e14, "expected_steps": 10**12}
    run = flatout.optimize(model, loader, opt, TimedStep(clock), **how)
    row = run.report.row("in_memory")
    assert row.status == "not applicable"
    assert "exceeds-host-memory" in reasons(row)
    assert len(list(itertools.islice(run.loader, 4))) == 4


class Batches:
    """Loader that is not a DataLoader."""

    def __iter__(self) -> Any:
        return iter([(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))] * 3)


@pytest.mark.parametrize("make", [lambda: pictures(batch_size=8), Batches, lambda: list(Batches())], ids=range(3))
def test_any_loader_can_be_passed_in(make: Callable[[], Any], clock: Clock) -> None:
    """Lightning's tuner refuses loaders that are passed to fit(), and requires a LightningDataModule."""
    loader = make()
    model = Pictures() if isinstance(loader, DataLoader) else Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, loader, opt, TimedStep(clock), techniques=QUICK, budget=100)
    assert len([run.step(batch) for batch in run.loader]) in (3, 4)


# -- decisions that cost speed elsewhere -----------------------------------------------------------------------


def test_slower_channels_last_is_reverted(clock: Clock) -> None:
    """pytorch #50036, #70954, #82699: slower in channels_last, against the advice of the guides."""
    torch.manual_seed(0)
    model, loader = Pictures(), pictures(batch_size=8)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = TimedStep(clock, lambda samples, active: 2.0 if "channels_last" in active else 1.0).watch(model, opt)
    before, strides = trained_state(model, opt), [p.stride() for p in model.parameters()]
    run = flatout.optimize(model, loader, opt, step, techniques=QUICK | {"in_memory": False}, budget=1000)
    row = run.report.row("channels_last")
    assert row.status == "rejected"
    assert "not-faster" in reasons(row)
    assert row.trials[0].candidate_ms == pytest.approx(2000, rel=1e-3)
    assert row.trials[0].baseline_ms == pytest.approx(1000, rel=1e-3)
    assert trained_state(model, opt) == before
    assert [p.stride() for p in model.parameters()] == strides


def test_cudnn_benchmark_is_not_enabled_for_varying_shapes(clock: Clock) -> None:
    """pytorch #2759: cudnn.benchmark benchmarks every new input size, which slows training down."""
    sizes = [8, 9, 10, 11]
    batches = [(torch.randn(4, 3, size, size), torch.zeros(4, dtype=torch.long)) for size in sizes]
    model = Pictures()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    assert not torch.backends.cudnn.benchmark
    run = flatout.optimize(model, batches, opt, TimedStep(clock), techniques=QUICK, budget=100)
    assert not torch.backends.cudnn.benchmark
    for batch in run.loader:
        run.step(batch)


def test_a_slow_loader_is_found_and_mended_without_losing_a_sample(clock: Clock) -> None:
    """pytorch #23048, Lightning #14961: users find the number of workers by trial and error."""
    model, _, opt = make_job()
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=16, shuffle=True)
    settings = {"techniques": only("in_memory"), "budget": 1000, "expected_steps": 10**6}
    run = flatout.optimize(model, loader, opt, TimedStep(clock), **settings)
    assert run.report.row("in_memory").status == "kept"
    for _ in range(2):
        seen = sorted(value for x, _ in run.loader for value in x[:, 0].tolist())
        assert seen == [float(i) for i in range(64)]
    run.undo()


def test_a_failing_call_leaves_no_trace(clock: Clock) -> None:
    """BigDL-Nano #5611, ipex: a failed call left the model half changed."""
    model, loader, opt = make_job()
    before = snapshot(model, opt)

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") or output.shape[0] < 16:
            raise RuntimeError("only whole batches")
        clock.advance(0.01)
        return functional.cross_entropy(output, target)

    odd = DataLoader(make_data(40), batch_size=16)
    with pytest.raises(RuntimeError, match="only whole batches"):
        flatout.optimize(model, odd, opt, broken, techniques={"compile": False}, budget=100)
    assert snapshot(model, opt) == before
    assert loader.num_workers == 0
