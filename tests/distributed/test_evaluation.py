"""Evaluation on several ranks: each computes its slice, and all return the values of one process."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import flatout
from flatout.distributed.agreement import GroupAgreement, RankFailure
from flatout.distributed.process_group import control_group
from tests.distributed.data_parallel_checks import BATCH, data, net, optimizer_of
from tests.ranks import RankPool, on_ranks

SECONDS = 60


"""Time after which a check counts as a hang. The system then kills its process."""


class Seen(Dataset[tuple[Tensor, Tensor]]):
    """Dataset that records which samples were loaded."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = (tensor[:samples] for tensor in data())
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(i)
        return self.x[i], self.y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Stream of some samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*(tensor[: self.samples] for tensor in data()), strict=True)


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).float().mean()


METRICS = {"accuracy": accuracy}


def run_of(loss_fn: Any = cross_entropy, **arguments: Any) -> flatout.Run:
    model = net(norm=True)
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), BATCH)
    run = flatout.optimize(
        model, loader, optimizer_of(model, "sgd"), loss_fn, budget=0, plan=None, parallel="ddp", **arguments
    )
    for batch in list(run.loader)[:3]:  # the statistics of BatchNorm now differ between ranks
        run.step(batch)
    signal.alarm(SECONDS)
    return run


def ended(run: flatout.Run) -> None:
    signal.alarm(0)
    run.undo()


def in_one_process(
    model: nn.Module, loader: Any, loss_fn: Any = cross_entropy, loss_weight: Any = None
) -> dict[str, float]:
    """Return means over a loader for the model of rank 0: the loss by ``loss_weight``, else by samples."""
    totals, weights = {"loss": 0.0, "accuracy": 0.0}, {"loss": 0.0, "accuracy": 0.0}
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            weight = len(x) if loss_weight is None else float(loss_weight((x, y)))
            pairs = {"loss": (weight, loss_fn(output, y)), "accuracy": (len(x), accuracy(output, (x, y)))}
            for name, (factor, value) in pairs.items():
                totals[name] += factor * value.item()
                weights[name] += factor
    model.train()
    return {name: total / weights[name] for name, total in totals.items()}


def assert_same_on_all(found: dict[str, float], expected: dict[str, float]) -> None:
    """Compare with the values of rank 0's process, and bit for bit with those of the other ranks."""
    everywhere = GroupAgreement(control_group()).every((found, expected))
    assert all(each == found for each, _ in everywhere)
    assert found == pytest.approx(everywhere[0][1], rel=1e-5)


def each_rank_computes_its_slice(samples: int, loss: str, shuffle: bool, workers: int) -> None:
    loss_fn: Any = nn.CrossEntropyLoss(reduction="sum" if loss == "sum" else "mean", ignore_index=0)
    loss_weight = (lambda batch: (batch[1] != 0).sum()) if loss == "weighted" else None
    if loss == "mean":
        loss_fn = nn.CrossEntropyLoss()
    run = run_of(loss_fn, loss_weight=loss_weight)
    dataset = Seen(samples)
    loader = DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0)
    modes = [module.training for module in run.model.modules()]
    torch.manual_seed(dist.get_rank())
    found, processes = [], []
    for _ in range(2):
        found.append(run.evaluate(loader, METRICS))
        processes.append({process.pid for process in multiprocessing.active_children()})
    assert processes[0] == processes[1]  # workers persist
    assert len(processes[0]) == workers
    if workers == 0:
        loaded = [i for each in GroupAgreement(control_group()).every(dataset.loaded) for i in each]
        assert sorted(set(loaded)) == list(range(samples))
        assert len(loaded) < 2 * (samples + dist.get_world_size())  # stand-ins are loaded too
    assert [module.training for module in run.model.modules()] == modes
    torch.manual_seed(0)  # the order of rank 0
    for values in found:
        assert_same_on_all(
            values, in_one_process(run.model, DataLoader(Seen(samples), BATCH, shuffle=shuffle), loss_fn, loss_weight)
        )
    ended(run)


@pytest.mark.parametrize("kind", ["list", "stream"])
@on_ranks("pool")
def test_other_loaders_are_evaluated_whole(kind: str) -> None:
    samples = 41
    run = run_of()
    plain = DataLoader(Seen(samples), BATCH)
    loader: Any = {"list": list(plain), "stream": DataLoader(Stream(samples), BATCH)}[kind]
    assert_same_on_all(run.evaluate(loader, METRICS), in_one_process(run.model, plain))
    ended(run)


@on_ranks("pool")
def test_shards_are_evaluated_together() -> None:
    """Ranks have different samples, and different numbers of batches."""
    run, samples = run_of(), 40
    sampler: Any = DistributedSampler(Seen(samples), shuffle=False)
    loader = DataLoader(Seen(samples), BATCH, sampler=sampler)
    assert_same_on_all(run.evaluate(loader, METRICS), in_one_process(run.model, DataLoader(Seen(samples), BATCH)))
    dataset = Stream(13 * (dist.get_rank() + 1))
    dataset.num_replicas = dist.get_world_size()  # type: ignore[attr-defined]
    own = Stream(13 * (dist.get_rank() + 1))
    parts = GroupAgreement(control_group()).every(list(own))
    whole = [sample for part in parts for sample in part]
    expected = in_one_process(run.model, DataLoader(whole, 1))  # type: ignore[arg-type]
    assert_same_on_all(run.evaluate(DataLoader(dataset, BATCH), METRICS), expected)
    ended(run)


@on_ranks("pool")
def test_the_training_loader_is_evaluated() -> None:
    x, y = (tensor[:61] for tensor in data())  # the last batch has one sample
    model = net()
    loader = DataLoader(TensorDataset(x, y), BATCH)
    run = flatout.optimize(
        model, loader, optimizer_of(model, "sgd"), cross_entropy, budget=0, plan=None, parallel="ddp"
    )
    signal.alarm(SECONDS)
    assert_same_on_all(run.evaluate(run.loader, METRICS), in_one_process(run.model, loader))
    ended(run)


@on_ranks("pool")
def test_fit_evaluates() -> None:
    run = run_of()
    loader = DataLoader(Seen(37), BATCH)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setenv("FLATOUT_PROGRESS", "1")
        history = run.fit(2, eval_loader=loader, metrics=METRICS)
    assert errors.getvalue().count("epoch") == (2 if dist.get_rank() == 0 else 0)
    expected = in_one_process(run.model, loader)
    assert_same_on_all({name: history[-1][f"eval_{name}"] for name in expected}, expected)
    ended(run)


@pytest.mark.parametrize("loss", ["mean", "weighted"])
@on_ranks("pool")
def test_a_failure_on_one_rank_ends_the_evaluation(loss: str) -> None:
    loss_weight = (lambda batch: len(batch[1])) if loss == "weighted" else None
    run = run_of(loss_weight=loss_weight)

    def fails(output: Tensor, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such label")
        return accuracy(output, batch)

    expected = KeyError if dist.get_rank() == 1 else RankFailure
    with pytest.raises(expected, match="no such label"):
        run.evaluate(DataLoader(Seen(40), BATCH), {"fails": fails})
    assert run.model.training
    assert_same_on_all(
        run.evaluate(DataLoader(Seen(40), BATCH), METRICS),
        in_one_process(run.model, DataLoader(Seen(40), BATCH)),
    )
    ended(run)


@on_ranks("pool")
def test_an_empty_loader_and_other_metrics_are_refused() -> None:
    run = run_of()
    with pytest.raises(ValueError, match="yielded no batch"):
        run.evaluate(DataLoader(Seen(0), BATCH))
    with pytest.raises(ValueError, match="same on all ranks"):
        run.evaluate(DataLoader(Seen(20), BATCH), METRICS if dist.get_rank() == 0 else None)
    ended(run)


@pytest.mark.parametrize("loss", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("samples", [36, 41, 37, 1])  # batches of 12: the last one has 12, 5 samples, or 1
def test_each_rank_computes_its_slice(pool: RankPool, samples: int, loss: str) -> None:
    pool(each_rank_computes_its_slice, samples, loss, shuffle=samples == 41, workers=0)


def test_workers_load_slices(pool: RankPool) -> None:
    pool(each_rank_computes_its_slice, 41, "mean", shuffle=False, workers=1)
