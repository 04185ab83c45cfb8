"""Loaders that resume in mid-epoch: samples and generators equal those of an uninterrupted run."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.core.random_state import RandomState
from flatout.data import InMemoryLoader, Prefetcher, cache_in_memory, clone_loader
from tests.data.harness import CopyingPrefetcher

SAMPLES = 22


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES * 2.0).reshape(SAMPLES, 2))


class Numbers(Dataset):
    """Dataset whose samples hold the type of the index."""

    asked: int = 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        Numbers.asked += 1
        return int(index), type(index).__name__


class OwnGenerator(Sampler):
    """User's sampler without a state, which draws from a generator that it holds."""

    def __init__(self, _dataset):
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, (), generator=self.generator))


class GlobalGenerators(Sampler):
    """User's batch sampler, which draws a whole epoch at once from all global generators."""

    def __init__(self, _dataset):
        pass

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        random.shuffle(order)
        order = np.random.permutation(order).tolist()
        return iter([order[i : i + 5] for i in range(0, 20, 5)])


class Stateful(Sampler):
    """User's sampler that saves its position."""

    def __init__(self, _dataset):
        self.epoch, self.given = 0, 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.given < SAMPLES:
            self.given += 1
            yield order[self.given - 1]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def given() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[..., DataLoader]] = {
    "sequential": lambda d, **kw: DataLoader(d, 4, **kw),
    "shuffled": lambda d, **kw: DataLoader(d, 4, shuffle=True, **kw),
    "shuffled, drop_last": lambda d, **kw: DataLoader(d, 4, shuffle=True, drop_last=True, **kw),
    "shuffled, full batches": lambda d, **kw: DataLoader(d, 2, shuffle=True, **kw),
    "shuffled, generator": lambda d, **kw: DataLoader(d, 4, shuffle=True, generator=given(), **kw),
    "generator of the sampler": lambda d, **kw: DataLoader(d, 4, sampler=RandomSampler(d, generator=given()), **kw),
    "replacement": lambda d, **kw: DataLoader(
        d, 7, sampler=RandomSampler(d, replacement=True, num_samples=100, generator=given()), generator=given(), **kw
    ),
    "replacement, no generator": lambda d, **kw: DataLoader(
        d, 7, sampler=RandomSampler(d, replacement=True, num_samples=64), **kw
    ),
    "more samples": lambda d, **kw: DataLoader(d, 5, sampler=RandomSampler(d, num_samples=60, generator=given()), **kw),
    "weighted": lambda d, **kw: DataLoader(d, 4, sampler=WeightedRandomSampler([0.1, 2, 1] * 7 + [1], 30), **kw),
    "weighted, generator": lambda d, **kw: DataLoader(
        d, 4, sampler=WeightedRandomSampler([0.1, 2, 1] * 7 + [1], 30, generator=given()), **kw
    ),
    "subset": lambda d, **kw: DataLoader(d, 4, sampler=SubsetRandomSampler(range(1, 20)), **kw),
    "subset, NumPy": lambda d, **kw: DataLoader(d, 4, sampler=SubsetRandomSampler(np.arange(1, 20)), **kw),
    "distributed": lambda d, **kw: DataLoader(d, 4, sampler=DistributedSampler(d, 2, 1, seed=3), **kw),
    "own generator": lambda d, **kw: DataLoader(d, 4, sampler=OwnGenerator(d), **kw),
    "global generators": lambda d, **kw: DataLoader(d, batch_sampler=GlobalGenerators(d), **kw),
    "stateful": lambda d, **kw: DataLoader(d, 4, sampler=Stateful(d), **kw),
    "list of batches": lambda d, **kw: DataLoader(d, batch_sampler=[[0, 1], [2], [3, 4, 5]], **kw),
    "not batched": lambda d, **kw: DataLoader(d, None, shuffle=True, **kw),
    "not batched, own": lambda d, **kw: DataLoader(d, None, sampler=OwnGenerator(d), **kw),
}
WRAPPERS: dict[str, Callable[[DataLoader], Any]] = {
    "in memory": InMemoryLoader,
    "prefetcher": lambda loader: Prefetcher(loader, "cpu"),
    "copying": lambda loader: CopyingPrefetcher(loader, "cpu", 3),
    "copying from memory": lambda loader: CopyingPrefetcher(InMemoryLoader(loader), "cpu", 1),
}


@dataclass
class Log:
    """Record of a training: batches by epoch, and generator states at the end of each epoch."""

    epochs: list[list[Any]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)

    def run(self, wrapped: Iterable[Any], held: Any, epochs: int, stop: tuple[int, int] | None = None) -> Any:
        """Train. At ``stop`` (epoch, batches) save and return, as a training that is killed does."""
        for epoch in range(epochs):
            self.epochs.append([])
            iterator = iter(wrapped)
            if stop == (epoch, 0):
                return self._saved(wrapped)
            for batch in iterator:
                torch.rand(3)  # the model draws, too
                self.epochs[-1].append(plain(batch))
                if stop == (epoch, len(self.epochs[-1])):
                    return self._saved(wrapped)
            self.generators.append(plain(RandomState.capture(held).states()))
        return None

    def _saved(self, wrapped: Any) -> tuple[Any, Any]:
        buffer = io.BytesIO()
        torch.save(wrapped.state_dict(), buffer)
        buffer.seek(0)
        return torch.load(buffer), RandomState.capture().states()


def plain(value: Any) -> Any:
    """Return ``value`` with lists instead of tensors, for comparisons."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def held_by(loader: DataLoader) -> list[Any]:
    """Return the generators of a loader that a user can access."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return [loader.generator, getattr(sampler, "generator", None), getattr(loader.sampler, "generator", None)]


def scramble() -> None:
    """Seed the global generators with other numbers, as in a new process."""
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)


def check(make: Callable[[], DataLoader], wrap, epoch: int, batches: int, then_wrap=None, then_make=None) -> None:
    """Compare a run that stops in ``epoch`` after ``batches`` with a whole run.

    A negative number of batches counts from the end of the epoch.
    """
    scramble()
    whole, loader = Log(), make()
    whole.run(wrap(loader), held_by(loader), 3)
    stop = epoch, batches % (len(whole.epochs[epoch]) + 1)

    scramble()
    first, loader = Log(), make()
    state, generators = first.run(wrap(loader), held_by(loader), 3, stop)
    assert first.epochs == [*whole.epochs[: stop[0]], whole.epochs[stop[0]][: stop[1]]]

    torch.manual_seed(12345)
    second, loader = Log(), (then_make or make)()
    wrapped = (then_wrap or wrap)(loader)
    RandomState.capture().write(generators)
    wrapped.load_state_dict(state)
    second.run(wrapped, held_by(loader), 3 - stop[0])
    assert second.epochs == [whole.epochs[stop[0]][stop[1] :], *whole.epochs[stop[0] + 1 :]]
    assert second.generators == whole.generators[stop[0] :]


@pytest.mark.parametrize(("epoch", "batches"), [(0, 0), (0, 1), (1, 2), (1, -2), (2, -1)])
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [(kind, wrapper) for kind in LOADERS for wrapper in WRAPPERS if not ("memory" in wrapper and "not batch" in kind)],
)
def test_goes_on_to_the_sample(kind, wrapper, epoch, batches):
    check(lambda: LOADERS[kind](dataset()), WRAPPERS[wrapper], epoch, batches)


@pytest.mark.parametrize(
    ("epoch", "batches", "persistent"), [(0, 0, False), (1, 2, False), (1, 2, True), (1, -1, False)]
)
@pytest.mark.parametrize("kind", ["shuffled", "shuffled, generator", "replacement", "stateful", "own generator"])
def test_workers(kind, epoch, batches, persistent):
    def make():
        return LOADERS[kind](dataset(), num_workers=2, persistent_workers=persistent)

    check(make, WRAPPERS["prefetcher"], epoch, batches)


def test_what_a_sampler_drew_from_the_model_s_generator_is_not_drawn_again_in_silence():
    """The sampler draws ahead for workers, and the model draws in between."""

    class Lazy(Sampler):
        def __len__(self):
            return SAMPLES

        def __iter__(self):
            for _ in range(SAMPLES):
                yield int(torch.randint(SAMPLES, ()))

    def make():
        return Prefetcher(DataLoader(dataset(), 1, sampler=Lazy(), num_workers=2), "cpu")

    torch.manual_seed(0)
    prefetcher = make()
    iterator = iter(prefetcher)
    for _ in range(3):
        torch.rand(5)
        next(iterator)
    resumed = make()
    resumed.load_state_dict(prefetcher.state_dict())
    with pytest.raises(ValueError, match="state_dict"):
        next(iter(resumed))


def test_a_drawn_tail_is_not_drawn_twice():
    """Prefetching to the end of the epoch draws samples that drop_last leaves out."""

    class Few(OwnGenerator):
        def __len__(self):
            return 5

        def __iter__(self):
            for _ in range(5):
                yield int(torch.randint(5, (), generator=self.generator))

    def make():
        return DataLoader(range(5), 3, sampler=Few(None), drop_last=True)  # type: ignore[arg-type]

    for batches in (0, 1):
        check(make, WRAPPERS["copying"], 1, batches)


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
def test_any_number_of_workers_can_go_on(workers):
    """The result does not depend on how many batches the workers have prefetched."""
    before, after = workers

    def made_with(number: int):
        return lambda: LOADERS["shuffled, generator"](dataset(), num_workers=number)

    check(made_with(before), WRAPPERS["prefetcher"], 1, 2, then_make=made_with(after))


@pytest.mark.parametrize("names", [("prefetcher", "in memory"), ("in memory", "prefetcher")])
def test_one_kind_of_loader_goes_on_where_another_stopped(names):
    before, after = (WRAPPERS[name] for name in names)
    check(lambda: LOADERS["shuffled"](dataset()), before, 1, 2, then_wrap=after)


def test_a_cached_dataset():
    check(lambda: DataLoader(list(range(SAMPLES)), 4, shuffle=True), cache_in_memory, 1, 2)


def test_the_dataset_is_not_asked_again():
    for kind in LOADERS:
        prefetcher = Prefetcher(LOADERS[kind](Numbers()), "cpu")
        iterator = iter(prefetcher)
        next(iterator)
        state = prefetcher.state_dict()
        Numbers.asked = 0
        left = sum(1 if isinstance(batch[0], int) else len(batch[0]) for batch in iterator)
        assert Numbers.asked == left
        resumed = Prefetcher(LOADERS[kind](Numbers()), "cpu")
        resumed.load_state_dict(state)
        Numbers.asked = 0
        assert sum(1 if isinstance(batch[0], int) else len(batch[0]) for batch in resumed) == left
        assert Numbers.asked == left


@pytest.mark.parametrize("kind", LOADERS)
def test_indices_keep_their_types(kind):
    """The dataset receives the index types of the user's sampler, also in the rest of an epoch."""
    scramble()
    theirs = [plain(batch) for batch in LOADERS[kind](Numbers())]
    scramble()
    prefetcher = Prefetcher(LOADERS[kind](Numbers()), "cpu")
    first = plain(next(iter(prefetcher)))
    resumed = Prefetcher(LOADERS[kind](Numbers()), "cpu")
    resumed.load_state_dict(prefetcher.state_dict())
    assert [first, *map(plain, resumed)] == theirs


def test_the_number_of_the_epoch_is_resumed():
    """The user's loop may set the number of the next epoch only."""

    def make() -> tuple[DistributedSampler, Prefetcher]:
        sampler: DistributedSampler = DistributedSampler(dataset(), 2, 1)
        return sampler, Prefetcher(DataLoader(dataset(), 4, sampler=sampler), "cpu")

    sampler, prefetcher = make()
    sampler.set_epoch(3)
    iterator = iter(prefetcher)
    next(iterator)
    again, resumed = make()
    resumed.load_state_dict(prefetcher.state_dict())
    assert plain(list(resumed)) == plain(list(iterator))
    assert again.epoch == 3


def test_between_epochs():
    """A state saved between epochs starts the next epoch, with the loader's own generator restored."""
    torch.manual_seed(0)
    loader = LOADERS["shuffled, generator"](dataset())
    prefetcher = Prefetcher(loader, "cpu")
    list(prefetcher)
    state = prefetcher.state_dict()
    assert state["position"] is None
    theirs = plain(list(prefetcher))
    resumed = Prefetcher(LOADERS["shuffled, generator"](dataset()), "cpu")
    resumed.load_state_dict(state)
    assert plain(list(resumed)) == theirs


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        (kind, persistent)
        for kind in ("shuffled", "shuffled, generator", "global generators")
        for persistent in ("no", "the user's", "flatout's")
        if (kind, persistent) != ("global generators", "flatout's")  # this sampler never has persistent workers
    ],
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_between_epochs_of_workers(wrapper, kind, persistent, before):
    """Persistent workers receive their seed in the first epoch, in any process."""

    def make():
        loader = LOADERS[kind](dataset(), num_workers=1, persistent_workers=persistent == "the user's")
        return clone_loader(loader, persistent_workers=True) if persistent == "flatout's" else loader

    scramble()
    whole, loader = Log(), make()
    whole.run(WRAPPERS[wrapper](loader), held_by(loader), 4)

    scramble()
    state = None
    for epochs in (before, 1, 3 - before):  # the second process saves again
        part, loader = Log(), make()
        wrapped = WRAPPERS[wrapper](loader)
        if state is not None:
            scramble()
            RandomState.capture().write(state[1])
            wrapped.load_state_dict(state[0])
            state = part._saved(wrapped)  # a state that was loaded, but not resumed
            wrapped.load_state_dict(state[0])
        part.run(wrapped, held_by(loader), epochs)
        state = part._saved(wrapped)
        assert part.epochs == whole.epochs[:epochs]
        assert part.generators == whole.generators[:epochs]
        del whole.epochs[:epochs], whole.generators[:epochs]


def test_workers_that_are_started_again_between_epochs_draw_other_numbers():
    class Random(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.rand(())

    def make():
        return Prefetcher(DataLoader(Random(), num_workers=1, persistent_workers=True), "cpu")

    first = make()
    seen = [plain(list(first))]
    state = first.state_dict()
    for _ in range(2):
        resumed = make()
        resumed.load_state_dict(state)
        seen.append(plain(list(resumed)))
        state = resumed.state_dict()
    assert len({number for epoch in seen for (number,) in epoch}) == 6


def test_a_loaded_state_can_be_saved_again():
    prefetcher = Prefetcher(LOADERS["shuffled"](dataset()), "cpu")
    next(iter(prefetcher))
    state = prefetcher.state_dict()
    resumed = Prefetcher(LOADERS["shuffled"](dataset()), "cpu")
    resumed.load_state_dict(state)
    assert str(resumed.state_dict()["position"]) == str(state["position"])
    rest = list(resumed)
    assert len(rest) == len(prefetcher) - 1
    assert len(list(resumed)) == len(prefetcher)  # the next epoch is complete


def test_an_epoch_that_was_left_is_gone_on_with():
    """Resume in the same process, as after a stop at a number of steps."""
    prefetcher = Prefetcher(LOADERS["sequential"](dataset()), "cpu")
    for number, _ in enumerate(prefetcher):
        if number == 1:
            break
    prefetcher.load_state_dict(prefetcher.state_dict())
    assert next(iter(prefetcher))[0].tolist() == [8, 9, 10, 11]


def test_a_resumed_epoch_that_was_left_before_its_first_batch_begins_again():
    """Persistent workers of the first attempt would draw their seed again."""

    def make():
        loader = LOADERS["shuffled, generator"](dataset(), num_workers=1)
        return Prefetcher(clone_loader(loader, persistent_workers=True), "cpu")

    whole, first, resumed = make(), make(), make()
    epochs = [plain(list(whole)) for _ in range(2)]
    next(iter(first))
    resumed.load_state_dict(first.state_dict())
    iter(resumed)
    assert [plain(list(resumed)) for _ in range(2)] == [epochs[0][1:], epochs[1]]


@pytest.mark.parametrize(
    "other",
    [
        DataLoader(dataset(), 8, shuffle=True),
        DataLoader(dataset(), 4),
        DataLoader(dataset(), 4, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(torch.arange(7)), 4, shuffle=True),
    ],
    ids=["batch_size", "sampler", "drop_last", "length"],
)
def test_a_state_of_another_loader_is_refused(other, request):
    prefetcher = Prefetcher(LOADERS["shuffled"](dataset()), "cpu")
    next(iter(prefetcher))
    with pytest.raises(ValueError, match=request.node.callspec.id):
        Prefetcher(other, "cpu").load_state_dict(prefetcher.state_dict())
    with pytest.raises(ValueError, match="state_dict"):
        prefetcher.load_state_dict({"batches": 3})


def test_a_sampler_that_draws_something_else_is_an_error():
    torch.manual_seed(0)
    make = LOADERS["global generators"]
    prefetcher = Prefetcher(make(dataset()), "cpu")
    next(iter(prefetcher))
    state = prefetcher.state_dict()

    class Other(GlobalGenerators):
        def __iter__(self):
            return iter([[1, 2, 3, 4, 5]] * 4)

    Other.__name__ = "GlobalGenerators"
    changed = Prefetcher(DataLoader(dataset(), batch_sampler=Other(None)), "cpu")
    changed.load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict"):
        next(iter(changed))


class Stream(IterableDataset):
    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < 10:
            self.given += 1
            yield self.given - 1
        self.given = 0


class StatefulStream(Stream):
    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.parametrize("kind", [Prefetcher, CopyingPrefetcher])
def test_streams_say_where_they_are(kind):
    prefetcher = kind(DataLoader(StatefulStream(), 3), "cpu")
    iterator = iter(prefetcher)
    next(iterator), next(iterator)
    state = prefetcher.state_dict()
    rest = plain(list(iterator))
    resumed = kind(DataLoader(StatefulStream(), 3), "cpu")
    before = torch.get_rng_state()
    resumed.load_state_dict(state)
    assert plain(list(resumed)) == rest == [[6, 7, 8], [9]]
    assert torch.equal(torch.get_rng_state(), before)
    assert plain(list(resumed)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


@pytest.mark.parametrize(
    ("loader", "lack"),
    [
        (DataLoader(Stream(), 3), "Stream"),
        (DataLoader(StatefulStream(), 3, num_workers=1), "worker"),
        (range(4), "range.*state_dict"),
        (DataLoader(dataset(), 3, num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_what_cannot_go_on_says_why(loader, lack):
    prefetcher = Prefetcher(loader, "cpu")
    with pytest.raises(TypeError, match=lack):
        prefetcher.state_dict()


@pytest.mark.parametrize("kind", [Prefetcher, CopyingPrefetcher])
def test_a_stream_s_last_batch_is_its_last(kind):
    prefetcher = kind(DataLoader(StatefulStream(), 3), "cpu")
    iterator = iter(prefetcher)
    for _ in range(4):
        next(iterator)
    resumed = kind(DataLoader(StatefulStream(), 3), "cpu")
    resumed.load_state_dict(prefetcher.state_dict())
    assert list(resumed) == []
    assert len(list(resumed)) == 4


class OwnLoader:
    """User's loader with a state."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < 5:
            self.given += 1
            yield torch.tensor([self.given])
        self.given = 0

    state_dict, load_state_dict = StatefulStream.state_dict, StatefulStream.load_state_dict


@pytest.mark.parametrize("kind", [Prefetcher, CopyingPrefetcher])
@pytest.mark.parametrize("make", [OwnLoader, lambda: [torch.tensor([i]) for i in range(1, 6)]])
def test_other_loaders(make, kind):
    prefetcher = kind(make(), "cpu")
    iterator = iter(prefetcher)
    next(iterator), next(iterator)
    resumed = kind(make(), "cpu")
    resumed.load_state_dict(prefetcher.state_dict())
    assert plain(list(resumed)) == [[3], [4], [5]]
    assert plain(list(resumed)) == [[1], [2], [3], [4], [5]]


def test_an_exception_counts_as_its_batch():
    class Raises(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError(index)
            return index

    for kind in (Prefetcher, CopyingPrefetcher):
        prefetcher = kind(DataLoader(Raises(), 2), "cpu")
        iterator = iter(prefetcher)
        next(iterator), next(iterator)
        with pytest.raises(KeyError):
            next(iterator)
        resumed = kind(DataLoader(Raises(), 2), "cpu")
        resumed.load_state_dict(prefetcher.state_dict())
        assert next(iter(resumed)).tolist() == [6, 7]


@pytest.mark.parametrize("kind", [Prefetcher, CopyingPrefetcher])
def test_an_old_iterator_does_not_move_the_new_ones_place(kind):
    prefetcher = kind(LOADERS["sequential"](dataset()), "cpu")
    old, new = iter(prefetcher), iter(prefetcher)
    next(new)
    next(old), next(old)
    prefetcher.load_state_dict(prefetcher.state_dict())
    assert next(iter(prefetcher))[0].tolist() == [4, 5, 6, 7]


def test_sequential_sampler_is_not_copied():
    """The sampler covers a sequence other than the dataset."""
    loader = DataLoader(dataset(), 4, sampler=SequentialSampler(range(9)))
    check(lambda: loader, WRAPPERS["prefetcher"], 0, 1)


def test_a_huge_dataset_in_order():
    """Resuming creates no list of all indices."""

    class Huge(Dataset):
        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            return index

    prefetcher = Prefetcher(DataLoader(Huge(), 4), "cpu")
    next(iter(prefetcher))
    resumed = Prefetcher(DataLoader(Huge(), 4), "cpu")
    resumed.load_state_dict(prefetcher.state_dict())
    assert next(iter(resumed)).tolist() == [4, 5, 6, 7]


def test_a_sampler_that_draws_when_it_is_iterated():
    """The sampler draws before the loader draws the seed of workers, with and without batches."""

    class AtOnce(Sampler):
        def __len__(self):
            return 5

        def __iter__(self):
            return iter(torch.randperm(5).tolist())

    torch.manual_seed(0)
    theirs = list(DataLoader(range(5), None, sampler=AtOnce()))  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert list(Prefetcher(DataLoader(range(5), None, sampler=AtOnce()), "cpu")) == theirs  # type: ignore[arg-type]


class Hiccup(Sampler):
    """Sampler that fails once in mid-epoch and then continues."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return 4

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        if self.given == 3:
            raise KeyError("hiccup")
        if self.given > 4:
            raise StopIteration
        return [self.given]


def test_a_sampler_that_fails_once_goes_on():
    iterator = iter(Prefetcher(DataLoader(range(9), batch_sampler=Hiccup()), "cpu"))  # type: ignore[arg-type]
    seen = [int(next(iterator)), int(next(iterator))]
    with pytest.raises(KeyError, match="hiccup"):
        next(iterator)
    assert seen + [int(batch) for batch in iterator] == [1, 2, 4]


def test_a_loader_whose_state_is_not_to_be_had_is_iterated_all_the_same():
    class Stateless(OwnLoader):
        def state_dict(self):
            raise NotImplementedError("not here")

    prefetcher = CopyingPrefetcher(Stateless(), "cpu")
    assert len(list(prefetcher)) == 5
    with pytest.raises(NotImplementedError, match="not here"):
        prefetcher.state_dict()


@pytest.mark.parametrize("make", [lambda: [torch.zeros(1)], lambda: DataLoader(StatefulStream(), 3)])
def test_a_state_of_another_kind_of_loader_is_refused(make):
    prefetcher, other = Prefetcher(LOADERS["shuffled"](dataset()), "cpu"), Prefetcher(make(), "cpu")
    before = other.state_dict()
    with pytest.raises(ValueError, match="kind"):
        other.load_state_dict(prefetcher.state_dict())
    assert other.state_dict() == before


def test_a_share_of_nothing():
    sampler = DistributedSampler([], num_replicas=2, rank=0)  # type: ignore[arg-type]
    assert list(Prefetcher(DataLoader([], 4, sampler=sampler), "cpu")) == []  # type: ignore[arg-type]


def test_a_sampler_that_uses_one_list_again():
    class Again(Sampler):
        def __len__(self):
            return 5

        def __iter__(self):
            batch = []
            for index in range(5):
                batch.append(index)
                yield batch
                batch.clear()

    def make():
        return CopyingPrefetcher(DataLoader(range(9), batch_sampler=Again()), "cpu")  # type: ignore[arg-type]

    prefetcher = make()
    iterator = iter(prefetcher)
    next(iterator), next(iterator)
    resumed = make()
    resumed.load_state_dict(prefetcher.state_dict())
    assert [int(batch) for batch in resumed] == [2, 3, 4]
