"""CachedDataset: samples of the wrapped dataset, each decoded once, in any loader and any process."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate, get_worker_info

from flatout.data import CachedDataset, NotCacheable, WorkerError, cache_in_memory
from flatout.data.watch import MOST_READ
from tests.data.harness import columns_of, memory_left
from tests.helpers import in_child
from tests.reasons import reasons
from tests.samples import RANDOM, REFUSED, SAMPLES, Batched, Counted, Made, own_memory, same, states


def identity(samples):
    return samples


def epochs(loader, count=2):
    torch.manual_seed(2)
    return [batch for _ in range(count) for batch in loader], torch.get_rng_state()


def assert_equal_loaders(ours, theirs):
    (our_batches, our_state), (their_batches, their_state) = epochs(ours), epochs(theirs)
    assert len(our_batches) == len(their_batches)
    assert all(map(same, own_memory(our_batches), own_memory(their_batches)))
    assert torch.equal(our_state, their_state)


# -- the same samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Made, Batched])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_the_datasets_own(name, dataset):
    plain, cached = dataset(SAMPLES[name]), CachedDataset(dataset(SAMPLES[name]))
    for _ in range(2):
        for index in range(len(plain)):
            assert same(cached[index], own_memory(plain.make(index)))
            assert same(cached.__getitems__([index, 3, index]), [own_memory(plain.make(i)) for i in (index, 3, index)])
    assert len(cached) == len(plain)


def test_numpy_scalars_that_torch_cannot_collate():
    for kind in (np.uint64, np.complex64, np.float16, np.bool_):
        cached = CachedDataset(Made(kind))
        cached.fill()
        assert all(same(cached[i], kind(i)) for i in range(23))


def test_a_memory_map_becomes_an_array(tmp_path):
    np.arange(40.0).reshape(20, 2).tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", np.float64, "r", shape=(20, 2))
    cached = CachedDataset(Made(data.__getitem__, 20))
    assert type(cached[7]) is np.ndarray
    assert cached[7].flags.writeable
    assert cached[7].tolist() == [14, 15]


@pytest.mark.parametrize("collate", [None, identity, torch.stack])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["here", "workers", "persistent"],
)
def test_equals_the_loader(options, collate):
    make = SAMPLES["permuted"] if collate is torch.stack else None
    plain = Made(make) if make else Counted()
    cached = CachedDataset(plain)
    for order in ({"shuffle": True, "batch_size": 5}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}):
        if collate is not None and order["batch_size"] is None:
            continue
        loaders = [DataLoader(data, collate_fn=collate, **order, **options) for data in (cached, plain)]
        assert_equal_loaders(*loaders)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "persistent"), [("spawn", True), ("forkserver", False)])
def test_equals_the_loader_in_processes_started_anew(method, persistent):
    data = Counted()
    cached = CachedDataset(data)
    data.made.zero_()
    cached[1], cached[4]  # the workers see these two samples
    options = {"shuffle": True, "num_workers": 1, "persistent_workers": persistent}
    ours, our_state = epochs(DataLoader(cached, 5, multiprocessing_context=method, **options))
    assert sorted(data.made.tolist()) == [0] * 16 + [1] * 21
    theirs, their_state = epochs(DataLoader(data, 5, **options))
    assert all(map(same, ours, theirs))
    assert torch.equal(our_state, their_state)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("wrap", [lambda data: Subset(data, [3, 1, 3, 0]), lambda data: ConcatDataset([data, data])])
def test_inside_other_datasets(wrap):
    for dataset in (Made, Batched):
        plain = dataset(SAMPLES["dict"])
        assert_equal_loaders(*(DataLoader(wrap(d), 5, shuffle=True) for d in (CachedDataset(plain), plain)))


def test_attributes_are_the_datasets():
    cached = CachedDataset(Counted())
    assert cached.classes == ["cat", "dog"]
    assert not hasattr(cached, "nothing")
    assert not hasattr(cached, "set_epoch")
    with pytest.raises(AttributeError, match="_private"):
        _ = CachedDataset(Private())._private


class Private(Counted):
    _private = 1


class Listed:
    """Dataset that indexes like a list: negative indices, slices, and an error past the end."""

    def __init__(self):
        self.samples = [torch.tensor([i, i]) for i in range(20)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def test_what_an_index_means_is_the_datasets_to_say():
    class Signed(Listed):
        def __getitem__(self, index):
            return torch.tensor([index, index]) if not isinstance(index, slice) else super().__getitem__(index)

    cached = CachedDataset(Signed())
    assert cached[-1].tolist() == [-1, -1]
    assert cached[19].tolist() == [19, 19]
    assert [t.tolist() for t in cached[2:4]] == [[2, 2], [3, 3]]
    assert cached[25].tolist() == [25, 25]
    cached = CachedDataset(Listed())
    assert cached[-1].tolist() == [19, 19]
    with pytest.raises(IndexError, match="list index out of range"):  # the list's own error
        cached[20]
    with pytest.raises(TypeError, match="list indices must be"):
        cached["a"]


def test_every_kind_of_integer_is_an_index():
    data = Made(lambda i: int(i))
    cached = CachedDataset(data)
    cached.fill()
    data.calls.clear()
    for index in (np.int64(5), np.uint8(5), torch.tensor(5), torch.tensor(5, dtype=torch.int32)):
        assert cached[index] == 5
    assert data.calls == []
    for mask in (True, np.True_, torch.tensor(True), torch.tensor(1, dtype=torch.uint8)):  # arrays make more of masks
        cached[mask]
    assert len(data.calls) == 4


def test_in_place_changes_do_not_reach_the_cache():
    def change(sample):
        for value in sample.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, np.ndarray) and value.flags.writeable:
                value[...] = 0
            elif isinstance(value, dict):
                change(value)
                value.clear()

    plain, cached = Counted(), CachedDataset(Counted())
    for take in (lambda i: cached[i], lambda i: cached.__getitems__([i])[0], lambda i: cached[i]):
        for index in range(len(plain)):
            sample = take(index)
            assert same(sample, own_memory(plain[index]))
            change(sample)


# -- each sample once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_each_sample_is_decoded_once_by_all_workers_together(persistent):
    data = Counted(100)
    cached = CachedDataset(data)
    assert sorted(data.made.tolist()) == [0] * 84 + [2] * 16
    data.made.clamp_(max=1)
    list(DataLoader(cached, 7, shuffle=True, num_workers=2, persistent_workers=persistent))
    for _ in range(2):
        list(DataLoader(cached, 7, num_workers=2))
    assert data.made.tolist() == [1] * 100
    assert cached.given_up is None


@pytest.mark.parametrize("workers", [0, 2])
def test_fill(workers):
    data = Counted(100)
    cached = CachedDataset(data)
    before = states()
    cached.fill(num_workers=workers)
    assert states() == before
    assert sorted(data.made.tolist()) == [1] * 84 + [2] * 16
    cached.fill(num_workers=workers)
    assert int(data.made.sum()) == 116
    assert all(same(cached[i], own_memory(data[i])) for i in range(100))


def test_batches_that_the_dataset_makes_together_are_asked_for_together():
    class Remote(Batched):
        def __getitems__(self, indices):
            self.calls.append(list(indices))
            return super().__getitems__(indices)

    data = Remote(SAMPLES["dict"], 100)
    cached = CachedDataset(data)
    data.calls.clear()
    cached.__getitems__([1, 0, 2, 1, 3])
    assert data.calls == [[1, 2, 3]]  # the inspection loaded sample 0
    cached.__getitems__([3, 2, 1])
    assert data.calls == [[1, 2, 3]]


def test_force_decodes_nothing_twice():
    data = Made(lambda i: i)
    CachedDataset(data, force=True)
    assert data.calls == [0]


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_mid_use_shares_both_ways():
    data = Counted()
    cached = CachedDataset(data)
    first = cached[5]

    def work():
        assert same(cached[5], first)
        cached[6], cached[30]

    assert in_child(work) == 0
    data.made.zero_()
    cached[5], cached[6], cached[30]
    assert data.made.tolist() == [0] * 37


def test_copies_and_pickles_begin_with_nothing():
    data = Made(SAMPLES_NAMED)
    cached = CachedDataset(data)
    cached.fill()
    for copied in (pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached)):
        copied.dataset.calls.clear()
        assert [copied[i] for i in (3, 3)] == [(3, 6.0)] * 2
        assert copied.dataset.calls == [3]
        copied.dataset.make = SAMPLES_OTHER
        assert copied[4] == (0, 0.0)
        assert cached[4] == (4, 8.0)
    data.calls.clear()
    assert copy.copy(cached)[3] == (3, 6.0)
    assert data.calls == []


def SAMPLES_NAMED(i):
    return i, 2.0 * i


def SAMPLES_OTHER(i):
    return 0, 0.0


def test_errors_of_the_dataset_are_its_own(monkeypatch):
    # An environment variable is a change that a cache cannot see.
    monkeypatch.setenv("SAMPLES", "none")
    cached = CachedDataset(Made(lambda i: raises(i) if os.environ["SAMPLES"] == "broken" else 2 * i, 100))
    monkeypatch.setenv("SAMPLES", "broken")
    for attempt in (lambda: cached[1], lambda: cached.__getitems__([1]), lambda: next(iter(DataLoader(cached, 2)))):
        with pytest.raises(OSError, match="broken file"):
            attempt()
    with pytest.raises(OSError, match="broken file"):
        list(DataLoader(cached, 2, num_workers=1))
    monkeypatch.setenv("SAMPLES", "whole")
    assert cached[1] == 2
    assert cached.given_up is None


def raises(_):
    raise OSError("broken file")


@pytest.mark.parametrize("workers", [0, 2])
def test_fill_names_the_sample_that_cannot_be_cached(workers, monkeypatch):
    makers = {
        "same": lambda i: i,
        "broken": lambda i: raises(i) if i == 70 else i,
        "other": lambda i: i if i != 70 else float(i),
        "random": lambda i: (random.random(), i)[1],
    }
    monkeypatch.setenv("SAMPLES", "same")
    cached = CachedDataset(Made(lambda i: makers[os.environ["SAMPLES"]](i), 100))
    for name, match, code in (
        ("broken", r"dataset\[70\].*OSError: broken file", "sample-failed"),
        ("other", r"dataset\[70\]", "types-differ"),
        ("random", "Python's random", "random-samples"),
    ):
        monkeypatch.setenv("SAMPLES", name)
        before = states()
        with pytest.raises(NotCacheable, match=match) as caught:
            cached.fill(num_workers=workers)
        assert code in reasons(str(caught.value))
        assert name != "broken" or type(caught.value.__cause__) is OSError
        assert states() == before
    monkeypatch.setenv("SAMPLES", "same")
    cached.fill(num_workers=workers)
    assert [cached[i] for i in range(100)] == list(range(100))


def die_in_a_worker(i):
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


def test_the_death_of_a_worker_is_told():
    with pytest.raises(WorkerError, match="SIGKILL"):
        CachedDataset(Made(die_in_a_worker, 100)).fill(num_workers=2)
    with pytest.raises(WorkerError, match="SIGKILL"):
        cache_in_memory(DataLoader(Made(die_in_a_worker, 100), 4, num_workers=2))


# -- data that must not be cached -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_reason(name):
    make, code, fact = REFUSED[name]
    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotCacheable, match=fact) as caught:
            CachedDataset(make()).fill()
    assert code in reasons(str(caught.value))
    assert states() == before


@pytest.mark.parametrize("dataset", [Made, Batched])
@pytest.mark.parametrize("name", RANDOM)
def test_random_datasets_are_refused_unless_forced(name, dataset):
    make, code, fact = RANDOM[name]
    before = states()
    with pytest.raises(NotCacheable, match=fact) as caught:
        CachedDataset(dataset(make()), force=False).fill()
    assert code in reasons(str(caught.value))
    assert states() == before
    cached = CachedDataset(dataset(make()), force=True)
    cached.fill()
    assert states() == before
    frozen = [cached[i] for i in range(23)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(frozen, cached.__getitems__(range(23)))


def test_what_requires_grad_is_refused_where_that_is_hidden():
    data = Made(lambda i: torch.ones(2, requires_grad=i == 7), 100)
    with torch.no_grad(), pytest.raises(NotCacheable, match=r"dataset\[7\].*requires grad"):
        CachedDataset(data)


def test_no_dataset():
    with pytest.raises(NotCacheable, match=r"object.*length"):
        CachedDataset(object())


def test_budget():
    data = Made(lambda i: (torch.zeros(256), i), 100)
    with pytest.raises(NotCacheable, match=r"103,200.*103,199"):
        CachedDataset(data, byte_budget=103_199)
    assert data.calls == [0]
    CachedDataset(data, byte_budget=103_200)
    with memory_left(412_799), pytest.raises(NotCacheable, match=r"103,200.*103,199"):
        CachedDataset(data)


class Turning(Dataset):
    """Dataset that becomes random after a switch that a cache cannot see."""

    def __init__(self, draw, batched):
        self.draw = draw
        if batched:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw() if "TURNED" in os.environ and index % 3 == 1 else 0.0])


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_randomness_seen_later_ends_the_cache(name, batched, monkeypatch):
    """The batches still equal those of the plain dataset, including random numbers."""

    def run(wrap):
        monkeypatch.delenv("TURNED", raising=False)
        wrapped = wrap(Turning(DRAWS[name], batched))
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        loader = DataLoader(wrapped, 8, shuffle=True)
        batches = [batch for batch, _ in zip(loader, range(5), strict=False)]
        monkeypatch.setenv("TURNED", "1")
        return wrapped, [*batches, *loader, *loader], states()

    with pytest.warns(UserWarning, match=r"dataset\[") as caught:
        cached, ours, our_states = run(CachedDataset)
    assert {"cache-ended", "random-samples"} <= reasons(str(caught[0].message))
    _, theirs, their_states = run(lambda data: data)
    assert all(map(same, ours, theirs))
    assert our_states == their_states
    assert "random-samples" in reasons(cached.given_up)
    monkeypatch.delenv("TURNED")
    with pytest.raises(NotCacheable) as refused:
        cached.fill()
    assert str(refused.value) == cached.given_up


@pytest.mark.parametrize("dataset", [Made, Batched])
def test_other_makes_seen_later_end_the_cache(dataset):
    cached = CachedDataset(dataset(lambda i: torch.zeros(3 if i == 5 else 2), 100))
    with pytest.warns(UserWarning, match=r"dataset\[5\].*\(3,\).*\(2,\)") as caught:
        seen = [*DataLoader(cached, 1), *DataLoader(cached, 1)]
    assert len(caught) == 1
    assert {"cache-ended", "shapes-differ"} <= reasons(str(caught[0].message))
    assert [len(batch[0]) for batch in seen] == ([2] * 5 + [3] + [2] * 94) * 2


def test_a_worker_that_gives_up_the_cache_ends_it_in_all_processes():
    data = Made(lambda i: torch.zeros(2 if i != 5 else 3), 100)
    cached = CachedDataset(data)
    assert sum(len(batch) for batch in DataLoader(cached, 1, num_workers=2, collate_fn=default_collate)) == 100
    assert "shapes-differ" in reasons(cached.given_up)


class Short(Made):
    def __getitems__(self, indices):
        return [0] if indices == [1, 2] else [self.make(index) for index in indices]


def test_a_list_that_is_too_short():
    cached = CachedDataset(Short(lambda i: i, 100))
    with pytest.warns(UserWarning, match="__getitems__.* 2 "):
        assert cached.__getitems__([1, 2]) == [0]


@pytest.mark.parametrize("memfd", [True, False])
def test_made_in_inference_mode(memfd, monkeypatch):
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    with torch.inference_mode():
        cached = CachedDataset(Made(SAMPLES["tuple"]))
        cached[1]
    assert same(cached[1], SAMPLES["tuple"](1))
    assert same(cached[2], SAMPLES["tuple"](2))


def test_an_own_cache_is_used_again():
    data = Counted()
    cached = CachedDataset(data)
    cached.fill()
    data.made.zero_()
    ours = cache_in_memory(DataLoader(cached, 5, shuffle=True))
    assert [column.data_ptr() for column in columns_of(ours)] == [column.data_ptr() for column in columns_of(cached)]
    assert_equal_loaders(ours, DataLoader(cached, 5, shuffle=True))
    assert int(data.made.sum()) <= 2 * MOST_READ


class FillsItsMemoryAgain(Dataset):
    def __init__(self):
        self.memory = torch.zeros(3)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.memory.fill_(index)


def test_a_dataset_may_fill_its_memory_again():
    cached = CachedDataset(FillsItsMemoryAgain())
    assert [cached[index][0].item() for index in range(40)] == list(range(40))
    filled = CachedDataset(FillsItsMemoryAgain())
    filled.fill()
    assert [filled[index][0].item() for index in range(40)] == list(range(40))
