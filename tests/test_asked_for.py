"""Forced and forbidden techniques.

Each is applied or omitted, or an error gives the reason, in every kind of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from flatout.techniques import REGISTRY, Advice, Measured, Rule
from tests.clock import Clock, TimedStep
from tests.compiler import Compiler
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES, SlowSamples, job_of
from tests.reasons import reasons
from tests.techniques.harness import refusal

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

SAMPLES = 48

OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "precision": (True, "bf16", "fp16"),
    "sdpa_backend": ("flash", "math"),
    "cpu_threads": (1, 2),
    "batch_size": ({"micro_batch": 4}, {"samples": 8}),
    "torchscript": (True, "trace"),
    "gradient_buckets": (True, 25),
    "gradient_compression": (True, "bf16"),
    "in_memory": (True, "device"),
    "workers": (0, 1, {"num_workers": 1, "prefetch_factor": 3}),
}
"""Values of techniques that have others than True."""

VALUES = {t.name: OTHER_VALUES.get(t.name, (True,)) for t in REGISTRY if isinstance(t, Measured)}
"""Values of ``techniques={name: value}``."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Rich(nn.Module):
    """Model to which every technique of the step applies: it has a convolution, attention and repeated blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 3)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()  # [N, 1, 16, 4]
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)
        return self.head(self.blocks(x).mean((1, 2)))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 2, 4, 4, generator=generator), torch.arange(SAMPLES) % 3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (tensors()[i] for i in range(SAMPLES))


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        x, y = tensors()[i]
        return x + torch.rand(()), y


def loader_of(dataset: Dataset[Any], **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=16, **settings)


class Training:
    """Model, loader, optimizer and other arguments of ``optimize``."""

    def __init__(
        self,
        model: Callable[[], nn.Module] = Rich,
        loader: Callable[[], Any] = lambda: loader_of(tensors()),
        optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW,
        **arguments: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.loader = loader()
        self.optimizer = None if optimizer is None else optimizer(self.model.parameters(), lr=0.01)
        self.arguments = {"device": "cpu", "budget": 0} | arguments
        if optimizer is not None and "compute_loss" not in arguments:
            self.arguments.setdefault("loss_fn", functional.cross_entropy)

    def optimize(self, techniques: dict[str, Any], **more: Any) -> flatout.Run:
        arguments = self.arguments | {"techniques": NO_TECHNIQUES | techniques} | more
        return flatout.optimize(self.model, self.loader, self.optimizer, **arguments)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


TRAININGS: dict[str, Callable[[], Training]] = {
    "usual": Training,
    "own loop": lambda: Training(optimizer=None),
    "own loop with optimizer": lambda: Training(loss_fn=None),
    "inference": lambda: Training(lambda: Rich().eval(), optimizer=None),
    "compute_loss": lambda: Training(compute_loss=loss_of),
    "deterministic": lambda: Training(deterministic=True),
    "accumulation": lambda: Training(accumulate=2),
    "list": lambda: Training(loader=lambda: list(loader_of(tensors()))),
    "stream": lambda: Training(loader=lambda: loader_of(Stream())),
    "plain model": lambda: Training(plain),
    "other optimizer": lambda: Training(optimizer=torch.optim.Adagrad),
}

ELSEWHERE = {
    *("tf32", "cudnn_benchmark", "cuda_graph", "static_graph", "gradient_buckets", "gradient_compression"),
    *("prefix_cache", "decode"),
}
"""Techniques that need a GPU, several ranks, or a dataset with a transform."""

CANNOT: dict[str, set[str]] = {
    "usual": set(),
    "own loop": {"fp16", "fused_optimizer", "activation_checkpointing", "batch_size", "torchscript"},
    "own loop with optimizer": {"fp16", "activation_checkpointing", "batch_size", "torchscript"},
    "inference": {"fp16", "fused_optimizer", "activation_checkpointing", "batch_size"},
    "compute_loss": set(),
    "deterministic": set(),
    "accumulation": set(),
    "list": {"in_memory", "workers", "samples"},
    "stream": {"in_memory", "workers", "samples"},
    "plain model": {"sdpa_backend", "channels_last", "activation_checkpointing"},
    "other optimizer": {"fused_optimizer"},
}
"""Techniques and values that do not apply to a training on a CPU."""

CASES = [(training, name, value) for training in TRAININGS for name, values in VALUES.items() for value in values]


def is_refused(training: str, technique: str, value: Any) -> bool:
    parts = value if isinstance(value, dict) else [value]
    return any(part in CANNOT[training] | ELSEWHERE for part in (technique, *parts))


ALREADY = [("list", "workers", 0), ("stream", "workers", 0)]
"""Cases in which the training already has the value, although no candidate could set it."""

REFUSED = [case for case in CASES if is_refused(*case) and case not in ALREADY]
KEPT = [case for case in CASES if not is_refused(*case)]


def test_all_values_are_those_of_a_technique() -> None:
    assert OTHER_VALUES.keys() <= VALUES.keys()


@pytest.mark.parametrize(("training", "technique", "value"), KEPT)
def test_a_forced_technique_is_kept_alone(training: str, technique: str, value: Any, compiler: Compiler) -> None:
    job = TRAININGS[training]()
    before = snapshot(job.model, job.optimizer)
    run = job.optimize({technique: value})
    assert run.report.row(technique).status == "kept"
    assert [row.technique for row in run.report.rows if "asked-for" in reasons(row)] == [technique]
    assert run.plan.decisions.keys() == {technique}
    run.undo()
    assert snapshot(job.model, job.optimizer)["parameters"] == before["parameters"]


@pytest.mark.parametrize(("training", "technique", "value"), REFUSED)
def test_a_forced_technique_that_does_not_apply_is_refused(training: str, technique: str, value: Any) -> None:
    job = TRAININGS[training]()
    before = snapshot(job.model, job.optimizer)
    with pytest.raises(ValueError, match=technique) as refused:
        job.optimize({technique: value})
    assert str(value.get("samples", value) if isinstance(value, dict) else value) in str(refused.value)
    assert snapshot(job.model, job.optimizer) == before


@pytest.mark.parametrize(("training", "technique", "value"), ALREADY)
def test_forcing_a_value_that_the_training_already_has_is_no_error(training: str, technique: str, value: Any) -> None:
    assert TRAININGS[training]().optimize({technique: value}).plan.decisions == {}


@pytest.mark.parametrize("training", ["usual", "own loop", "list", "plain model"])
@pytest.mark.parametrize("technique", VALUES)
def test_unknown_values_are_refused(technique: str, training: str) -> None:
    for value in ([[]], {}, {1: 2}, "warp", -1, 1.5, 1j):
        with pytest.raises(ValueError, match=rf"techniques\['{technique}'\]") as refused:
            TRAININGS[training]().optimize({technique: value})
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize("technique", sorted(VALUES.keys() - ELSEWHERE))
def test_a_forced_technique_stays_after_trials_and_race(technique: str, compiler: Compiler, clock: Clock) -> None:
    """Both loops of the race have the forced technique."""
    other = "cpu_threads" if technique != "cpu_threads" else "fused_optimizer"
    job = Training(loss_fn=TimedStep(clock, 0.1))
    run = job.optimize({technique: VALUES[technique][0], other: None}, budget=100, expected_steps=10**6)
    assert run.report.row(other).trials
    assert run.report.row(technique).status == "kept"
    assert technique in run.plan.decisions


@pytest.mark.parametrize("training", ["usual", "own loop", "inference"])
@pytest.mark.parametrize("technique", [t.name for t in REGISTRY])
def test_a_forbidden_technique_is_not_applied(technique: str, training: str) -> None:
    found, job = next(t for t in REGISTRY if t.name == technique), TRAININGS[training]()
    is_built_in = isinstance(found, Rule) and not found.is_forbiddable
    if is_built_in or (technique == "evaluation" and training != "own loop"):
        before = snapshot(job.model, job.optimizer)
        with pytest.raises(ValueError, match=technique) as refused:
            job.optimize({technique: False})
        assert "is-a-rule" in reasons(str(refused.value))
        assert snapshot(job.model, job.optimizer) == before
        return
    run = job.optimize({technique: False})
    try:
        row = run.report.row(technique)
        assert row.status == "not tried"
        assert "forbidden" in reasons(row)
        assert technique not in run.plan.decisions
    finally:
        run.undo()


@pytest.mark.parametrize("rule", [t for t in REGISTRY if isinstance(t, (Rule, Advice))], ids=lambda t: t.name)
def test_rules_and_advice_cannot_be_forced(rule: Rule) -> None:
    for value in (True, 1, "on"):
        with pytest.raises(ValueError, match=rule.name):
            Training().optimize({rule.name: value})


# -- contradictions --------------------------------------------------------------------------------------------


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch[0])
    return functional.cross_entropy(output.float(), batch[1])


CONTRADICTIONS: dict[str, tuple[Callable[[], Training], dict[str, Any], str]] = {
    "prefetching of no workers": (Training, {"workers": {"num_workers": 0, "prefetch_factor": 4}}, "prefetch_factor"),
    "persistence of no workers": (Training, {"workers": {"num_workers": 0, "persistent_workers": True}}, "persistent"),
    "an autocast and a precision": (lambda: Training(compute_loss=autocast_loss), {"precision": "fp16"}, "bfloat16"),
    "a kernel without dropout": (lambda: Training(lambda: Rich(0.5)), {"sdpa_backend": "flash"}, "flash"),
    "a graph without the fused optimizer": (Training, {"cuda_graph": True, "fused_optimizer": False}, "cuda_graph"),
    "workers for data in memory": (Training, {"workers": 1, "in_memory": True}, "workers"),
    "data in memory for workers": (Training, {"in_memory": True, "workers": 1}, "workers"),
    "a script and a compiler": (Training, {"torchscript": True, "compile": True}, "torchscript"),
    "two rules of learning rates": (
        lambda: Training(lr_rule="sqrt"),
        {"batch_size": {"samples": 8, "lr_rule": "linear"}},
        "lr_rule='sqrt'.*'linear'",
    ),
    "two precisions": (lambda: Training(precision="bf16"), {"precision": "fp16"}, "precision"),
    "TF32 and autocast": (lambda: Training(precision="bf16"), {"tf32": True}, "tf32"),
    "two batch sizes": (lambda: Training(batch_size=8), {"batch_size": {"samples": 16}}, "batch_size"),
    "a forbidden batch size": (lambda: Training(batch_size="auto"), {"batch_size": False}, "batch_size"),
    "a cache of random samples": (
        lambda: Training(loader=lambda: loader_of(Augmented())),
        {"in_memory": True},
        "memory",
    ),
}


@pytest.mark.parametrize(("training", "techniques", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(training: Callable[[], Training], techniques: dict[str, Any], words: str) -> None:
    job = training()
    before = snapshot(job.model, job.optimizer)
    chosen = {name: None for name in NO_TECHNIQUES if name in ("precision", "batch_size")} | techniques
    for budget in (0, 0.5):
        with pytest.raises(ValueError, match=words):
            job.optimize(chosen, budget=budget)
        assert snapshot(job.model, job.optimizer) == before


@pytest.mark.parametrize("value", [True, "bf16"])
def test_an_autocast_in_the_loss_counts_as_the_forced_precision(value: Any) -> None:
    run = Training(compute_loss=autocast_loss).optimize({"precision": value})
    assert "precision" not in run.plan.decisions
    run.step(next(iter(run.loader)))


def test_no_precision_is_tried_if_the_loss_uses_autocast() -> None:
    batches = [next(iter(loader_of(tensors())))]
    assert refusal("precision", job_of(Rich(), batches, compute_loss=autocast_loss)) == {"own-autocast"}
    assert refusal("precision", job_of(Rich(), batches, compute_loss=loss_of)) is None


def test_a_plan_and_a_choice_must_agree_for_every_technique(compiler: Compiler) -> None:
    for technique in sorted(VALUES.keys() - ELSEWHERE):
        plan = Training().optimize({}).plan
        with pytest.raises(ValueError, match=rf"{technique}.*False"):
            Training().optimize({technique: VALUES[technique][-1]}, plan=plan)


# -- errors of a forced technique --------------------------------------------------------------------------------


class Viewing(Rich):
    """Model whose ``view`` fails in channels_last."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.head(x.view(len(x), -1)[:, :4])


def test_an_error_of_a_forced_technique_names_it() -> None:
    job = Training(Viewing)
    before = snapshot(job.model, job.optimizer)
    with pytest.raises(ValueError, match=r"techniques\['channels_last'\].*view") as refused:
        job.optimize({"channels_last": True})
    assert isinstance(refused.value.__cause__, RuntimeError)
    assert snapshot(job.model, job.optimizer) == before


def test_a_plan_skips_a_technique_that_fails() -> None:
    plan = flatout.Plan({"channels_last": True}, Training(Viewing).optimize({}).plan.fingerprint)
    job = Training(Viewing)
    run = flatout.optimize(job.model, job.loader, job.optimizer, functional.cross_entropy, plan=plan)
    assert run.report.row("channels_last").status == "rejected"
    run.step(next(iter(run.loader)))


class FailsLater(Rich):
    """Model that fails on batches of fewer than 16 samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 16:
            raise KeyError("mine")
        return super().forward(x)


def test_an_error_of_the_users_model_passes_through_a_forced_technique() -> None:
    batches = [batch for batch, _ in zip(loader_of(tensors()), range(2), strict=False)]
    batches.append(tuple(t[:5] for t in batches[0]))
    with pytest.raises(KeyError, match="mine"):
        Training(FailsLater, lambda: batches).optimize({"precision": "bf16"})


def test_slow_samples_get_the_forced_workers() -> None:
    model = nn.Linear(8, 3)
    run = flatout.optimize(
        model,
        loader_of(SlowSamples()),
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques=NO_TECHNIQUES | {"workers": {"num_workers": 1, "prefetch_factor": 3}},
        budget=0,
    )
    decided = run.plan.decisions["workers"]
    assert (decided["num_workers"], decided["prefetch_factor"]) == (1, 3)
    assert len(list(itertools.islice(run.loader, 2))) == 2
