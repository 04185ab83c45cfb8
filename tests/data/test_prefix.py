"""PrefixCache: the user's samples bit for bit, with what comes before the first random transform in memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from flatout.core.random_state import RandomState
from flatout.data import NotCacheable
from flatout.data.prefix import PrefixCache, for_trial
from flatout.data.watch import files_opened

ROWS = 12


def noisy(x: Any) -> Any:
    return x + torch.rand(()) + random.random() + np.random.rand()


def doubled(x: Any) -> Any:
    return 2 * x


class Files(Dataset):
    """Samples from files, with a transform of the user's."""

    def __init__(self, folder: Path, transform: Any = noisy) -> None:
        self.paths = [folder / f"{i}.npy" for i in range(ROWS)]
        for i, path in enumerate(self.paths):
            np.save(path, np.arange(4.0 + i % 3) + i)
        self.transform = transform
        self.read = 0

    def __len__(self) -> int:
        return len(self.paths)

    def value(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self.paths[index]))

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.value(index)), index


class TwoViews(Files):
    def __getitem__(self, index: int) -> Any:
        value = self.value(index)
        first, second = self.transform(value), self.transform(value)
        return {"second": second, "first": first, "path": str(self.paths[index])}


class Chained(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.post_transform = doubled

    def __getitem__(self, index: int) -> Any:
        return self.post_transform(self.transform(self.value(index))), index


class ByName(Files):
    """Calls the transform like one of albumentations."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lambda image, mask: {"image": noisy(image), "mask": mask + torch.rand(())})

    def __getitem__(self, index: int) -> Any:
        result = self.transform(image=self.value(index), mask=torch.ones(2))
        return result["image"], result["mask"]


class Together(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lambda image, target: (noisy(image), target + torch.rand(())))

    def __getitem__(self, index: int) -> Any:
        image, target = self.transform(self.value(index), torch.tensor(index))
        return image, target


DATASETS = {
    "one value": Files,
    "two views": TwoViews,
    "chained": Chained,
    "by name": ByName,
    "several arguments": Together,
    "subset": lambda folder: Subset(Files(folder), range(1, ROWS, 2)),
    "concatenated": lambda folder: ConcatDataset([Files(folder), Subset(TwoViews(folder), [3, 1])]),
}


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return type(left) is type(right) and torch.equal(left, right) and left.stride() == right.stride()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def epoch(dataset: Any, number: int) -> tuple[list[Any], RandomState]:
    seed(number)
    order = torch.randperm(len(dataset)).tolist()
    return [dataset[i] for i in order], RandomState.capture()


def assert_equal_epochs(dataset: Any, cache: Any, epochs: int = 3) -> None:
    for number in range(epochs):
        expected, state = epoch(dataset, number)
        found, _ = epoch(cache, number)
        assert same(expected, found)
        assert state.moved() is None


@pytest.mark.parametrize("kind", DATASETS)
def test_samples_and_draws_are_the_users(tmp_path, kind):
    dataset = DATASETS[kind](tmp_path)
    cache = PrefixCache(dataset)
    assert_equal_epochs(dataset, cache)
    assert cache._table.missing() == []
    assert cache.given_up is None


def test_the_front_runs_once(tmp_path):
    cache = PrefixCache(Files(tmp_path))
    epoch(cache, 0)
    cache.check()  # reads some samples again
    with files_opened() as files:
        for i in range(ROWS - 1):
            cache[i]
    assert not files


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_fill_and_share_the_memory(tmp_path, workers):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset)

    def epochs(of: Any) -> list[Any]:
        seed(3)
        loader = DataLoader(of, 3, shuffle=True, num_workers=workers, collate_fn=list)
        return [list(loader) for _ in range(3)]

    expected = epochs(dataset)
    assert same(expected, epochs(cache))
    assert cache._table.missing() == []


@pytest.mark.parametrize("budget", [400, 2000])
def test_what_does_not_fit_comes_from_the_dataset(tmp_path, budget):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset, byte_budget=budget)
    assert 0 < cache.share < 1
    assert_equal_epochs(dataset, cache)
    assert 0 < len(cache._table.missing()) < ROWS


def test_a_sample_larger_than_the_memory_is_refused(tmp_path):
    with pytest.raises(NotCacheable):
        PrefixCache(Files(tmp_path), byte_budget=100)


def test_a_changed_file_is_read_again(tmp_path):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset)
    epoch(cache, 0)
    np.save(dataset.paths[5], np.arange(9.0))
    assert_equal_epochs(dataset, cache, 2)
    assert cache[5][0].shape == (9,)
    assert cache.given_up is None


def test_a_file_that_vanished_raises_the_users_error(tmp_path):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset)
    epoch(cache, 0)
    dataset.paths[5].unlink()
    with pytest.raises(FileNotFoundError) as expected:
        dataset[5]
    with pytest.raises(FileNotFoundError) as found:
        cache[5]
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("change", ["transform", "paths", "inside the transform"])
def test_a_changed_dataset_ends_the_cache(tmp_path, change):
    class Scaled:
        factor = 2.0

        def __call__(self, x: Any) -> Any:
            return noisy(x) * self.factor

    dataset = Files(tmp_path, Scaled())
    cache, seen = PrefixCache(dataset), []
    cache.on_change = seen.append
    epoch(cache, 0)
    if change == "transform":
        dataset.transform = doubled
    elif change == "paths":
        dataset.paths[0], dataset.paths[1] = dataset.paths[1], dataset.paths[0]
    else:
        dataset.transform.factor = 3.0
    assert_equal_epochs(dataset, cache)
    assert len(seen) == 1
    assert cache.given_up is not None


class DrawsBefore(Files):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.value(index) + random.random()), index


class UsesTheResult(Files):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.value(index)) + 1


class WithoutTransform(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        del self.transform

    def __getitem__(self, index: int) -> Any:
        return noisy(self.value(index))


class HidesTheTransform(Files):
    """Reaches the transform through a closure, which a copy of the dataset does not change."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.make = lambda index: self.transform(self.value(index))

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Counts(Files):
    """A sample depends on the samples before it."""

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.transform(self.value(index) + self.read)


@pytest.mark.parametrize("kind", [DrawsBefore, UsesTheResult, WithoutTransform, HidesTheTransform, Counts])
def test_other_datasets_are_refused_without_a_trace(tmp_path, kind):
    dataset = kind(tmp_path)
    state = RandomState.capture()
    with pytest.raises(NotCacheable):
        PrefixCache(dataset)
    assert state.moved() is None


class SometimesOther(Files):
    """Handles the result of a transform in another way for a sample that the first look does not see."""

    def __getitem__(self, index: int) -> Any:
        result = self.transform(self.value(index))
        return (result + 1 if index == 5 else result), index


class SometimesDraws(Files):
    def __getitem__(self, index: int) -> Any:
        value = self.value(index)
        return self.transform(value + random.random() if index == 5 else value), index


class SometimesUnstorable(Files):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.value(index)), (lambda: 3)() if index != 5 else np.array([None])


@pytest.mark.parametrize("kind", [SometimesOther, SometimesDraws, SometimesUnstorable])
@pytest.mark.filterwarnings("ignore:samples are not cached any more")
def test_a_sample_of_another_kind_is_the_users_too(tmp_path, kind):
    dataset = kind(tmp_path)
    cache = PrefixCache(dataset)
    for number in range(3):
        seed(number)
        expected = [dataset[i] for i in range(ROWS)]
        state = RandomState.capture()
        seed(number)
        found = [cache[i] for i in range(ROWS)]
        assert state.moved() is None
        assert all(same(a[0], b[0]) for a, b in zip(expected, found, strict=True))


def test_a_sample_is_a_new_copy(tmp_path):
    cache = PrefixCache(Files(tmp_path, lambda x: x.add_(torch.rand(()))))
    dataset = cache.dataset
    epoch(cache, 0)
    assert_equal_epochs(dataset, cache)


def fill_and_die(cache: PrefixCache) -> None:
    for i in range(ROWS // 2):
        cache[i]
    cache._table._states.claim(ROWS // 2)  # as in the middle of a write
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_right_samples(tmp_path):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset)
    process = multiprocessing.get_context("fork").Process(target=fill_and_die, args=(cache,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(cache._table.missing()) < ROWS // 2
    assert_equal_epochs(dataset, cache)
    assert not cache._table.has(ROWS // 2)


def test_trials_meet_stored_samples(tmp_path):
    cache = PrefixCache(Files(tmp_path))
    cache.rehearse(0.5, 4)
    stored = set(range(ROWS)) - set(cache._table.missing())
    trial = for_trial(DataLoader(cache, 1))
    assert len(trial) == ROWS
    made = {int(index) for _, index in trial}
    assert len(made - stored) >= 3
    assert set(range(ROWS)) - set(cache._table.missing()) == stored
    for row in stored:
        cache._table.forget(row)  # as if its file had changed
    list(trial)
    assert_equal_epochs(cache.dataset, cache)


torchvision = pytest.importorskip("torchvision")
from PIL import Image  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

FLOATS = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)]
PIPELINES = {
    "crop and resize": ([transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), *FLOATS], 0),
    "resize first": ([transforms.Resize(20), transforms.RandomCrop(16), *FLOATS], 1),
    "nested": ([transforms.Compose([transforms.Resize((20, 24)), transforms.CenterCrop(18)]), v2.RandomCrop(16)], 2),
    "floats in between": ([transforms.CenterCrop(16), *FLOATS, transforms.RandomErasing()], 1),
    "version 2": ([v2.PILToTensor(), v2.RandomResizedCrop(16, antialias=True), v2.ToDtype(torch.float32, True)], 1),
    "version 2, images": ([v2.ToImage(), v2.Resize(18), v2.RandomHorizontalFlip(), v2.ToPureTensor()], 2),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_of_torchvision(tmp_path, name):
    steps, length = PIPELINES[name]
    generator = np.random.default_rng(0)
    for i in range(ROWS):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (30 + i, 40 - i, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert("L" if i % 5 == 4 else "RGB").save(tmp_path / f"{i % 2}/{i}.png", dpi=(72, 72))
    dataset = ImageFolder(str(tmp_path), transforms.Compose(steps))
    cache = PrefixCache(dataset)
    assert cache._front.lengths == [length]
    if "nested" not in name:
        assert_equal_epochs(dataset, cache)
    else:
        for number in range(2):
            pairs = zip(epoch(dataset, number)[0], epoch(cache, number)[0], strict=True)
            assert all(a.tobytes() == b.tobytes() and a.info == b.info and x == y for (a, x), (b, y) in pairs)
    assert cache._table.missing() == []


def test_a_change_counts_while_another_process_writes_its_note(tmp_path):
    dataset = Files(tmp_path)
    cache = PrefixCache(dataset)
    epoch(cache, 0)
    assert cache._table._states.claim(ROWS)  # the note, whose text comes later
    dataset.transform = doubled
    assert same(epoch(cache, 1)[0], epoch(dataset, 1)[0])
