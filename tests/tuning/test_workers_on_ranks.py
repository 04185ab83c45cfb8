"""Equal decisions of all ranks about worker processes and TorchScript, whose warm-ups differ between ranks."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.data.slices import sliced
from tests.jobs import job_of, only
from tests.ranks import on_ranks
from tests.techniques.harness import STARVED, given_timings, tuned_workers
from tests.techniques.harness import decided as decided_about
from tests.tuning.lockstep_checks import SECONDS, decided, ranks


class Net(nn.Module):
    """Classifier with state in BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Samples(Dataset[tuple[Tensor, int]]):
    """Deterministic samples that take time to make."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        for _ in range(200):
            made = torch.full((8,), float(i)).sin()
        return made, i % 3


def tuned(*names: str, loss_fn: Any = functional.cross_entropy, budget: float = 0.0, **techniques: Any) -> flatout.Run:
    """Return a run for which all ranks have made the same decisions about the techniques."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    signal.alarm(SECONDS)
    run = flatout.optimize(
        model,
        DataLoader(Samples(), batch_size=8, shuffle=True),
        optimizer,
        loss_fn,
        parallel="ddp",
        techniques=only(*names, *techniques) | techniques,
        budget=budget,
        expected_steps=10**6,
        device="cpu",
        plan=None,
    )
    together = ranks().every(decided(run))
    assert all(repr(each) == repr(together[0]) for each in together)
    return run


def trained(run: flatout.Run) -> list[float]:
    """Train for two epochs, after which all ranks have the same weights."""
    losses = [run.step(batch).item() for _ in range(2) for batch in run.loader]
    weights = [p.tolist() for p in run.model.parameters()]
    together = ranks().every((losses, weights))
    assert all(each == together[0] for each in together)
    signal.alarm(0)
    run.undo()
    return losses


@pytest.mark.slow
@on_ranks("pair")
def test_workers_are_measured_by_all_ranks() -> None:
    """All ranks start workers and load at the same time. Either decision is allowed, but all ranks must agree."""
    run = tuned("workers", budget=10.0)
    trained(run)


@on_ranks("pair")
def test_workers_are_those_that_rank_0_has_found() -> None:
    """Each rank measures another best number of workers. All use that of rank 0."""
    together = ranks()
    loader = sliced(DataLoader(Samples(), batch_size=8), together)
    job = job_of(
        Net(), list(loader), loader=loader, loss_fn=functional.cross_entropy, ranks=together, expected_steps=10**6
    )
    signal.alarm(SECONDS)
    with (
        given_timings(6.0, 1.0, STARVED),
        tuned_workers(2 - together.rank),
        decided_about("workers", job=job) as outcome,
    ):
        pass
    signal.alarm(0)
    assert outcome.rows["workers"].status == "kept"
    assert together.every(outcome.values["workers"]["num_workers"]) == [2] * together.size


@pytest.mark.parametrize("settings", [1, {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}])
@on_ranks("pair")
def test_requested_workers_load_the_same_batches(settings: Any) -> None:
    assert trained(tuned(workers=settings)) == trained(tuned())


@pytest.mark.parametrize("value", [True, "script", "trace"])
@on_ranks("pair")
def test_requested_torchscript_trains_as_the_plain_model(value: Any) -> None:
    run = tuned(torchscript=value)
    assert run.report.row("torchscript").status == "kept"
    assert trained(run) == pytest.approx(trained(tuned()), rel=1e-4)


@on_ranks("pair")
def test_torchscript_that_fails_on_one_rank_is_refused_by_all() -> None:
    """The script computes wrong values on rank 1."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("no such operator")

    forms = {"script": fails, "trace": fails} if ranks().rank == 1 else {}
    with mock.patch.dict("flatout.techniques.torchscript.FORMS", forms), pytest.raises(ValueError, match="torchscript"):
        tuned(torchscript=True)
    signal.alarm(0)
