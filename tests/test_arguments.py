"""The checks of ``optimize``'s arguments: loaders that begin again, schedulers, choices that contradict each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from tests.helpers import snapshot
from tests.jobs import QUICK, Net, make_data

pytestmark = pytest.mark.usefixtures("short_trials")


def batches(count: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 8, generator=generator), torch.arange(4) % 3) for _ in range(count)]


def tuned(loader: Any = None, **how: Any) -> flatout.Run:
    """A run of a small job, with nothing measured."""
    model = how.pop("model", None) or Net()
    optimizer = how.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    how = {"loss_fn": functional.cross_entropy, "techniques": QUICK, "budget": 0} | how
    return flatout.optimize(model, batches() if loader is None else loader, optimizer, **how)


# -- loaders that cannot begin again ---------------------------------------------------------------------------

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
    with pytest.raises(TypeError, match="loader must be iterable more than once"):
        tuned(loader, model=model)
    assert snapshot(model) == before
    assert len(list(loader)) == len(list(make()))


class StartsOver:
    """An iterator as NVIDIA DALI's are with ``auto_reset``: ``iter`` returns itself, and an epoch's end rewinds it."""

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
    assert not loader.is_closed  # an epoch's end is not the loader's


def test_an_endless_iterator_is_a_loader() -> None:
    run = tuned(itertools.cycle(batches()))
    assert len([run.step(batch) for batch, _ in zip(run.loader, range(9), strict=False)]) == 9


class Once:
    """Hands out one and the same iterator every time."""

    def __init__(self) -> None:
        self._batches = iter(batches())

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def test_an_epoch_without_a_batch_is_an_error_where_it_happens() -> None:
    run = tuned(Once())
    assert len([run.step(batch) for batch in run.loader]) == 6
    with pytest.raises(ValueError, match="loader must yield batches in every epoch, got a Once"):
        next(iter(run.loader))
    with pytest.raises(ValueError, match="loader must yield batches"):
        run.fit(1, progress=False)


def test_an_eval_loader_that_cannot_begin_again_is_refused_before_training() -> None:
    run = tuned()
    with pytest.raises(TypeError, match="eval_loader must be iterable more than once"):
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
    with pytest.raises(ValueError, match="scheduler must be made for the optimizer"):
        tuned(model=model, optimizer=other, scheduler=make(mine))
    run = tuned(model=model, optimizer=mine, scheduler=make(mine))
    run.fit(1, progress=False)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead, SAM and accelerate's do."""

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
        with pytest.raises(TypeError, match="scheduler must have a step"):
            tuned(scheduler=wrong)
