"""Slices of batches: each sample once over all ranks, in the order of one process, from any position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.core.random_state import RandomState
from flatout.data import InMemoryLoader, Prefetcher, cache_in_memory, clone_loader, is_rewindable, seed_samples, tune
from flatout.data.loaders import (
    first_batches,
    known_length,
    loader_position,
    original_of,
    set_attribute,
    set_epoch,
    why_not_resized,
    with_batch_size,
)
from flatout.data.order import BatchShare, slice_of, slices_of
from flatout.data.replay_buffer import ReplayBuffer
from flatout.data.seeding import is_seeded, with_workers
from flatout.data.slices import sliced, why_not_sliced
from flatout.distributed.agreement import ALONE, Agreement
from tests.data.harness import CopyingPrefetcher, RecordedRanks, on_ranks, seed_all

SAMPLES = 22


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def dataset(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Lazy(Sampler):
    """Sampler that draws each index on request, from three global generators."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return self.samples

    def __iter__(self):
        left = list(range(self.samples))
        while left:
            yield left.pop(random.randrange(len(left)))
            if left:
                left.insert(0, left.pop(int(torch.randint(len(left), ())) // 2 + np.random.randint(len(left)) // 2))


class AtOnce(Sampler):
    """Batch sampler that draws an epoch in ``__iter__``, with batches of 1 to 5 samples, as tuples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return 5

    def __iter__(self):
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        return iter([tuple(order[i * i : (i + 1) ** 2][:5]) for i in range(5)])


class Stateful(Sampler):
    """Sampler with a state, which cannot be rewound."""

    def __init__(self, samples: int) -> None:
        self.samples, self.place, self.order = samples, 0, []

    def __len__(self):
        return self.samples

    def __iter__(self):
        if self.place == 0:
            self.order = torch.randperm(self.samples).tolist()
        while self.place < self.samples:
            self.place += 1
            yield self.order[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "order": list(self.order)}

    def load_state_dict(self, state):
        self.place, self.order = state["place"], list(state["order"])


ORDERS: dict[str, Callable[..., DataLoader]] = {
    "sequential": lambda d, b=4, **kw: DataLoader(d, b, **kw),
    "shuffled": lambda d, b=4, **kw: DataLoader(d, b, shuffle=True, **kw),
    "shuffled, generator": lambda d, b=4, **kw: DataLoader(d, b, shuffle=True, generator=generator(), **kw),
    "drop_last": lambda d, b=4, **kw: DataLoader(d, b, shuffle=True, drop_last=True, **kw),
    "replacement": lambda d, b=4, **kw: DataLoader(
        d, b, sampler=RandomSampler(d, replacement=True, num_samples=70), **kw
    ),
    "replacement, generator": lambda d, b=4, **kw: DataLoader(
        d, b, sampler=RandomSampler(d, replacement=True, num_samples=70, generator=generator()), **kw
    ),
    "subset": lambda d, b=4, **kw: DataLoader(d, b, sampler=SubsetRandomSampler(range(1, len(d), 2)), **kw),
    "weighted": lambda d, b=4, **kw: DataLoader(d, b, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 30), **kw),
    "lazy": lambda d, b=4, **kw: DataLoader(d, b, sampler=Lazy(len(d)), **kw),
    "batch sampler": lambda d, b=4, **kw: DataLoader(d, batch_sampler=AtOnce(len(d)), **kw),
    "stateful": lambda d, b=4, **kw: DataLoader(d, b, sampler=Stateful(len(d)), **kw),
    "list of batches": lambda d, b=4, **kw: DataLoader(d, batch_sampler=[[3, 1, 2], [0], [5, 4]], **kw),
}
PERMUTATIONS = ("sequential", "shuffled", "shuffled, generator", "lazy", "stateful")
WRAPPERS: dict[str, Callable[[DataLoader], Any]] = {
    "prefetcher": lambda loader: Prefetcher(loader, "cpu"),
    "copying": lambda loader: CopyingPrefetcher(loader, "cpu", 3),
    "in memory": InMemoryLoader,
    "prefetched memory": lambda loader: Prefetcher(InMemoryLoader(loader), "cpu"),
    "cached": cache_in_memory,
}


def epochs_of(wrapped: Any, epochs: int = 3, noise: int = 0) -> list[list[list[int]]]:
    """Return the indices of each batch of each epoch, with ``noise`` random numbers for each step."""
    seen: list[list[list[int]]] = []
    for _ in range(epochs):
        seen.append([])
        for (batch,) in wrapped:
            torch.rand(noise)
            for _ in range(noise):
                random.random()
            np.random.rand(noise)
            seen[-1].append(batch.tolist())
    return seen


def joined(by_rank: list[list[list[list[int]]]], wholes: list[list[list[int]]]) -> list[list[list[int]]]:
    """Return the batches of all ranks put together, without the stand-ins of smaller batches."""
    size = len(by_rank)
    return [
        [
            [index for rank, part in enumerate(parts) if rank < len(whole) or size == 1 for index in part]
            for whole, *parts in zip(epoch, *epochs, strict=True)
        ]
        for epoch, *epochs in zip(wholes, *by_rank, strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 2, 5, 8, 22])
def test_slices_are_contiguous_and_differ_by_at_most_one(samples, ranks):
    parts = [slice_of(samples, rank, ranks) for rank in range(ranks)]
    own = [index for part, share in parts if share.own for index in range(samples)[part]]
    assert own == list(range(samples))
    sizes = [share.own for _, share in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert {share.total for _, share in parts} == {samples}
    assert all(part == slice(0, 1) for part, share in parts if share.own == 0)


def test_a_single_process_keeps_its_loader():
    for loader in (ORDERS["shuffled"](dataset()), [torch.zeros(4)], object()):
        assert sliced(loader, ALONE) is loader


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_train_on_the_batches_of_one_process(wrapper, kind, size):
    wrap = WRAPPERS[wrapper]
    seed_all(5)
    whole = epochs_of(wrap(ORDERS[kind](dataset())))
    by_rank = on_ranks(size, lambda ranks: epochs_of(wrap(sliced(ORDERS[kind](dataset()), ranks)), noise=ranks.rank))
    assert joined(by_rank, whole) == whole
    if kind in PERMUTATIONS:
        assert all(sorted(flat(epoch)) == list(range(SAMPLES)) for epoch in whole)
    if kind not in ("sequential", "list of batches"):
        assert whole[0] != whole[1] != whole[2]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "lazy", "batch sampler", "replacement, generator", "stateful"])
@pytest.mark.parametrize("wrapper", ["prefetcher", "in memory"])
def test_worker_processes(wrapper, kind, persistent):
    def made(ranks: Agreement) -> Any:
        loader = ORDERS[kind](dataset(), num_workers=2, persistent_workers=persistent)
        return WRAPPERS[wrapper](sliced(loader, ranks))

    seed_all(5)
    whole = epochs_of(made(ALONE))
    assert joined(on_ranks(2, lambda ranks: epochs_of(made(ranks), noise=ranks.rank)), whole) == whole


@pytest.mark.parametrize("kind", ["shuffled", "lazy", "batch sampler", "weighted"])
def test_a_rank_keeps_its_own_random_states(kind):
    def program(ranks: Agreement) -> bool:
        before = RandomState.of_host()
        epochs_of(Prefetcher(sliced(ORDERS[kind](dataset()), ranks), "cpu"))
        return before.moved() is None

    assert on_ranks(3, program) == [False, True, True]


def test_a_resumed_rank_0_keeps_its_own_random_states():
    """Repeated draws of a sampler are draws of the order, not of the training."""

    def program(ranks: Agreement) -> None:
        prefetcher = Prefetcher(sliced(ORDERS["lazy"](dataset()), ranks), "cpu")
        next(iter(prefetcher))
        state = prefetcher.state_dict()
        resumed = Prefetcher(sliced(ORDERS["lazy"](dataset()), ranks), "cpu")
        resumed.load_state_dict(state)
        seed_all(77 + ranks.rank)
        before = RandomState.of_host()
        next(iter(resumed))
        assert before.moved() is None

    on_ranks(2, program)


def test_rank_0_draws_as_one_process_does():
    """The draws are equal between epochs, and if the training draws from the generator of the order."""

    def program(ranks: Agreement) -> Any:
        seen = epochs_of(Prefetcher(sliced(ORDERS["shuffled"](dataset()), ranks), "cpu"), noise=1)
        return seen, RandomState.of_host().states()

    (seen, states), (others, _) = on_ranks(2, program)
    seed_all(5)
    whole = epochs_of(Prefetcher(ORDERS["shuffled"](dataset()), "cpu"), noise=1)
    assert joined([seen, others], whole) == whole
    assert str(states) == str(RandomState.of_host().states())


def test_held_generators_become_those_of_rank_0():
    def program(ranks: Agreement) -> Any:
        own = torch.Generator().manual_seed(ranks.rank)
        loader = DataLoader(dataset(), 4, sampler=RandomSampler(dataset(), generator=own), generator=own)
        seen = epochs_of(Prefetcher(sliced(loader, ranks), "cpu"), noise=ranks.rank)
        return seen, own.get_state().tolist()

    (first, state), (second, same) = on_ranks(2, program)
    assert state == same
    for left, right in zip(first, second, strict=True):
        assert sorted(flat(left) + flat(right)) == list(range(SAMPLES))


def test_an_early_break_leaves_the_ranks_together():
    def program(ranks: Agreement) -> Any:
        prefetcher = Prefetcher(sliced(ORDERS["lazy"](dataset()), ranks), "cpu")
        for count in (1, 3):
            for number, _ in enumerate(prefetcher, 1):
                torch.rand(ranks.rank)
                if number == count:
                    break
        return epochs_of(prefetcher, 1)

    (first,), (second,) = on_ranks(2, program)
    assert sorted(flat(first) + flat(second)) == list(range(SAMPLES))


@pytest.mark.parametrize("wrapper", ["prefetcher", "copying", "prefetched memory"])
@pytest.mark.parametrize("kind", ["shuffled", "lazy"])
def test_shares_belong_to_the_batch_that_was_yielded(kind, wrapper):
    def program(ranks: Agreement) -> Any:
        prefetcher = WRAPPERS[wrapper](sliced(ORDERS[kind](dataset(9)), ranks))
        return [(prefetcher.share, len(batch)) for (batch,) in prefetcher]

    stand_in = (BatchShare(0, 1), 1)
    assert on_ranks(3, program) == [
        [(BatchShare(2, 4), 2), (BatchShare(2, 4), 2), (BatchShare(1, 1), 1)],
        [(BatchShare(1, 4), 1), (BatchShare(1, 4), 1), stand_in],
        [(BatchShare(1, 4), 1), (BatchShare(1, 4), 1), stand_in],
    ]
    prefetcher = WRAPPERS[wrapper](ORDERS[kind](dataset(9)))
    assert {prefetcher.share for _ in prefetcher} == {None}


def test_a_stand_in_is_the_first_sample():
    def program(ranks: Agreement) -> Any:
        return epochs_of(Prefetcher(sliced(ORDERS["shuffled"](dataset(6)), ranks), "cpu"), 1)

    seed_all(5)
    whole = epochs_of(Prefetcher(ORDERS["shuffled"](dataset(6)), "cpu"), 1)
    *_, last = on_ranks(3, program)
    assert last[0][1] == whole[0][1][:1]


@settings(max_examples=60)
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    kind=st.sampled_from(PERMUTATIONS),
    wrapper=st.sampled_from(["prefetcher", "copying", "prefetched memory"]),
)
def test_another_number_of_ranks_resumes(samples, batch, sizes, stops, kind, wrapper):
    """The remaining samples come exactly once, in the order of one process."""
    seed_all(5)
    whole = flat(epochs_of(Prefetcher(ORDERS[kind](dataset(samples), batch), "cpu"), 2))
    saved: Any = None

    def program(ranks: Agreement, stop: int) -> Any:
        """Return this rank's parts of ``stop`` batches, its state, and the states of the global generators."""
        wrapped = WRAPPERS[wrapper](sliced(ORDERS[kind](dataset(samples), batch), ranks))
        if saved is not None:
            wrapped.load_state_dict(saved[0])
            if ranks.rank == 0:
                RandomState.of_host().write(saved[1])
        parts: list[list[int]] = []
        while len(parts) < stop:
            for (found,) in itertools.islice(wrapped, stop - len(parts)):
                share = wrapped.share
                parts.append(found.tolist() if share is None or share.own else [])
                if ranks.rank:
                    seed_all(len(parts))
        return parts, wrapped.state_dict(), RandomState.of_host().states()

    seen: list[list[int]] = []
    for size, stop in zip(sizes, [*stops[: len(sizes) - 1], len(whole)], strict=True):
        count = min(stop, len(whole) - len(seen))
        results = on_ranks(size, lambda ranks, count=count: program(ranks, count))
        seen += [flat(parts) for parts in zip(*(parts for parts, _, _ in results), strict=True)]
        assert len({str(state) for _, state, _ in results}) == 1
        saved = results[0][1:]
    assert seen == whole


class Random(Dataset):
    """Samples with random numbers of three generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.rand(()), random.random()


def numbers_of(loader: Any, epochs: int = 2) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the random numbers of each sample, by epoch and index."""
    return {
        (epoch, int(index)): (float(a), float(b))
        for epoch in range(epochs)
        for batch in loader
        for index, a, b in zip(*batch, strict=True)
    }


def test_workers_of_different_ranks_draw_different_numbers():
    def program(ranks: Agreement) -> Any:
        seed_all(0)  # as a script does on every rank
        loader = DataLoader(Random(), 4, shuffle=True, num_workers=2)
        prefetcher = Prefetcher(sliced(loader, ranks), "cpu")
        seen, state = {}, None
        for number, batch in enumerate(prefetcher):
            seen |= {int(i): float(a) for i, a in zip(batch[0], batch[1], strict=True)}
            if number == 2:
                state = prefetcher.state_dict()
        resumed = Prefetcher(sliced(loader, ranks), "cpu")
        resumed.load_state_dict(state)
        return list(seen.values()), list(numbers_of(resumed, 1).values()), resumed.state_dict()["worker_seed"], state

    (first, rest, seed, state), (second, others, same, other_state) = on_ranks(2, program)
    assert len(first) + len(second) == SAMPLES
    assert len({*first, *second}) == SAMPLES
    assert len({*rest, *others}) == len(rest) + len(others) > 0
    assert seed == same
    assert str(state) == str(other_state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_seeded_samples_do_not_depend_on_the_ranks(size, workers):
    def made(ranks: Agreement) -> Any:
        loader = seed_samples(DataLoader(Random(), 4, shuffle=True, num_workers=workers))
        return numbers_of(Prefetcher(sliced(loader, ranks), "cpu"))

    seed_all(5)
    whole = made(ALONE)
    found: dict[Any, Any] = {}
    for of_rank in on_ranks(size, made):
        assert found.items() & of_rank.items() == {key: found[key] for key in found.keys() & of_rank.keys()}.items()
        found |= of_rank
    assert found == whole


def test_a_loader_that_cannot_be_rewound_replays_slices():
    class Queue(Sampler):
        def __init__(self):
            self.left = []

        def __len__(self):
            return SAMPLES

        def __iter__(self):
            self.left = torch.randperm(SAMPLES).tolist()
            while self.left:
                yield self.left.pop()

    def program(ranks: Agreement) -> Any:
        loader = sliced(DataLoader(dataset(), 4, sampler=Queue()), ranks)
        assert not is_rewindable(loader)
        prefetcher = Prefetcher(ReplayBuffer(loader, 2), "cpu")
        shares: list[Any] = []
        seen = []
        for _ in range(2):
            seen.append([])
            for (batch,) in prefetcher:
                shares.append(prefetcher.share)
                seen[-1].append(batch.tolist())
                torch.rand(ranks.rank)
        return seen, shares

    (first, shares), (second, _) = on_ranks(2, program)
    for left, right in zip(first, second, strict=True):
        assert sorted(flat(left) + flat(right)) == list(range(SAMPLES))
    assert shares == 2 * [*5 * [BatchShare(2, 4)], BatchShare(1, 2)]


# -- whole batches that every rank loads ---------------------------------------------------------------------


class Shuffled:
    """Loader of an unknown class, which draws an order and then each batch's augmentation."""

    def __iter__(self):
        order = torch.randperm(SAMPLES)
        for begin in range(0, SAMPLES, 5):
            yield order[begin : begin + 5], torch.rand(3), [f"{i}" for i in order[begin : begin + 5].tolist()]


def test_any_other_loader_is_sliced_after_loading():
    def program(ranks: Agreement) -> Any:
        prefetcher = Prefetcher(sliced(Shuffled(), ranks), "cpu")
        seen = []
        for _ in range(2):
            for indices, shared, names in prefetcher:
                torch.rand(ranks.rank)
                assert names == [str(i) for i in indices.tolist()]
                seen.append((indices.tolist() if prefetcher.share.own else [], shared.tolist()))
        return seen

    seed_all(5)
    whole = [(indices.tolist(), shared.tolist()) for _ in range(2) for indices, shared, _ in Shuffled()]
    found = on_ranks(3, program)
    assert [(flat((part for part, _ in parts)), parts[0][1]) for parts in zip(*found, strict=True)] == whole
    assert all(len({str(shared) for _, shared in parts}) == 1 for parts in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [list, tuple])
def test_batches_in_a_list(kind):
    batches = kind((torch.arange(n), torch.ones(n)) for n in (5, 4, 1))

    def program(ranks: Agreement) -> Any:
        loader = sliced(batches, ranks)
        assert is_rewindable(loader)
        assert known_length(loader) == 3
        assert original_of(loader) is batches
        loader_position(loader).restore()
        prefetcher = Prefetcher(loader, "cpu")
        next(iter(prefetcher))
        state = prefetcher.state_dict()
        resumed = Prefetcher(loader, "cpu")
        resumed.load_state_dict(state)
        rest = [(x.tolist(), resumed.share) for x, _ in resumed]
        return [x.tolist() for x, _ in first_batches(loader, 3)], rest

    assert on_ranks(2, program) == [
        ([[0, 1, 2], [0, 1], [0]], [([0, 1], BatchShare(2, 4)), ([0], BatchShare(1, 1))]),
        ([[3, 4], [2, 3], [0]], [([2, 3], BatchShare(2, 4)), ([0], BatchShare(0, 1))]),
    ]


def test_a_loader_without_batches_is_sliced_after_loading():
    """Datasets that make whole batches use such a sampler of batches."""
    loader = DataLoader(torch.arange(10), None, sampler=BatchSampler(RandomSampler(range(10)), 4, False))

    def program(ranks: Agreement) -> Any:
        made = sliced(loader, ranks)
        assert is_rewindable(made)
        return [batch.tolist() for batch in Prefetcher(clone_loader(made, num_workers=ranks.rank), "cpu")]

    first, second = on_ranks(2, program)
    assert sorted(flat(first + second)) == list(range(10))


def test_batches_that_cannot_be_split_are_refused():
    class Graph:
        def to(self, device):
            return self

    loader = sliced([(torch.zeros(4), Graph())], RecordedRanks(0, 2, []))
    with pytest.raises(ValueError, match="can be split"):
        next(iter(Prefetcher(loader, "cpu")))


# -- loaders made of slices, and slices of made loaders ------------------------------------------------------


def test_other_parts_see_through_slices():
    ranks = RecordedRanks(1, 2, [])
    loader = ORDERS["shuffled"](dataset())
    made = sliced(loader, ranks)
    assert sliced(made, ranks) is made
    assert original_of(made) is loader
    assert is_rewindable(made)
    assert known_length(made) == len(loader)
    assert [len(batch[0]) for batch in made] == [2, 2, 2, 2, 2, 1]
    assert [len(batch[0]) for batch in first_batches(made, 6)] == [2, 2, 2, 2, 2, 1]
    assert why_not_resized(made) == ""
    assert [len(batch[0]) for batch in clone_loader(made, dataset=dataset())] == [2, 2, 2, 2, 2, 1]
    assert sliced(InMemoryLoader(made), ranks).loader is made
    state = Prefetcher(made, "cpu").state_dict()
    assert str(state) == str(Prefetcher(loader, "cpu").state_dict())

    with_two = with_workers(made, {"num_workers": 2})
    assert with_two.num_workers == 2
    assert original_of(with_two) is loader
    assert [len(batch[0]) for batch in with_two] == [2, 2, 2, 2, 2, 1]

    def collate(samples: list[Any]) -> Any:
        return len(samples)

    set_attribute(loader, [made], "collate_fn", collate)
    assert made.collate_fn is loader.collate_fn is collate
    assert list(made) == [2, 2, 2, 2, 2, 1]


def test_orders_without_length_and_of_other_rules_are_told_as_before():
    ranks = RecordedRanks(0, 2, [])
    endless = DataLoader(dataset(), batch_sampler=iter([[0, 1]]))
    assert known_length(sliced(endless, ranks)) is None
    assert not is_rewindable(sliced(ORDERS["stateful"](dataset()), ranks))
    assert "batch_sampler" in why_not_resized(sliced(ORDERS["batch sampler"](dataset()), ranks))
    assert why_not_resized(sliced([torch.zeros(4)], ranks)).startswith("the loader is a list")


@pytest.mark.parametrize("seeded", [False, True])
def test_resized_and_seeded_loaders_stay_sliced(seeded):
    ranks = RecordedRanks(1, 2, [])
    loader = ORDERS["shuffled"](dataset())
    made = sliced(seed_samples(loader) if seeded else loader, ranks)
    assert is_seeded(made) == seeded
    unseeded = made.seeded_from if seeded else made
    resized = with_batch_size(unseeded, 8)
    assert original_of(resized) is loader
    assert [len(batch[0]) for batch in resized] == [4, 4, 3]
    again = seed_samples(resized)
    assert is_seeded(again)
    assert slices_of(again) is not None
    assert slices_of(again.seeded_from) is not None
    assert original_of(again) is loader
    assert [len(batch[0]) for batch in again] == [4, 4, 3]


def test_the_epoch_reaches_a_sampler_under_slices():
    class Numbered(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    data = dataset()
    sampler = Numbered(data)
    made = sliced(DataLoader(data, 4, sampler=sampler), RecordedRanks(0, 2, []))
    set_epoch(made, 3)
    assert sampler.epoch == 3
    position = loader_position(made)
    sampler.epoch = 5
    position.restore()
    assert sampler.epoch == 3


def test_slices_are_tuned():
    made = sliced(ORDERS["shuffled"](dataset()), RecordedRanks(0, 2, []))
    tuned = tune(made, 0.0, budget=0.2)
    assert [len(batch[0]) for batch in tuned.loader] == [2] * 5 + [1]


def test_batches_in_any_order_are_put_in_order():
    loader = ORDERS["shuffled"](dataset(), num_workers=2, in_order=False)
    assert sliced(loader, RecordedRanks(0, 2, [])).in_order


# -- loaders that are not sliced -----------------------------------------------------------------------------


class BatchSamplerShard(Sampler):
    """Batch sampler with the interface of accelerate's."""

    def __init__(self, batch_sampler, num_processes, process_index):
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, num_processes, process_index

    def __iter__(self):
        return iter(list(self.batch_sampler)[self.process_index :: self.num_processes])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def split_stream(**attributes: Any) -> Stream:
    stream = Stream()
    vars(stream).update(attributes)
    return stream


class HuggingFaceShare:
    rank, world_size = 0, 2


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(dataset(), 4, sampler=DistributedSampler(dataset(), 2, 0)),
        DataLoader(dataset(), batch_sampler=BatchSampler(DistributedSampler(dataset(), 2, 0), 4, False)),
        DataLoader(dataset(), batch_sampler=BatchSamplerShard(BatchSampler(range(9), 2, False), 2, 1)),
        DataLoader(split_stream(num_replicas=2, rank=0), 4),
        DataLoader(split_stream(num_processes=2, process_index=0), 4),
        DataLoader(split_stream(_distributed=HuggingFaceShare()), 4),
    ],
)
def test_a_loader_that_is_split_already_is_not_sliced(loader):
    assert "over 2 ranks itself" in why_not_sliced(loader)
    with pytest.raises(ValueError, match="over 2 ranks itself"):
        sliced(loader, RecordedRanks(0, 2, []))


def test_an_iterable_dataset_must_say_that_it_is_split():
    with pytest.raises(ValueError, match="split_dataset_by_node") as caught:
        sliced(DataLoader(Stream(), 4), RecordedRanks(0, 2, []))
    assert "got a Stream" in str(caught.value)
    assert "dataset.num_replicas" in str(caught.value)


def test_a_sampler_of_one_replica_is_sliced():
    loader = DataLoader(dataset(), 4, sampler=DistributedSampler(dataset(), 1, 0))
    assert why_not_sliced(loader) == ""
