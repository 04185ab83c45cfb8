"""Checks of ``optimize``'s arguments: loaders that can restart, schedulers, and contradictory choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.data import InMemoryLoader
from flatout.techniques import REGISTRY, Rule
from flatout.tuning.arguments import choices_of
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES, QUICK, Net, SlowSamples, make_data, make_job
from tests.loaders import OwnIterator
from tests.reasons import reasons


def batches(count: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 8, generator=generator), torch.arange(4) % 3) for _ in range(count)]


def tuned(loader: Any = None, **how: Any) -> flatout.Run:
    """Return a run of a small job without measurements."""
    model = how.pop("model", None) or Net()
    optimizer = how.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    how = {"loss_fn": functional.cross_entropy, "techniques": QUICK, "budget": 0} | how
    return flatout.optimize(model, batches() if loader is None else loader, optimizer, **how)


# -- loaders that cannot restart -------------------------------------------------------------------------------

ONE_SHOT: dict[str, Callable[[], Any]] = {
    "generator": lambda: (batch for batch in batches()),
    "list iterator": lambda: iter(batches()),
    "map": lambda: map(tuple, batches()),
    "zip": lambda: zip([x for x, _ in batches()], [y for _, y in batches()], strict=True),
    "islice": lambda: itertools.islice(batches(), 5),
    "chain": lambda: itertools.chain(batches(), batches()),
    "iterator of a DataLoader": lambda: iter(DataLoader(make_data(), batch_size=16)),
}


@pytest.mark.parametrize("make", ONE_SHOT.values(), ids=ONE_SHOT)
def test_an_iterator_is_refused_at_once_and_keeps_its_batches(make: Callable[[], Any]) -> None:
    loader, model = make(), Net()
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"^loader"):
        tuned(loader, model=model)
    assert snapshot(model) == before
    assert len(list(loader)) == len(list(make()))


class StartsOver:
    """Iterator that restarts itself, as NVIDIA DALI's do with ``auto_reset``. ``iter`` returns the iterator itself."""

    def __init__(self) -> None:
        self._at = 0
        self.is_closed = False

    def __iter__(self) -> StartsOver:
        return self

    def __next__(self) -> Any:
        assert not self.is_closed
        if self._at == 6:
            self._at = 0
            raise StopIteration
        self._at += 1
        return batches()[self._at - 1]

    def close(self) -> None:
        self.is_closed = True


def test_an_iterator_that_starts_over_trains_every_epoch() -> None:
    loader = StartsOver()
    run = tuned(loader)
    assert [len([run.step(batch) for batch in run.loader]) for _ in range(3)] == [6, 6, 6]
    assert not loader.is_closed  # the end of an epoch does not end the loader


def test_an_endless_iterator_is_a_loader() -> None:
    run = tuned(itertools.cycle(batches()))
    assert len([run.step(batch) for batch, _ in zip(run.loader, range(9), strict=False)]) == 9


class Once:
    """Loader that returns the same iterator every time."""

    def __init__(self) -> None:
        self._batches = iter(batches())

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def test_an_epoch_without_a_batch_is_an_error_where_it_happens() -> None:
    run = tuned(Once())
    assert len([run.step(batch) for batch in run.loader]) == 6
    with pytest.raises(ValueError, match=r"loader.*Once"):
        next(iter(run.loader))
    with pytest.raises(ValueError, match=r"loader.*Once"):
        run.fit(1, progress=False)


def test_an_eval_loader_that_cannot_begin_again_is_refused_before_training() -> None:
    run = tuned()
    with pytest.raises(TypeError, match="eval_loader"):
        run.fit(2, eval_loader=iter(batches()), progress=False)
    assert run.steps == 0
    assert len(run.fit(1, eval_loader=iter(batches()), progress=False)) == 1


# -- schedulers ------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1),
    "SequentialLR": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt, [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.StepLR(opt, 1)], [1]
    ),
    "ChainedScheduler": lambda opt: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.StepLR(opt, 1)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_scheduler_of_another_optimizer_is_refused(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    model = Net()
    mine, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with pytest.raises(ValueError, match=r"scheduler.*optimizer"):
        tuned(model=model, optimizer=other, scheduler=make(mine))
    run = tuned(model=model, optimizer=mine, scheduler=make(mine))
    run.fit(1, progress=False)


class Wrapper(torch.optim.Optimizer):
    """Optimizer that steps another optimizer, as Lookahead, SAM and accelerate's do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("shares", [True, False])
def test_the_scheduler_of_a_wrapped_optimizer_is_the_wrappers(shares: bool) -> None:
    model = Net()
    base = torch.optim.SGD(model.parameters(), 0.1)
    wrapper = Wrapper(base)
    if not shares:
        wrapper.param_groups = [dict(group) for group in base.param_groups]
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    run = tuned(model=model, optimizer=wrapper, scheduler=scheduler)
    run.step(batches()[0])
    assert base.param_groups[0]["lr"] == 0.05
    outer = torch.optim.lr_scheduler.StepLR(wrapper, 1, gamma=0.5)
    tuned(model=model, optimizer=base, scheduler=outer)


def test_a_scheduler_of_the_users_own_needs_a_step() -> None:
    class Own:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    own = Own()
    tuned(scheduler=own).fit(1, progress=False)
    assert own.steps == 6
    for wrong in (Own, torch.optim.lr_scheduler.StepLR, lambda step: 0.1):
        with pytest.raises(TypeError, match=r"scheduler.*step"):
            tuned(scheduler=wrong)


# -- forced techniques -----------------------------------------------------------------------------------------


class Augmented(SlowSamples):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i)[0] + torch.rand(8), i % 3


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (SlowSamples()[i] for i in range(16))


CANNOT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "workers for a list": ({"workers": 2}, {}),
    "workers for a stream": ({"workers": 2}, {"loader": lambda: DataLoader(Streamed(), 8)}),
    "workers for augmented samples": (
        {"workers": 2},
        {"loader": lambda: DataLoader(Augmented(), 8), "deterministic": True},
    ),
    "workers for data in memory": (
        {"workers": 2, "in_memory": True},
        {"loader": lambda: DataLoader(make_data(), batch_size=16)},
    ),
    "workers for a subclass": ({"workers": {"num_workers": 2}}, {"loader": lambda: OwnIterator(SlowSamples(), 8)}),
    "augmented samples in memory": ({"in_memory": True}, {"loader": lambda: DataLoader(Augmented(), 8)}),
    "a list on the device": ({"in_memory": "device"}, {}),
    "a graph on the CPU": ({"cuda_graph": True}, {"device": "cpu"}),
    "cuDNN on the CPU": ({"cudnn_benchmark": True}, {"device": "cpu"}),
    "TF32 on the CPU": ({"tf32": True}, {"device": "cpu"}),
    "TF32 on the CPU by its argument": ({}, {"precision": "tf32", "device": "cpu"}),
    "bf16 for a double model": ({"precision": "bf16"}, {"model": lambda: Net().double()}),
    "fp16 for a bf16 model": ({}, {"precision": "fp16", "model": lambda: Net().bfloat16()}),
    "fp32 for a bf16 model": ({}, {"precision": "fp32", "model": lambda: Net().bfloat16()}),
    "channels_last without convolutions": ({"channels_last": True}, {}),
    "an attention kernel without attention": ({"sdpa_backend": "math"}, {}),
    "a fused LBFGS's kin": ({"fused_optimizer": True}, {"optimizer": torch.optim.Rprop}),
    "TorchScript that fails": ({"torchscript": "script"}, {"model": lambda: Untyped()}),
}


class Untyped(Net):
    """Model that TorchScript cannot compile."""

    def forward(self, *args: Any, **how: Any) -> Any:
        return super().forward(*args, **how)


@pytest.mark.parametrize(("techniques", "job"), CANNOT.values(), ids=CANNOT)
def test_a_technique_that_is_forced_and_cannot_serve_is_an_error(techniques: Any, job: dict[str, Any]) -> None:
    job = dict(job)
    model = job.pop("model", Net)()
    optimizer = job.pop("optimizer", torch.optim.SGD)(model.parameters(), 0.1)
    loader = job.pop("loader", batches)()
    name = next(iter(techniques), "precision")
    before, settings = snapshot(model, optimizer), {"compile": False, **techniques}
    with pytest.raises(ValueError, match=name):
        tuned(loader, model=model, optimizer=optimizer, techniques=settings, **job)
    assert snapshot(model, optimizer) == before


def test_an_optimizer_is_needed_for_what_its_step_does() -> None:
    for name in ("fused_optimizer", "torchscript"):
        with pytest.raises(ValueError, match=name):
            flatout.optimize(Net(), batches(), techniques={"compile": False, name: True}, budget=0)


@pytest.mark.slow
def test_what_is_so_already_is_not_refused() -> None:
    tuned(techniques=QUICK | {"workers": 0})
    tuned(DataLoader(make_data(), batch_size=16), techniques={"compile": False, "in_memory": True, "workers": 0})
    tuned(OwnIterator(SlowSamples(), 8, num_workers=1), techniques={"compile": False, "workers": 1})
    model = Net()
    tuned(model=model, optimizer=flatout.optim.SGD(model.parameters(), 0.1), techniques={"fused_optimizer": True})
    tuned(techniques=QUICK | {"cpu_threads": torch.get_num_threads()})
    gathered = InMemoryLoader(DataLoader(make_data(), batch_size=16))
    tuned(gathered, techniques={"compile": False, "in_memory": True})
    with_worker = DataLoader(make_data(), batch_size=16, num_workers=1)
    tuned(with_worker, techniques={"compile": False, "in_memory": True, "workers": 0})
    compiled = Net()
    compiled.compile(backend="eager")
    tuned(model=compiled, techniques=QUICK | {"compile": True})
    wide = [(x.bfloat16(), y) for x, y in batches()]
    tuned(wide, model=Net().bfloat16(), precision="bf16", techniques={"compile": False})


def test_workers_that_are_asked_for_load_the_batches() -> None:
    loader = DataLoader(SlowSamples(), batch_size=16)
    run = tuned(loader, techniques={"compile": False, "precision": False, "workers": 1})
    assert run.plan.decisions["workers"]["num_workers"] == 1
    assert run.report.row("in_memory").status == "not tried"
    assert "forbidden" in reasons(run.report.row("in_memory"))


def test_a_plan_may_hold_what_does_not_apply_here() -> None:
    plan = flatout.Plan({"channels_last": True}, tuned().plan.fingerprint)
    assert tuned(techniques=None, plan=plan).plan.decisions == {}
    with pytest.raises(ValueError, match="channels_last"):
        tuned(techniques={"channels_last": True}, plan=plan)


@pytest.mark.parametrize(
    ("precision", "techniques"),
    [
        ("fp32", {"precision": "bf16"}),
        ("bf16", {"precision": False}),
        ("bf16", {"precision": "fp16"}),
        ("bf16", {"precision": True}),
        ("fp32", {"tf32": True}),
        ("tf32", {"tf32": False}),
        ("auto", {"torchscript": True, "compile": True}),
    ],
)
def test_choices_that_contradict_each_other_are_refused(precision: str, techniques: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"techniques\["):
        tuned(precision=precision, techniques=techniques)


def test_choices_that_agree_may_be_given_twice() -> None:
    run = tuned(precision="bf16", techniques={"compile": False, "precision": "bf16"})
    assert run.plan.decisions["precision"] == "bf16"
    tuned(precision="fp32", techniques={"compile": False, "precision": False, "tf32": None})


RULES = [t for t in REGISTRY if isinstance(t, Rule)]


CHOICES = [(rule, value) for rule in RULES for value in (True, False) if value or not rule.is_forbiddable]


@pytest.mark.parametrize(("rule", "value"), CHOICES, ids=lambda part: getattr(part, "name", part))
def test_a_rule_that_cannot_be_chosen_is_not_called_unknown(rule: Rule, value: bool) -> None:
    with pytest.raises(ValueError, match=rule.name) as refused:
        tuned(techniques={rule.name: value})
    assert "is-a-rule" in reasons(str(refused.value))
    assert (f"optimize({rule.argument}=" in str(refused.value)) == bool(rule.argument)


def test_a_rule_is_forbidden_by_false_alone() -> None:
    with pytest.raises(ValueError, match="malloc"):
        tuned(techniques={"malloc": 0})


def test_numbers_are_checked_before_a_plan_is_used() -> None:
    plan = tuned().plan
    with pytest.raises(ValueError, match="accumulate must be >= 1"):
        tuned(plan=plan, batch_size=64, accumulate=0)


class Unmeasured(list):  # type: ignore[type-arg]
    """Loader whose ``len()`` raises an error other than TypeError."""

    def __len__(self) -> int:
        raise RuntimeError("no length here")


def test_a_loader_without_length_is_not_asked_if_the_steps_are_given() -> None:
    run = tuned(Unmeasured(batches()), expected_steps=100)
    assert run.report.row("batch_size").status != "kept"


def test_a_forbidden_rule_changes_nothing() -> None:
    model, loader, _ = make_job()
    flatout.optimize(model, loader, techniques=NO_TECHNIQUES | {"evaluation": False}, budget=0)
    assert type(model).__call__ is nn.Module.__call__
    flatout.optimize(model, loader, techniques=NO_TECHNIQUES, budget=0)
    assert type(model).__call__ is not nn.Module.__call__


def test_a_rule_that_an_argument_turns_on_names_it() -> None:
    with pytest.raises(ValueError, match=r"optimize\(deterministic="):
        tuned(techniques={"determinism": True})


IMPLIED: dict[str, dict[str, Any]] = {
    "torchscript": {"compile": False},
    "cuda_graph": {"fused_optimizer": True},
    "tf32": {"precision": False},
    "workers": {"in_memory": False},
}


@pytest.mark.parametrize("name", IMPLIED)
def test_what_is_asked_for_decides_about_what_it_needs_unless_that_is_given(name: str) -> None:
    assert choices_of({name: True}, "auto").values == {name: True} | IMPLIED[name]
    assert choices_of({name: False}, "auto").values == {name: False}
    given = {other: not value for other, value in IMPLIED[name].items() if name != "torchscript"}
    assert choices_of({name: True} | given, "auto").values == {name: True} | IMPLIED[name] | given


def test_techniques_are_a_dict() -> None:
    with pytest.raises(TypeError, match=r"techniques.*dict"):
        tuned(techniques=["compile"])


# -- models and batches without data ---------------------------------------------------------------------------


def test_a_batch_without_samples_is_refused() -> None:
    for at in range(3):
        loader = batches()
        loader[at] = loader[at][0][:0], loader[at][1][:0]
        with pytest.raises(ValueError, match=rf"\b{at}\b"):
            tuned(loader)


def test_a_tensor_without_samples_beside_others_is_no_empty_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean() + batch["boxes"].sum()

    loader = [{"boxes": torch.ones(0, 4), "x": x} for x, _ in batches()]
    run = tuned(loader, loss_fn=None, compute_loss=loss)
    run.step(loader[0])
    assert run.evaluate(loader)["loss"] > 0


def test_a_batch_without_samples_does_not_count_in_an_evaluation() -> None:
    run = tuned()
    expected = run.evaluate(batches())
    x, y = batches()[0]
    assert run.evaluate([*batches(), (x[:0], y[:0])]) == expected


def test_a_lazy_model_is_refused_until_it_has_run_once() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # torch allows this before the first batch
    with pytest.raises(ValueError, match=r"model.*'0\.weight'"):
        tuned(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"loss_fn.*'weight'"):
        tuned(loss_fn=nn.LazyLinear(1))
    model(next(iter(batches()))[0])
    tuned(model=model, optimizer=optimizer).fit(1, progress=False)


def test_a_model_on_meta_is_refused_until_it_has_memory() -> None:
    with torch.device("meta"):
        model, loss = Net(), nn.CrossEntropyLoss(weight=torch.ones(3))
    early = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"model.*meta"):
        tuned(model=model, optimizer=early)
    with pytest.raises(ValueError, match=r"loss_fn.*meta"):
        tuned(loss_fn=loss)
    model.to_empty(device="cpu").load_state_dict(Net().state_dict())
    with pytest.raises(ValueError, match=r"optimizer.*meta"):
        tuned(model=model, optimizer=early)
    tuned(model=model).fit(1, progress=False)
    model.body[1] = nn.BatchNorm1d(16, device="meta")  # only a part of the model
    with pytest.raises(ValueError, match=r"'body\.1\.weight'.*meta"):
        tuned(model=model)
