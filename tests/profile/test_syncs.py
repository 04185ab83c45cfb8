"""Search for syncs, and the use of torch's sync debug mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

import flatout
from flatout.profile import Sync
from flatout.profile.phase_timer import PhaseTimer
from flatout.profile.syncs import watching
from tests.jobs import NO_TECHNIQUES

HERE = Path(__file__)


def found(code: Callable[[], object], cuda: bool = False, steps: int = 1) -> tuple[Sync, ...]:
    timer = PhaseTimer()
    with timer.listening(), watching(cuda, timer.phase) as seen:
        for _ in range(steps):
            code()
    return tuple(Sync(*call, count / steps) for call, count in seen.most_common())


x = torch.tensor([1.0, 0.0, 2.0])


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("item", lambda: x[0].item()),
        ("item", lambda: float(x[0])),
        ("item", lambda: bool(x[0])),
        ("item", lambda: int(x[0])),
        ("nonzero", lambda: x.nonzero()),
        ("mask", lambda: x[x > 0]),
        ("mask", lambda: x.clone().index_put_((x > 0,), x[:2])),
        ("masked_select", lambda: x.masked_select(x > 0)),
        ("unique", lambda: x.unique()),
        ("equal", lambda: torch.equal(x, x)),
        ("repeat_interleave", lambda: torch.repeat_interleave(torch.tensor([1, 2]))),
        ("cpu", lambda: x.cpu()),
        ("to", lambda: x.to("cpu")),
        ("to", lambda: x.to(device=torch.device("cpu"))),
        ("tolist", lambda: x.tolist()),
        ("numpy", lambda: x.numpy()),
        ("numpy", lambda: np.asarray(x)),
        ("print", lambda: str(x)),
        ("print", lambda: f"{x}"),
    ],
)
def test_each_sync_is_found_with_its_line(what: str, code: Callable[[], object]) -> None:
    syncs = found(code, steps=2)
    assert what in {sync.what for sync in syncs}
    (sync,) = {sync.where: sync for sync in syncs}.values()
    assert sync.where.endswith(f"test_syncs.py:{code.__code__.co_firstlineno}")
    assert "lambda" in sync.code
    assert sync.phase == "host_idle"
    assert {sync.per_step for sync in syncs if sync.what == what} == {1}


@pytest.mark.parametrize(
    "code",
    [
        lambda: (x + 1).sum().relu(),
        lambda: x.to(torch.float64),
        lambda: x.to(x.double()),
        lambda: x.to(x.device),
        lambda: torch.where(x > 0, x, 0),
        lambda: x[torch.tensor([0, 2])],
        lambda: x.clone().masked_fill_(x > 0, 1.0),
        lambda: x.clone().index_put_((x > 0,), torch.ones(())),
        lambda: torch.repeat_interleave(torch.tensor([1, 2]), output_size=3),
        lambda: len(x) + x.numel() + x.dim(),
    ],
)
def test_calls_without_a_sync_are_not_found(code: Callable[[], object]) -> None:
    assert found(code) == ()


def test_an_optimizers_own_counts_are_on_the_host_anyway() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    assert found(optimizer.step) == ()


def test_samples_are_on_the_host_anyway() -> None:
    samples = [torch.ones(()), torch.zeros(())]
    loader = DataLoader(samples, 2, collate_fn=lambda batch: [sample.item() for sample in batch])  # type: ignore[arg-type]
    assert found(lambda: list(loader)) == ()


def test_a_scalers_look_at_the_gradients_is_in_the_update() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    syncs = found(lambda: scaler.step(optimizer))
    assert {(sync.what, sync.phase) for sync in syncs} == {("item", "update")}


def test_a_hook_of_the_backward_is_in_the_backward() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def look(grad: Tensor) -> None:
        grad.sum().item()

    weight.register_hook(look)  # type: ignore[arg-type]
    (sync,) = found(lambda: (weight * 2).sum().backward())
    assert (sync.what, sync.phase) == ("item", "backward")


def test_syncs_of_a_runs_loss_and_update_are_in_their_phases() -> None:
    class Reading(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            self.param_groups[0]["params"][0].sum().item()
            super().step()

    def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        batch.sum().item()  # outside a module's call
        return model(batch).sum()

    model = torch.nn.Linear(2, 1)
    optimizer = Reading(model.parameters(), 0.1)
    batches = [torch.ones(3, 2)]
    run = flatout.optimize(model, batches, optimizer, compute_loss=loss, techniques=NO_TECHNIQUES, budget=0)
    syncs = found(lambda: run.step(batches[0]))
    assert {sync.phase for sync in syncs if "sum()" in sync.code} == {"forward", "update"}


def test_an_error_puts_everything_back() -> None:
    names = ("cpu", "to", "numpy", "tolist", "__array__", "__repr__")
    before = [vars(Tensor).get(name) for name in names], _get_current_dispatch_mode_stack()
    with pytest.raises(ZeroDivisionError):
        found(lambda: 1 / 0)
    assert ([vars(Tensor).get(name) for name in names], _get_current_dispatch_mode_stack()) == before
    assert not {"cpu", "to"} & vars(Tensor).keys()  # attributes of the base class are visible again


def test_warnings_of_the_debug_mode_are_taken_and_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["error"]

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def waits() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)

    def code() -> None:
        waits()
        waits()
        warnings.warn("something else", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error", DeprecationWarning)
        before = list(warnings.filters), warnings.showwarning
        syncs = found(code, cuda=True)
        assert (list(warnings.filters), warnings.showwarning) == before
    assert [str(warning.message) for warning in shown] == ["something else"]
    (sync,) = syncs
    assert (sync.what, sync.per_step) == ("synchronize", 2)
    assert sync.where.endswith(f"test_syncs.py:{waits.__code__.co_firstlineno + 1}")
    assert modes == ["error", "warn", "error"]


def test_waits_that_the_debug_mode_does_not_report_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            waits.append(self)

    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    before, event = (torch.cuda.synchronize, Event.synchronize), Event()

    def code() -> None:
        torch.cuda.synchronize("cuda:0")
        event.synchronize()

    syncs = found(code, cuda=True)
    line = code.__code__.co_firstlineno
    assert [(sync.what, sync.where.rpartition(":")[2]) for sync in syncs] == [
        ("synchronize", str(line + 1)),
        ("synchronize", str(line + 2)),
    ]
    assert waits == ["cuda:0", event]
    assert (torch.cuda.synchronize, Event.synchronize) == before
