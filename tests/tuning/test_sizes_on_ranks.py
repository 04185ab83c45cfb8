"""All ranks find the same batch size, and the same parts of batches."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.machine import available_memory
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import StepClock
from flatout.tuning.batch_sizes import MARGIN, SizeTrials, memory_limit, resident_bytes
from flatout.tuning.stopwatch import step_memory
from tests.clock import Clock, TimedStep, simulated_tuning
from tests.jobs import job_of, only
from tests.ranks import on_ranks
from tests.reasons import reasons
from tests.techniques.harness import forced
from tests.trap import Trap
from tests.tuning.lockstep_checks import SECONDS, ranks

pytestmark = pytest.mark.slow


WIDTH, CLASSES = 6, 3


PARTS = only("batch_size")


"""Techniques that leave only the batch size to trials."""


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


def loader_of(samples: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size, shuffle=shuffle)


def net(*extra: nn.Module, hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, hidden), *extra, nn.Tanh(), nn.Linear(hidden, CLASSES))


def optimized(model: nn.Module, loader: Any, loss: Any = functional.cross_entropy, **arguments: Any) -> flatout.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"budget": 0, "plan": None, "parallel": "ddp", "techniques": PARTS} | arguments
    signal.alarm(SECONDS)
    try:
        return flatout.optimize(model, loader, optimizer, loss, **options)
    finally:
        signal.alarm(0)


def measured(
    model: nn.Module, loader: Any, clock: Clock, seconds: Callable[[int], float], **arguments: Any
) -> flatout.Run:
    """Return a run whose steps take ``seconds(samples)`` on this rank, with time to measure all."""
    loss = TimedStep(clock, lambda samples, active: seconds(samples))
    return optimized(model, loader, loss, **({"budget": 10**4, "expected_steps": 10**6} | arguments))


def as_long_for_many(samples: int) -> float:
    return 1.0


def beyond_a_cache(samples: int) -> float:
    return samples * (0.1 if samples <= 16 else 0.5)


def on_all(value: Any) -> Any:
    """Return a value that must be the same on all ranks."""
    values = ranks().every(value)
    assert all(each == values[0] for each in values), values
    return values[0]


def assert_trained_as_one_process(run: flatout.Run, loader: DataLoader[Any], model: nn.Module) -> None:
    """Compare an epoch of ``run`` with one of ``model`` on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [run.step(batch).item() for batch in run.loader] == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [16, 9])
@on_ranks("pool")
def test_a_given_size_is_that_of_all_ranks(samples: int) -> None:
    loader = loader_of(96, 4)
    run = optimized(net(), loader, batch_size=samples, lr_rule="none")
    assert run.loader.batch_size == samples
    assert len(run.loader) == -(-96 // samples)
    assert run.plan.decisions["batch_size"]["samples"] == samples
    sizes = [len(batch[0]) for batch in run.loader]
    assert sum(ranks().every(sizes[0])) == samples
    assert_trained_as_one_process(run, loader_of(96, samples), net())
    assert run.loader.original is loader
    run.undo()
    assert run.loader is loader


@on_ranks("pair")
def test_parts_of_a_given_size_stay_in_its_plan() -> None:
    size = dist.get_world_size()
    with simulated_tuning() as clock:
        run = measured(net(), loader_of(1024, 4), clock, beyond_a_cache, batch_size=64 * size)
    decision = on_all(run.plan.decisions["batch_size"])
    assert run.micro_batch is not None
    assert decision == {"samples": 64 * size, "micro_batch": run.micro_batch, "lr_rule": "linear"}
    run.undo()
    again = optimized(net(), loader_of(1024, 4), plan=run.plan, techniques=None)
    assert again.plan.decisions["batch_size"] == decision
    assert (again.loader.batch_size, again.micro_batch) == (64 * size, decision["micro_batch"])
    again.undo()


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks("pool")
def test_auto_takes_larger_batches_where_they_are_faster(slow: int) -> None:
    """Steps of one rank are slow, and equally slow for many samples. Steps of the other ranks take no time."""
    with simulated_tuning() as clock:
        seconds = as_long_for_many if dist.get_rank() == slow else lambda samples: 1e-6
        run = measured(net(), loader_of(1024, 4, shuffle=True), clock, seconds, batch_size="auto")
    row = run.report.row("batch_size")
    assert row.status == "kept"
    assert on_all(run.loader.batch_size) == 128  # an epoch keeps 8 updates
    assert row.gain is not None
    assert row.gain.ratio == pytest.approx(128 / 4, rel=1e-2)
    assert "update-resized" in reasons(row)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)  # the warm-up starts with the old rate
    lengths = [len(batch[0]) for batch in run.loader]
    assert lengths == [128 // dist.get_world_size()] * 8
    run.undo()


@on_ranks("pair")
def test_auto_keeps_to_the_memory_limit() -> None:
    limit = 600_000
    with simulated_tuning() as clock:
        run = measured(
            net(hidden=1024),
            loader_of(4096, 4),
            clock,
            as_long_for_many,
            batch_size="auto",
            memory_limit=limit,
        )
    samples = on_all(run.loader.batch_size) // dist.get_world_size()
    batch = next(iter(run.loader))
    assert len(batch[0]) == samples
    resident = sum(3 * p.nbytes for p in run.model.parameters())  # includes momentum, and the buckets of DDP
    took = resident + step_memory(lambda: run.step(batch), torch.device("cpu"), ranks=ranks())
    assert 0.7 * limit < took <= limit
    run.undo()


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks("pool")
def test_parts_that_are_faster_on_the_slowest_rank_are_found(slow: int) -> None:
    with simulated_tuning() as clock:
        seconds = beyond_a_cache if dist.get_rank() == slow else lambda samples: 1e-6
        batch = 64 * dist.get_world_size() + 1  # one rank has one sample more
        run = measured(net(), list(loader_of(4 * batch, batch)), clock, seconds)
    row = run.report.row("batch_size")
    assert row.status == "kept", row
    assert on_all(run.micro_batch) <= 16
    assert_trained_as_one_process(run, loader_of(4 * batch, batch), net())
    run.undo()


@pytest.mark.parametrize("budget", [0, 1000])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks("pair")
def test_a_rank_without_memory_splits_the_batches_of_all(where: str, rank: int, budget: float) -> None:
    """Steps run out of memory above 8 samples on one rank, which has as many samples as others, or one fewer."""
    trap = Trap()
    batch = 20 * dist.get_world_size() + 1
    if dist.get_rank() == rank:
        trap.arm(where, 8)
    with simulated_tuning() as clock:
        run = measured(
            net(trap),
            list(loader_of(3 * batch, batch)),
            clock,
            as_long_for_many,
            budget=budget,
            memory_limit=10**12,  # makes steps before any trial
        )
    assert 1 <= on_all(run.micro_batch) <= 8
    trap.seen.clear()
    assert_trained_as_one_process(run, loader_of(3 * batch, batch), net())
    assert max(trap.seen) == run.micro_batch
    run.undo()


@on_ranks("pair")
def test_no_sample_fits() -> None:
    """A single sample exceeds the memory of rank 1. All ranks end, and nothing has changed."""
    model = net(Trap())
    if dist.get_rank() == 1:
        model[1].arm("forward", 0)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        optimized(model, list(loader_of(64, 16)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert type(model) is nn.Sequential


@on_ranks("pair")
def test_ranks_on_one_machine_share_its_memory() -> None:
    batches = [(torch.randn(4, WIDTH), torch.arange(4) % CLASSES)]
    model = net()
    job = job_of(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks())
    with mock.patch("flatout.tuning.batch_sizes.available_memory", return_value=available_memory()) as available:
        alone = memory_limit(job)
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(2)):
            shared = memory_limit(job)
        weights = sum(p.nbytes for p in model.parameters())
        own = ranks().smallest([available.return_value])[0]
    assert alone == pytest.approx((1 - MARGIN) * (own + weights))
    assert shared == pytest.approx((1 - MARGIN) * (own / 2 + weights))


@on_ranks("pair")
def test_the_buckets_of_ddp_stay() -> None:
    model = net()
    job = job_of(model, [], torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks())
    weights = sum(p.nbytes for p in model.parameters())
    assert resident_bytes(job) == weights
    job.stepper.sync = sync = GradientSync([model], ranks(), StepClock(torch.device("cpu")))
    assert resident_bytes(job) == 2 * weights
    sync.remove()


@on_ranks("pair")
def test_ranks_that_train_apart_keep_their_batches() -> None:
    with simulated_tuning() as clock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = measured(net(), list(loader_of(256, 64)), clock, beyond_a_cache, parallel="none")
    row = run.report.row("batch_size")
    assert row.status == "not applicable"
    assert "ranks-apart-in-size" in reasons(row)
    assert run.micro_batch is None
    run.undo()


class Block(nn.Module):
    """Block with small weights and large activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Tokens(nn.Sequential):
    """Blocks that compute each sample as 64 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None].repeat(1, 64, 1)).mean(1)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return Tokens(*(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES))


def limit_for(samples: int) -> int:
    """Return the bytes that a rank takes with so many samples of ``blocks`` at once, with checkpoints."""
    model = blocks()
    batches = list(loader_of(samples, samples))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = job_of(model, batches, optimizer, loss_fn=functional.cross_entropy)
    with forced("activation_checkpointing", True, job):
        height = SizeTrials(job).height(samples)
    assert height is not None
    return height + sum(p.nbytes for p in model.parameters())  # the buckets of DDP


@pytest.mark.parametrize("budget", [0, 1000])
@on_ranks("pair")
def test_checkpoints_make_room_on_all_ranks(budget: float) -> None:
    """Memory holds the slices of batches only with checkpoints, or in parts."""
    samples = 32
    batch = samples * dist.get_world_size() - 1  # one rank has one sample less
    with simulated_tuning() as clock:
        run = measured(
            blocks(),
            list(loader_of(2 * batch, batch)),
            clock,
            as_long_for_many,
            budget=budget,
            memory_limit=limit_for(samples if budget else 1),
            techniques=only("batch_size", "activation_checkpointing"),
        )
    row = run.report.row("activation_checkpointing")
    assert row.status == "kept", row
    assert on_all(run.micro_batch) == (None if budget else 1)
    assert_trained_as_one_process(run, loader_of(2 * batch, batch), blocks())
    run.undo()
    assert all(type(block) is Block for block in list(run.model)[:-1])
