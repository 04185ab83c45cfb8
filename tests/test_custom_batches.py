"""Batches of a user's own class: moved by ``to``, copied, counted, and passed on unchanged."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.data import batch_size_of, map_tensors, objects_of, split, tensors_of, tensors_within, to_device
from tests.helpers import bits, trained_state
from tests.jobs import NO_TECHNIQUES, QUICK, Net, make_data, train, tried
from tests.reasons import reasons


class Batch:
    """Stand-in for PyTorch Geometric's ``Data``. ``to`` moves it in place, and ``len`` counts its keys."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._store = {"x": x, "y": y}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def keys(self) -> list[str]:
        return list(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def to(self, device: Any) -> Batch:
        self._store = {name: value.to(device) for name, value in self._store.items()}
        return self


class Counted(Batch):
    """Stand-in for PyTorch Geometric's ``Batch``."""

    @property
    def num_graphs(self) -> int:
        return self.x.shape[0]

    def clone(self) -> Counted:
        return type(self)(self.x.clone(), self.y.clone())


class Slotted:
    """Batch without ``__dict__``, but with a length."""

    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: Any) -> Slotted:
        return Slotted(self.x.to(device), self.y.to(device))


class Opaque:
    """Batch whose tensors flatout cannot find, like graphs in a library's own memory."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._get = lambda: (x, y)

    x = property(lambda self: self._get()[0])
    y = property(lambda self: self._get()[1])
    batch_size = torch.Size([16])

    def to(self, device: Any) -> Opaque:
        return Opaque(self.x.to(device), self.y.to(device))


IN_PARTS = NO_TECHNIQUES | {"batch_size": {"micro_batch": 5}}
KINDS: list[Callable[[Tensor, Tensor], Any]] = [Batch, Counted, Slotted, Opaque]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


class Loader:
    """Loader that creates new batches in each epoch."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        for x, y in DataLoader(make_data(), batch_size=16):
            yield self.kind(x, y)


def job(kind: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    model.body[3].p = 0.0  # no random numbers, because a loader draws some too
    return model, Loader(kind), torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_and_evaluates_as_a_plain_loop(kind: Any) -> None:
    model, loader, optimizer = job(kind)
    before = trained_state(model, optimizer)
    run = tried(model, loader, optimizer, compute_loss=loss)
    assert trained_state(model, optimizer) == before
    losses = [float(run.step(batch)) for batch in run.loader]

    assert losses == pytest.approx(train(*job(kind), compute_loss=loss), rel=1e-5)
    assert run.evaluate(loader)["loss"] > 0
    assert run.stats.total.samples == 16 * len(losses)
    assert run.plan.fingerprint["batch"] == kind.__qualname__


@dataclass
class Fields:
    """Batch that can be moved by ``to``, and split by its fields."""

    x: Tensor
    y: Tensor

    def to(self, device: Any) -> Fields:
        return Fields(self.x.to(device), self.y.to(device))


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Entries(UserDict[str, Tensor]):
    """Stand-in for the tokenizers' ``BatchEncoding``."""

    def __init__(self, x: Any = None, y: Any = None) -> None:
        super().__init__({"x": x, "y": y})

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


@pytest.mark.parametrize("kind", [Fields, Named, Entries])
def test_parts_of_a_batch_are_of_its_class_and_weigh_what_loss_weight_says(kind: Any) -> None:
    def made(x: Tensor, y: Tensor) -> Any:
        return kind(x, y.where(x[:, 0] > 0, -100))  # targets that are ignored, unevenly distributed

    def weight(part: Any) -> Tensor:
        weighed.append((type(part), len(part.x)))
        return (part.y != -100).sum()

    weighed: list[tuple[type, int]] = []
    model, _, optimizer = job(kind)
    model.body[1] = nn.Identity()  # BatchNorm would see parts
    batches = [made(x, y) for x, y in DataLoader(make_data(), batch_size=16)]
    run = flatout.optimize(
        model, batches, optimizer, compute_loss=loss, loss_weight=weight, techniques=IN_PARTS, budget=0
    )
    weighed.clear()
    losses = [float(run.step(batch)) for batch in run.loader]
    assert weighed == [(kind, 4)] * 4 * len(batches)

    twin, _, twin_optimizer = job(kind)
    twin.body[1] = nn.Identity()
    assert losses == pytest.approx(train(twin, batches, twin_optimizer, compute_loss=loss), rel=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_split_is_computed_whole_and_never_weighed(kind: Any) -> None:
    def weight(part: Any) -> int:
        raise AssertionError("weighed")

    model, loader, optimizer = job(kind)
    how = {"compute_loss": loss, "loss_weight": weight}
    with pytest.raises(ValueError, match=r"batch_size.*'micro_batch': 5"):
        flatout.optimize(model, loader, optimizer, techniques=IN_PARTS, budget=0, **how)
    run = tried(model, loader, optimizer, **how)
    losses = [float(run.step(batch)) for batch in run.loader]
    assert losses == pytest.approx(train(*job(kind), compute_loss=loss), rel=1e-5)


@pytest.mark.parametrize("kind", [Batch, Counted, Slotted])
def test_a_loss_that_writes_to_its_batch_leaves_the_users_alone(kind: Any) -> None:
    model, _, optimizer = job(kind)
    batches = [kind(x, y) for x, y in DataLoader(make_data(), batch_size=16)]
    kept = [bits(batch.x) for batch in batches]

    def scaling(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch.x.mul_(2)), batch.y)

    tried(model, batches, optimizer, compute_loss=scaling)
    assert [bits(batch.x) for batch in batches] == kept


def test_an_object_is_not_split_where_memory_is_short() -> None:
    def hungry(model: nn.Module, batch: Any) -> Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss(model, batch)

    full: list[bool] = []
    model, loader, optimizer = job(Batch)
    run = flatout.optimize(model, loader, optimizer, compute_loss=hungry, techniques=QUICK, budget=0)
    full.append(True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(next(iter(loader)))
    assert "batch-not-splittable" in reasons(str(caught.value))


def test_a_loader_without_tensors_or_objects_that_move_is_refused() -> None:
    class Still:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

    model, loader, optimizer = job(Still)
    with pytest.raises(ValueError, match=r"loader.*to\(device\)"):
        flatout.optimize(model, loader, optimizer, compute_loss=loss, budget=0)


def test_the_error_of_an_object_without_compute_loss_shows_the_line() -> None:
    model, loader, optimizer = job(Batch)
    with pytest.raises(TypeError, match=r"compute_loss=lambda model, batch: loss_fn\(model\(batch.x\), batch.y\)"):
        flatout.optimize(model, loader, optimizer, functional.cross_entropy, techniques=QUICK, budget=0)


def test_what_is_in_objects_is_found_and_counted() -> None:
    x, y = torch.ones(5, 2), torch.zeros(5)
    batch = Batch(x, y)
    assert tensors_of([batch]) == []
    assert objects_of([batch, 1, "a", nn.Linear(1, 1), Batch, y]) == [batch]
    assert [t.shape for t in tensors_within([y, batch])] == [y.shape, x.shape, y.shape]
    assert len(tensors_within(Slotted(x, y))) == 2
    assert not tensors_within(Opaque(x, y))
    assert [batch_size_of(made) for made in (batch, Counted(x, y), Slotted(x, y), Opaque(x, y))] == [5, 5, 5, 16]
    assert batch_size_of((batch, torch.ones(3))) == 3  # tensors take precedence
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)] * 4)
    assert batch_size_of(packed) == batch_size_of([packed]) == 4
    assert split(batch, [2, 3]) is None
    moved = to_device([Slotted(x, y)], "meta")
    assert moved[0].x.is_meta
    assert map_tensors(torch.neg, batch) is batch
    holds_itself = Batch(x, y)
    holds_itself._store["me"] = holds_itself  # type: ignore[assignment]
    assert len(tensors_within(holds_itself)) == 2
