"""Several ranks that train one model: a warning if nothing synchronizes them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import flatout
from flatout.tuning.ranks import why_apart, world_size
from tests.jobs import QUICK, Net, make_data
from tests.ranks import RankPool
from tests.reasons import reasons


def run_of(model: nn.Module, loader: Any, optimizer: Any = torch.optim.SGD) -> tuple[flatout.Run, list[str]]:
    """Return a run, and its warnings about ranks."""
    given = () if optimizer is None else (optimizer(model.parameters(), 0.1), functional.cross_entropy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = flatout.optimize(model, loader, *given, techniques=QUICK, budget=0, device="cpu")
    warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return run, [message for message in warned if "ranks-apart" in reasons(message)]


def loader_of(**how: Any) -> DataLoader[Any]:
    return DataLoader(make_data(), batch_size=16, **how)


def check_plain_models_train_apart() -> None:
    for loader, needs_sampler in ((loader_of(), True), (loader_of(sampler=DistributedSampler(make_data())), False)):
        run, said = run_of(Net(), loader)
        noted = [note for note in run.report.summary.notes if "ranks-apart" in reasons(note)]
        assert said == (noted if dist.get_rank() == 0 else [])
        assert len(noted) == 1
        assert "DistributedDataParallel" in noted[0]
        assert ("DistributedSampler" in noted[0]) is needs_sampler
    run, said = run_of(Net(), loader_of(), None)  # a user's own loop may wrap the model later
    assert not said


def check_wrapped_models_train_together() -> None:
    wrapped = nn.parallel.DistributedDataParallel(Net())
    run, said = run_of(wrapped, loader_of())
    assert not said
    for batch in run.loader:
        run.step(batch)
    hooked = Net()
    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    optimizer = torch.optim.SGD(hooked.parameters(), 0.1)
    assert not why_apart([hooked], optimizer, loader_of())
    plain = Net()
    averaging = torch.optim.SGD(plain.parameters(), 0.1)
    assert why_apart([plain], averaging, loader_of())
    averaging.register_step_pre_hook(lambda *_: None)
    assert not why_apart([plain], averaging, loader_of())
    sharded = fully_shard(nn.Linear(4, 4), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    assert not why_apart([sharded], torch.optim.SGD(sharded.parameters(), 0.1), loader_of())
    assert why_apart([wrapped.module], torch.optim.SGD(wrapped.parameters(), 0.1), loader_of())


def test_ranks_that_nothing_synchronizes_warn_once_and_in_the_report(pair: RankPool) -> None:
    pair(check_plain_models_train_apart)


def test_ranks_that_are_synchronized_are_not_warned(pair: RankPool) -> None:
    pair(check_wrapped_models_train_together)


def test_torchruns_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(run_of(Net(), loader_of())[1]) == 1
    for one in ("1", "many", ""):
        monkeypatch.setenv("WORLD_SIZE", one)
        assert world_size() == 1
        assert not run_of(Net(), loader_of())[1]
