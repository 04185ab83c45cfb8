"""Trainings that a cache of decoded samples may get wrong: each one gives the plain loader's samples, or is refused."""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import os
import pickle
import random
import shutil
import threading
import zipfile
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info, random_split
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import functional, v2

from flatout.data import NotCacheable, PrefixCache

SIZE = 6
EPOCHS = 3
SETTINGS = SimpleNamespace(size=5)

Pair = namedtuple("Pair", ["image", "label"])


# what is compared


def facts(value: Any) -> Any:
    """Return a description of a value that differs wherever a training could see a difference."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        extra = (str(getattr(value, "format", None)), str(getattr(value, "canvas_size", None)))
        plain = value.detach().as_subclass(torch.Tensor)
        return kind, plain.dtype, tuple(plain.shape), plain.stride(), plain.contiguous().numpy().tobytes(), extra
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.strides, value.flags.writeable, value.tobytes()
    if isinstance(value, Image.Image):
        info = sorted((str(key), repr(each)) for key, each in value.info.items())
        return kind, value.mode, value.size, value.tobytes(), value.getpalette(), info, value.format
    if isinstance(value, dict):
        return kind, [(facts(key), facts(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        same = [[k for k, other in enumerate(value) if other is each] for each in value]
        return kind, [facts(each) for each in value], same
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return kind, facts(vars(value))
    return kind, repr(value)


def generators(*own: Any) -> Any:
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())]
    for each in own:
        states.append(each.get_state().numpy().tobytes() if isinstance(each, torch.Generator) else str(each))
    return states


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def as_list(batch: list) -> list:
    return batch


class Case:
    """One training: its dataset, what happens before each epoch, and options of the loader."""

    def __init__(self, dataset: Any, before: Any = None, target: Any = None, epochs: int = EPOCHS, **options: Any):
        self.dataset = dataset
        self.target = dataset if target is None else target
        self.before = before
        self.epochs = epochs
        self.options = {"batch_size": 2, "shuffle": True, "collate_fn": as_list} | options
        if "batch_sampler" in options:
            del self.options["batch_size"], self.options["shuffle"]
        if "sampler" in options:
            del self.options["shuffle"]


def run(case: Case, loader: DataLoader) -> list:
    seen = []
    for epoch in range(case.epochs):
        if case.before is not None:
            case.before(case.target, epoch)
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                seen.append((type(error), str(error).splitlines()[-1:]))
                break
            seen.append((facts(batch), generators()))
        seen.append(generators())
        del iterator
    return seen


def compare(build: Any, folder: Any, workers: int = 0) -> PrefixCache | None:
    """Return the cache, whose samples are those of the plain loader, or None if the dataset was refused."""
    records = []
    for cached in (False, True):
        place = folder / "data"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        seed(0)
        case = build(place)
        options = dict(case.options, num_workers=workers) if workers else case.options
        dataset = case.dataset
        if cached:
            before = generators()
            try:
                dataset = PrefixCache(dataset, **options.pop("cache", {}))
            except NotCacheable:
                assert generators() == before
                return None
            assert generators() == before
        options.pop("cache", None)
        seed(1)
        records.append(run(case, DataLoader(dataset, **options)))
    plain, cached = records
    assert len(plain) == len(cached)
    for number, (left, right) in enumerate(zip(plain, cached, strict=True)):
        assert left == right, f"entry {number}"
    return dataset


# small parts


def picture(i: int, mode: str = "RGB", size: tuple[int, int] = (10, 8)) -> Image.Image:
    array = np.random.RandomState(i).randint(0, 255, (size[1], size[0], 3)).astype("uint8")
    return Image.fromarray(array).convert(mode) if mode != "I;16" else Image.fromarray(array[..., 0].astype("uint16"))


def write(folder: Any, count: int = SIZE, suffix: str = "png", **options: Any) -> list[str]:
    paths = [str(folder / f"{i}.{suffix}") for i in range(count)]
    for i, path in enumerate(paths):
        picture(i).save(path, **options)
    return paths


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def noise_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(torch.rand(()))


CROP = [transforms.Resize(7), transforms.RandomCrop(5), transforms.ToTensor()]


class Files(Dataset):
    def __init__(self, paths: list[str], transform: Any, mode: str | None = "RGB") -> None:
        self.paths, self.transform, self.mode = paths, transform, mode

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, i: int) -> Any:
        image = Image.open(self.paths[i])
        return image if self.mode is None else image.convert(self.mode)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.load(i)), i


class Memory(Dataset):
    """Tensors in memory, and one transform."""

    def __init__(self, transform: Any = None, size: int = SIZE) -> None:
        self.data = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6)
        self.targets = torch.arange(size)
        self.transform = transform or transforms.Compose([double, noise])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.data[i].clone()), int(self.targets[i])


CASES: dict[str, Any] = {}
WITH_WORKERS: set[str] = set()


def situation(build: Any = None, *, workers: bool = False) -> Any:
    if build is None:
        return functools.partial(situation, workers=workers)
    CASES[build.__name__] = build
    if workers:
        WITH_WORKERS.add(build.__name__)
    return build


# the usual trainings


@situation(workers=True)
def image_folder(folder):
    for kind in "ab":
        (folder / kind).mkdir()
        write(folder / kind, 3, "jpg")
    return Case(datasets.ImageFolder(str(folder), transforms.Compose(CROP)))


@situation
def image_folder_v2(folder):
    for kind in "ab":
        (folder / kind).mkdir()
        write(folder / kind, 3, "jpg")
    transform = v2.Compose([v2.ToImage(), v2.Resize(7), v2.RandomResizedCrop(5), v2.ToDtype(torch.float32, scale=True)])
    return Case(datasets.ImageFolder(str(folder), transform))


@situation
def timm_dataset(folder):
    from timm.data import ImageDataset, create_transform

    (folder / "a").mkdir()
    write(folder / "a", 6, "jpg")
    transform = create_transform(8, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.5, color_jitter=0.4)
    return Case(ImageDataset(str(folder), transform=transform))


@situation
def timm_evaluation_of_training_set(folder):
    from timm.data import ImageDataset, create_transform

    (folder / "a").mkdir()
    write(folder / "a", 6, "jpg")
    return Case(ImageDataset(str(folder), transform=create_transform(8, is_training=False)))


@situation
def fake_data(folder):
    return Case(datasets.FakeData(SIZE, (3, 10, 10), transform=transforms.Compose(CROP)))


@situation
def target_transform_draws(folder):
    for kind in "ab":
        (folder / kind).mkdir()
        write(folder / kind, 3)
    return Case(
        datasets.ImageFolder(
            str(folder), transforms.Compose(CROP), target_transform=lambda y: y if random.random() < 0.7 else 9
        )
    )


@situation
def random_transform_first(folder):
    return Case(Files(write(folder), transforms.Compose([transforms.RandomCrop(5), transforms.ToTensor()])))


@situation
def random_apply_choice_order(folder):
    transform = transforms.Compose(
        [
            transforms.Resize(7),
            transforms.RandomApply([transforms.Resize(6)], 0.5),
            transforms.RandomChoice([transforms.CenterCrop(5), transforms.RandomCrop(5)]),
            transforms.RandomOrder([transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]),
            transforms.ToTensor(),
        ]
    )
    return Case(Files(write(folder), transform))


@situation
def two_views(folder):
    one = transforms.Compose(CROP)
    return Case(Files(write(folder), lambda image: [one(image), one(image)]))


class TwoViews:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return self.transform(image), self.transform(image)


@situation
def two_views_class(folder):
    return Case(Files(write(folder), TwoViews(transforms.Compose(CROP))))


# changing datasets


class Curriculum(Memory):
    def __init__(self, transform=None):
        super().__init__(transform)
        self.scale = 1

    def set_epoch(self, epoch):
        self.scale = epoch + 1

    def __getitem__(self, i):
        return self.transform(self.data[i] * self.scale), i


@situation
def set_epoch(folder):
    return Case(Curriculum(), lambda d, epoch: d.set_epoch(epoch))


@situation
def set_epoch_persistent_workers(folder):
    return Case(Curriculum(), lambda d, epoch: d.set_epoch(epoch), num_workers=2, persistent_workers=True)


@situation(workers=True)
def resize_changed_in_place(folder):
    def before(dataset, epoch):
        dataset.transform.transforms[0].size = 6 + epoch

    return Case(Files(write(folder), transforms.Compose([transforms.Resize(7), *CROP[1:]])), before)


@situation
def transform_list_changed_in_place(folder):
    def before(dataset, epoch):
        if epoch == 1:
            dataset.transform.transforms.insert(1, transforms.RandomHorizontalFlip())
        if epoch == 2:
            dataset.transform.transforms[0] = transforms.Resize(6)

    return Case(Files(write(folder), transforms.Compose(list(CROP))), before)


@situation
def transform_replaced_between_phases(folder):
    train, test = transforms.Compose(CROP), transforms.Compose([transforms.Resize(6), transforms.ToTensor()])

    def before(dataset, epoch):
        dataset.transform = test if epoch % 2 else train

    return Case(Files(write(folder), train), before, epochs=4)


class CountsReads(Memory):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def __getitem__(self, i):
        self.reads += 1
        return self.transform(self.data[i] + self.reads), i


@situation
def reads_are_counted(folder):
    return Case(CountsReads())


class RareCount(Memory):
    """Only one sample changes the state."""

    def __init__(self):
        super().__init__(size=40)
        self.passes = 0

    def __getitem__(self, i):
        if i == 23:
            self.passes += 1
        return self.transform(self.data[i] + self.passes), i


@situation
def one_sample_counts(folder):
    return Case(RareCount())


class LogsAfter(Memory):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def __getitem__(self, i):
        x = self.transform(self.data[i].clone())
        self.drawn.append(i)
        return x, len(self.drawn)


@situation
def target_counts_after_transform(folder):
    return Case(LogsAfter())


@situation(workers=True)
def data_changed_in_place(folder):
    def before(dataset, epoch):
        dataset.data[2] += epoch

    return Case(Memory(), before)


@situation
def data_changed_through_numpy(folder):
    def before(dataset, epoch):
        dataset.data.numpy()[2] += epoch

    return Case(Memory(), before)


@situation
def labels_changed_in_place(folder):
    def before(dataset, epoch):
        dataset.targets[epoch] = 77

    return Case(Memory(), before)


@situation
def labels_of_image_folder_changed(folder):
    for kind in "ab":
        (folder / kind).mkdir()
        write(folder / kind, 3)

    def before(dataset, epoch):
        dataset.samples[epoch] = (dataset.samples[epoch][0], 5 + epoch)

    return Case(datasets.ImageFolder(str(folder), transforms.Compose(CROP)), before)


class SharedEpoch(Memory):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def __getitem__(self, i):
        return self.transform(self.data[i] * self.shared[0]), i


@situation
def epoch_in_shared_tensor(folder):
    def before(dataset, epoch):
        dataset.shared[0] = epoch + 1

    return Case(SharedEpoch(torch.ones(1).share_memory_()), before)


@situation
def epoch_in_shared_tensor_persistent_workers(folder):
    def before(dataset, epoch):
        dataset.shared[0] = epoch + 1

    return Case(SharedEpoch(torch.ones(1).share_memory_()), before, num_workers=2, persistent_workers=True)


@situation
def epoch_in_shared_value_persistent_workers(folder):
    def before(dataset, epoch):
        dataset.shared[0] = epoch + 1

    return Case(SharedEpoch(multiprocessing.Array("i", [1])), before, num_workers=2, persistent_workers=True)


class SharedTransform:
    def __init__(self, shared):
        self.shared = shared

    def __call__(self, x):
        return x * self.shared[0]


@situation
def epoch_in_shared_tensor_of_transform_persistent_workers(folder):
    def before(dataset, epoch):
        dataset.transform.transforms[0].shared[0] = epoch + 1

    transform = transforms.Compose([SharedTransform(torch.ones(1).share_memory_()), noise])
    return Case(Memory(transform), before, num_workers=2, persistent_workers=True)


@situation
def growing_dataset(folder):
    def before(dataset, epoch):
        dataset.data = torch.cat([dataset.data, dataset.data[:1] + epoch])
        dataset.targets = torch.cat([dataset.targets, dataset.targets[:1]])

    return Case(Memory(), before)


class GlobalSize:
    def __call__(self, x):
        return x[: SETTINGS.size]


@situation
def module_global_changes(folder):
    SETTINGS.size = 5

    def before(dataset, epoch):
        SETTINGS.size = 5 - epoch

    return Case(Memory(transforms.Compose([GlobalSize(), noise])), before)


class ClassSize:
    size = 5

    def __call__(self, x):
        return x[: self.size]


@situation
def class_attribute_changes(folder):
    ClassSize.size = 5

    def before(dataset, epoch):
        ClassSize.size = 5 - epoch

    return Case(Memory(transforms.Compose([ClassSize(), noise])), before)


@situation
def closure_changes(folder):
    settings = {"scale": 1.0}

    def before(dataset, epoch):
        settings["scale"] = epoch + 1.0

    return Case(Memory(transforms.Compose([lambda x: x * settings["scale"], noise])), before)


def scale(x, by):
    return x * by[0]


@situation
def partial_argument_changes(folder):
    by = [1.0]

    def before(dataset, epoch):
        by[0] = epoch + 1.0

    return Case(Memory(transforms.Compose([functools.partial(scale, by=by), noise])), before)


def nonlocal_counter():
    calls = 0

    def count(x):
        nonlocal calls
        calls += 1
        return x + calls

    return count


@situation
def nonlocal_changes(folder):
    return Case(Memory(transforms.Compose([nonlocal_counter(), noise])))


@situation
def environment_changes(folder):
    os.environ["SITUATION_SCALE"] = "1"

    def before(dataset, epoch):
        os.environ["SITUATION_SCALE"] = str(epoch + 1)

    def by_environment(x):
        return x * float(os.environ["SITUATION_SCALE"])

    return Case(Memory(transforms.Compose([by_environment, noise])), before)


@situation
def default_dtype_changes(folder):
    def before(dataset, epoch):
        torch.set_default_dtype(torch.float64 if epoch == 1 else torch.float32)

    def ramp(x):
        return x * torch.linspace(0, 1, 6)

    return Case(Memory(transforms.Compose([ramp, noise])), before)


@situation
def method_replaced(folder):
    class Scale:
        def __call__(self, x):
            return self.apply(x)

        def apply(self, x):
            return x * 2

    def before(dataset, epoch):
        if epoch == 1:
            Scale.apply = lambda self, x: x * 3

    return Case(Memory(transforms.Compose([Scale(), noise])), before)


@situation
def working_directory_changes(folder):
    for name in "xyz":
        (folder / name).mkdir()
        for i in range(SIZE):
            picture(i + ord(name)).save(folder / name / f"{i}.png")

    def before(dataset, epoch):
        os.chdir(folder / "xyz"[epoch])

    os.chdir(folder / "x")
    return Case(Files([f"{i}.png" for i in range(SIZE)], transforms.Compose(CROP)), before)


# random state


class OwnGenerator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, x):
        return x + torch.rand((), generator=self.generator)


@situation
def own_torch_generator(folder):
    return Case(Memory(transforms.Compose([double, OwnGenerator(), noise])))


class OwnRandom:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, x):
        return x + self.rng.random()


@situation
def own_numpy_generator(folder):
    return Case(Memory(transforms.Compose([double, OwnRandom(np.random.default_rng(3)), noise])))


@situation
def own_python_generator(folder):
    return Case(Memory(transforms.Compose([double, OwnRandom(random.Random(3)), noise])))


MODULE_GENERATOR = np.random.default_rng(0)


@situation
def generator_of_module(folder):
    MODULE_GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return Case(Memory(transforms.Compose([double, lambda x: x + MODULE_GENERATOR.random(), noise])))


class LazyGenerator:
    rng = None

    def __call__(self, x):
        if self.rng is None:
            self.rng = np.random.default_rng(5)
        return x + self.rng.random()


@situation
def generator_made_at_first_call(folder):
    return Case(Memory(transforms.Compose([double, LazyGenerator(), noise])))


class LazyMean:
    mean = None

    def __call__(self, x):
        if self.mean is None:
            self.mean = x.mean()
        return x - self.mean


@situation
def state_from_first_sample(folder):
    return Case(Memory(transforms.Compose([LazyMean(), noise])))


@situation(workers=True)
def state_from_first_sample_after_draw(folder):
    return Case(Memory(transforms.Compose([double, noise, LazyMean()])))


class RunningMean:
    def __init__(self):
        self.mean = torch.zeros(6)

    def __call__(self, x):
        self.mean.mul_(0.9).add_(x * 0.1)
        return x - self.mean


@situation
def running_mean_before_draw(folder):
    return Case(Memory(transforms.Compose([RunningMean(), noise])))


@situation
def running_mean_after_draw(folder):
    return Case(Memory(transforms.Compose([double, noise, RunningMean()])))


class DrawsForSome(Memory):
    """Draws before the transform, for few samples."""

    def __init__(self, rare):
        super().__init__(size=40)
        self.rare = rare

    def __getitem__(self, i):
        x = self.data[i].clone()
        if i == self.rare:
            x = x + random.random()
        return self.transform(x), i


@situation
def rare_draw_before_transform(folder):
    return Case(DrawsForSome(23))


@situation
def rare_draw_in_first_transform(folder):
    def pad_small(x):
        return x + np.random.rand() if x[0] == 2 * 23 * 6 else x

    return Case(Memory(transforms.Compose([double, pad_small, noise]), size=40))


@situation
def rare_draw_in_only_transform(folder):
    def maybe(x):
        return x + np.random.rand() if x[0] == 23 * 6 else x

    return Case(Memory(maybe, size=40))


@situation
def draw_starts_in_second_epoch(folder):
    settings = {"on": False}

    def late(x):
        return x + torch.rand(()) if settings["on"] else x

    def before(dataset, epoch):
        settings["on"] = epoch > 0

    return Case(Memory(transforms.Compose([double, late, noise])), before)


class RandomThenFixed:
    """Draws with a probability that may be 0."""

    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        return x + torch.rand(()) if self.p and torch.rand(()) < self.p else x


@situation
def probability_changes(folder):
    def before(dataset, epoch):
        dataset.transform.transforms[1].p = (0, 0.5, 1)[epoch]

    return Case(Memory(transforms.Compose([double, RandomThenFixed(0), noise])), before)


class DrawsWithoutResult(Memory):
    def __getitem__(self, i):
        torch.rand(0)
        random.random()
        return self.transform(self.data[i].clone()), i


@situation
def draw_that_is_not_used(folder):
    return Case(DrawsWithoutResult())


class DrawsAfter(Memory):
    def __getitem__(self, i):
        x = self.transform(self.data[i].clone())
        return (x.flip(0) if random.random() < 0.5 else x), np.random.randint(100)


@situation
def draws_after_transform(folder):
    return Case(DrawsAfter())


class SameCrop(Files):
    """Image and mask with the same crop, by two equal seeds."""

    def __getitem__(self, i):
        value = np.random.randint(2**31)
        torch.manual_seed(value)
        image = self.transform(self.load(i))
        torch.manual_seed(value)
        return image, self.transform(ImageOps.mirror(self.load(i)))


@situation
def same_seed_for_image_and_mask(folder):
    return Case(SameCrop(write(folder), transforms.Compose(CROP)))


class RestoredState(Files):
    def __getitem__(self, i):
        state = torch.get_rng_state()
        image = self.transform(self.load(i))
        torch.set_rng_state(state)
        return image, self.transform(ImageOps.mirror(self.load(i)))


@situation
def state_restored_for_mask(folder):
    return Case(RestoredState(write(folder), transforms.Compose(CROP)))


class SeedOfIndex(Files):
    def __getitem__(self, i):
        torch.manual_seed(i)
        random.seed(i)
        return self.transform(self.load(i)), i


@situation
def seed_of_index(folder):
    return Case(SeedOfIndex(write(folder), transforms.Compose(CROP)))


class Forked(Files):
    def __getitem__(self, i):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            image = self.transform(self.load(i))
        return image, i


@situation
def forked_generator(folder):
    return Case(Forked(write(folder), transforms.Compose(CROP)))


@situation
def seeds_reset_each_epoch(folder):
    return Case(Files(write(folder), transforms.Compose(CROP)), lambda d, epoch: seed(7))


# several samples


class Mixup(Files):
    def __getitem__(self, i):
        j = random.randrange(len(self))
        return self.transform(self.load(i)) * 0.5 + self.transform(self.load(j)) * 0.5, (i, j)


@situation
def mixup_drawn_before(folder):
    return Case(Mixup(write(folder), transforms.Compose(CROP)))


class MixupAfter(Files):
    def __getitem__(self, i):
        x = self.transform(self.load(i))
        j = random.randrange(len(self))
        return x * 0.5 + self.transform(self.load(j)) * 0.5, (i, j)


@situation(workers=True)
def mixup_drawn_between(folder):
    return Case(MixupAfter(write(folder), transforms.Compose(CROP)))


class MixupOfSelf(Files):
    def one(self, i):
        return super().__getitem__(i)

    def __getitem__(self, i):
        x, y = self.one(i)
        other, z = self.one(int(torch.randint(len(self), ())))
        return x + other, (y, z)


@situation
def mixup_of_other_item(folder):
    return Case(MixupOfSelf(write(folder), transforms.Compose(CROP)))


class MixupWrapper(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        x, y = self.dataset[i]
        other, z = self.dataset[random.randrange(len(self))]
        return x + other, (y, z)


@situation
def mixup_around_dataset(folder):
    return Case(MixupWrapper(Files(write(folder), transforms.Compose(CROP))))


class Mosaic(Files):
    def __getitem__(self, i):
        others = [i, *random.choices(range(len(self)), k=3)]
        parts = [self.transform(self.load(k)) for k in others]
        return torch.cat([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)], 2), others


@situation
def mosaic(folder):
    return Case(Mosaic(write(folder), transforms.Compose(CROP)))


class NeighbourFrames(Files):
    """A clip: the same transform for several frames."""

    def __getitem__(self, i):
        return torch.stack([self.transform(self.load(k % len(self))) for k in range(i, i + 3)]), i


@situation
def clips_of_frames(folder):
    return Case(NeighbourFrames(write(folder), transforms.Compose(CROP)))


class Retry(Files):
    """Takes another sample if the file cannot be read."""

    def __getitem__(self, i):
        try:
            return super().__getitem__(i)
        except OSError:
            return self[random.randrange(len(self))]


@situation
def broken_file_is_replaced_by_random_sample(folder):
    paths = write(folder)
    (folder / "4.png").write_bytes(b"broken")
    return Case(Retry(paths, transforms.Compose(CROP)))


class SkipsBroken(Files):
    def __getitem__(self, i):
        try:
            return super().__getitem__(i)
        except OSError:
            return self[(i + 1) % len(self)]


@situation
def deleted_file_is_replaced_by_next(folder):
    def before(dataset, epoch):
        if epoch == 1:
            os.remove(dataset.paths[3])

    return Case(SkipsBroken(write(folder), transforms.Compose(CROP)), before)


@situation(workers=True)
def missing_file_appears(folder):
    paths = write(folder)
    os.rename(paths[3], paths[3] + ".away")

    def before(dataset, epoch):
        if epoch == 1:
            os.rename(paths[3] + ".away", paths[3])

    return Case(SkipsBroken(paths, transforms.Compose(CROP)), before)


class Conditional(Files):
    """Two transforms; a draw decides which one."""

    def __init__(self, paths, transform, other):
        super().__init__(paths, transform)
        self.other_transform = other

    def __getitem__(self, i):
        chosen = self.transform if random.random() < 0.5 else self.other_transform
        return chosen(self.load(i)), i


@situation
def transform_chosen_at_random(folder):
    other = transforms.Compose([transforms.Resize(5), transforms.CenterCrop(5), transforms.ToTensor()])
    return Case(Conditional(write(folder), transforms.Compose(CROP), other))


class ByClass(Conditional):
    def __getitem__(self, i):
        return (self.transform if i % 2 else self.other_transform)(self.load(i)), i


@situation
def transform_by_class(folder):
    other = transforms.Compose([transforms.Resize(5), transforms.RandomCrop(4), transforms.ToTensor()])
    return Case(ByClass(write(folder), transforms.Compose(CROP), other))


# values and types


class Boxes(Files):
    def __getitem__(self, i):
        image = tv_tensors.Image(functional.pil_to_tensor(self.load(i)))
        target = {
            "boxes": tv_tensors.BoundingBoxes([[i, 1, 6, 6]], format="XYXY", canvas_size=(8, 10)),
            "mask": tv_tensors.Mask(torch.full((8, 10), i, dtype=torch.uint8)),
            "label": i,
        }
        return self.transform(image, target)


@situation
def boxes_and_masks(folder):
    return Case(
        Boxes(write(folder), v2.Compose([v2.Resize(7), v2.RandomHorizontalFlip(), v2.RandomCrop(5), v2.Identity()]))
    )


def flip_target_in_place(image, target):
    if random.random() < 0.5:
        target["boxes"][:, 0] += 1
        target["count"] += 1
    return image, target


class Detection(Memory):
    """Targets live in memory, and the transform changes them."""

    def __init__(self, copied):
        super().__init__(flip_target_in_place)
        self.annotations = [{"boxes": torch.full((1, 4), float(i)), "count": 0} for i in range(SIZE)]
        self.copied = copied

    def __getitem__(self, i):
        target = copy.deepcopy(self.annotations[i]) if self.copied else self.annotations[i]
        return self.transform(self.data[i].clone(), target)


@situation
def targets_changed_by_transform(folder):
    return Case(Detection(False))


@situation
def copied_targets_changed_by_transform(folder):
    return Case(Detection(True))


class InPlace(Memory):
    def __getitem__(self, i):
        return self.transform(self.data[i]), i


@situation
def data_changed_by_random_transform(folder):
    return Case(InPlace(transforms.Compose([lambda x: x, noise_in_place])))


@situation
def data_changed_by_random_transform_through_view(folder):
    return Case(InPlace(transforms.Compose([lambda x: x[1:4], noise_in_place])))


class Original(Memory):
    """The sample holds what came out of the transform, and what went into it."""

    def __getitem__(self, i):
        x = self.data[i].clone()
        return self.transform(x), x


@situation
def original_beside_result(folder):
    return Case(Original())


@situation
def original_changed_by_random_transform(folder):
    return Case(Original(transforms.Compose([lambda x: x, noise_in_place])))


class Buffer:
    def __init__(self):
        self.out = torch.zeros(6)

    def __call__(self, x):
        return self.out.copy_(x)


@situation
def first_transform_reuses_its_result(folder):
    return Case(Memory(transforms.Compose([Buffer(), noise])))


@situation
def first_transform_reuses_its_result_and_next_writes_it(folder):
    return Case(Memory(transforms.Compose([Buffer(), noise_in_place])))


class BufferAfter:
    def __init__(self):
        self.out = torch.zeros(6)

    def __call__(self, x):
        return self.out.copy_(x + torch.rand(()))


@situation
def random_transform_reuses_its_result(folder):
    return Case(Memory(transforms.Compose([double, BufferAfter()])))


@situation
def transform_returns_constant_object(folder):
    constant = torch.zeros(6)
    return Case(Memory(transforms.Compose([lambda x: constant, noise])))


@situation
def random_transform_keeps_identity(folder):
    def pair(x):
        return [x, x]

    def both(values):
        values[0] += torch.rand(())
        return values

    return Case(Memory(transforms.Compose([pair, both])))


class ById:
    """Caches by identity of the value, as some geometry caches do."""

    def __init__(self):
        self.known = {}

    def __call__(self, x):
        key = float(x.sum())
        if key not in self.known:
            self.known[key] = torch.rand(())
        return x + self.known[key]


@situation
def draws_are_cached_by_value(folder):
    return Case(Memory(transforms.Compose([double, ById(), noise])))


@functools.cache
def decoded(path):
    return Image.open(path).convert("RGB")


@situation
def lru_cache_of_images(folder):
    decoded.cache_clear()

    class Cached(Files):
        def load(self, i):
            return decoded(self.paths[i])

    return Case(Cached(write(folder), transforms.Compose(CROP)))


@situation
def lru_cache_of_images_that_are_changed(folder):
    decoded.cache_clear()

    class Cached(Files):
        def load(self, i):
            return decoded(self.paths[i])

    def draw_on(image):
        image.putpixel((random.randrange(5), 0), (1, 2, 3))
        return image

    return Case(Cached(write(folder), transforms.Compose([lambda image: image, draw_on, transforms.ToTensor()])))


def identity(x):
    return x


def maybe_flip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


@pytest.mark.parametrize("mode", ["P", "L", "LA", "1", "CMYK", "RGBA", "I;16", "F", "I", "YCbCr", "HSV"])
def test_modes_of_images(mode, tmp_path):
    class Pictures(Memory):
        def __getitem__(self, i):
            return self.transform(picture(i, mode)), i

    compare(lambda folder: Case(Pictures(transforms.Compose([identity, maybe_flip]))), tmp_path)


@situation
def palette_with_transparency(folder):
    paths = [str(folder / f"{i}.png") for i in range(SIZE)]
    for i, path in enumerate(paths):
        picture(i, "P").save(path, transparency=3, gamma=0.5)
    return Case(Files(paths, transforms.Compose([identity, maybe_flip]), mode=None))


def by_exif(image):
    turned = ImageOps.exif_transpose(image)
    return turned if random.random() < 0.5 else image


@situation
def orientation_of_photos(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    paths = write(folder, SIZE, "jpg", exif=exif)
    return Case(Files(paths, transforms.Compose([identity, by_exif]), mode=None))


@situation
def orientation_of_converted_photos(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    paths = write(folder, SIZE, "jpg", exif=exif)
    return Case(Files(paths, transforms.Compose([identity, by_exif])))


@situation
def text_of_pictures(folder):
    def named(image):
        return random.random(), image.filename, image.format, image.info.get("dpi"), image.text, image.readonly

    paths = write(folder, dpi=(72, 72))
    return Case(Files(paths, transforms.Compose([identity, named]), mode=None))


@situation
def lazy_images(folder):
    return Case(Files(write(folder, SIZE, "jpg"), transforms.Compose([transforms.RandomCrop(5)]), mode=None))


@situation
def draft_of_lazy_images(folder):
    def draft(image):
        if random.random() < 0.5:
            image.draft("L", (4, 4))
        return image.convert("RGB")

    return Case(
        Files(write(folder, SIZE, "jpg"), transforms.Compose([identity, draft, transforms.ToTensor()]), mode=None)
    )


@situation
def attributes_of_images(folder):
    def tag(image):
        image.tag = image.size[0]
        return image

    def read(image):
        return random.random(), getattr(image, "tag", None)

    return Case(Files(write(folder), transforms.Compose([tag, read])))


@situation
def attributes_of_tensors(folder):
    def tag(x):
        x.tag = float(x[0])
        return x

    def read(x):
        return x + torch.rand(()), getattr(x, "tag", None)

    return Case(Memory(transforms.Compose([tag, read])))


@situation
def gradients_and_strides(folder):
    def strided(x):
        return x.reshape(2, 3).t()

    def random_view(x):
        return x, x.is_contiguous(), torch.rand(()), x.expand(2, 3, 2)

    return Case(Memory(transforms.Compose([strided, random_view])))


@situation
def expanded_tensors(folder):
    def expanded(x):
        return x[:1].expand(6)

    def written(x):
        try:
            x += torch.rand(())
        except RuntimeError as error:
            return str(error)
        return x

    return Case(Memory(transforms.Compose([expanded, written])))


@situation
def tensors_that_require_gradients(folder):
    return Case(Memory(transforms.Compose([lambda x: x.requires_grad_(), lambda x: (x.requires_grad, torch.rand(()))])))


@situation
def flipped_arrays(folder):
    """``torch.from_numpy`` refuses negative strides, in each epoch."""

    def flip(x):
        return x.numpy()[::-1]

    def to_tensor(x):
        random.random()
        return torch.from_numpy(x)

    return Case(Memory(transforms.Compose([flip, to_tensor])))


@situation
def read_only_arrays(folder):
    def locked(x):
        x = x.numpy()
        x.flags.writeable = False
        return x

    def write_to(x):
        x[0] = random.random()
        return x

    return Case(Memory(transforms.Compose([locked, write_to])))


@situation
def fortran_arrays(folder):
    def fortran(x):
        return np.asfortranarray(x.numpy().reshape(2, 3))

    def jitter(x):
        return (x + random.random()), x.strides, x.flags.f_contiguous, x.ravel("K").tolist()

    return Case(Memory(transforms.Compose([fortran, jitter])))


@situation
def structured_and_big_endian_arrays(folder):
    def strange(x):
        record = np.zeros(2, dtype=[("a", ">f4"), ("b", "i2")])
        record["a"] = x[:2].numpy()
        return record, np.array(["a", "bc"]), x.numpy().astype(">f8"), np.float32(x[0]), np.datetime64("2020-01-01")

    return Case(Memory(transforms.Compose([strange, lambda x: (random.random(), x)])))


@situation
def object_arrays(folder):
    def objects(x):
        return np.array([x.tolist(), None, "x"], dtype=object)

    return Case(Memory(transforms.Compose([objects, lambda x: (random.random(), list(x))])))


@situation
def masked_and_matrix_arrays(folder):
    def masked(x):
        return np.ma.masked_greater(x.numpy(), 10)

    return Case(Memory(transforms.Compose([masked, lambda x: (random.random(), x.mask.tolist(), x.filled(0))])))


@situation
def views_of_one_memory(folder):
    def views(x):
        return x[:4], x[2:]

    def shift(parts):
        parts[0].add_(torch.rand(()))
        return parts

    return Case(Memory(transforms.Compose([views, shift])))


@situation
def views_of_one_array(folder):
    def views(x):
        array = x.numpy()
        return array[:4], array[2:]

    def shift(parts):
        parts[0][:] += random.random()
        return parts

    return Case(Memory(transforms.Compose([views, shift])))


@dataclass
class Annotated:
    image: torch.Tensor
    name: str
    size: tuple[int, int]


@situation
def dataclasses_and_named_tuples(folder):
    def annotate(x):
        return Annotated(x, "a", (2, 3)), Pair(x + 1, OrderedDict(b=1, a=2)), {1, 2}, frozenset("ab"), slice(1, 3), None

    return Case(Memory(transforms.Compose([annotate, lambda x: (random.random(), x)])))


@situation
def subclasses_of_numbers_and_text(folder):
    class Label(int):
        pass

    class Name(str):
        pass

    return Case(
        Memory(
            transforms.Compose(
                [lambda x: {"y": Label(3), "n": Name("a"), "b": True, "x": x}, lambda x: (random.random(), x)]
            )
        )
    )


@situation
def special_floats(folder):
    def special(x):
        return x.double() * float("nan"), -0.0, float("inf"), float("nan"), 2**80, 1 + 2j, b"a", bytearray(b"b"), ...

    return Case(Memory(transforms.Compose([special, lambda x: (random.random(), x)])))


@situation
def odd_dtypes(folder):
    def many(x):
        return [x.to(dtype) for dtype in (torch.bfloat16, torch.half, torch.bool, torch.complex64, torch.int8)]

    def first(parts):
        return torch.rand(()), [str(each) for each in parts], [each.dtype for each in parts]

    return Case(Memory(transforms.Compose([many, first])))


@situation
def sparse_and_empty_tensors(folder):
    def sparse(x):
        return x.to_sparse(), torch.zeros(0, 3), torch.tensor(3.0)

    return Case(Memory(transforms.Compose([sparse, lambda x: (torch.rand(()), x[0].to_dense(), x[1], x[2])])))


@situation
def generator_as_value(folder):
    return Case(
        Memory(transforms.Compose([lambda x: (each for each in x), lambda x: [each + torch.rand(()) for each in x]]))
    )


@situation
def file_as_value(folder):
    return Case(
        Memory(transforms.Compose([lambda x: io.BytesIO(x.numpy().tobytes()), lambda x: (random.random(), x.read())]))
    )


@situation
def custom_objects(folder):
    class Sample:
        def __init__(self, x):
            self.x = x

    return Case(Memory(transforms.Compose([Sample, lambda x: x.x + torch.rand(())])))


@situation
def lazy_objects(folder):
    """The value reads its data when it is used."""

    class Lazy:
        def __init__(self, path):
            self.path = path

        def read(self):
            return np.asarray(Image.open(self.path)) + random.random()

    class Paths(Files):
        def __getitem__(self, i):
            return self.transform(Lazy(self.paths[i])), i

    def before(dataset, epoch):
        picture(50 + epoch).save(dataset.paths[1])

    return Case(Paths(write(folder), transforms.Compose([identity, lambda x: x.read()])), before)


# files


def keep_times(path, action):
    before = os.stat(path)
    action()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@situation
def files_rewritten_with_same_size(folder):
    paths = [str(folder / f"{i}.bmp") for i in range(SIZE)]
    for i, path in enumerate(paths):
        picture(i).save(path)

    def before(dataset, epoch):
        picture(40 + epoch).save(paths[epoch])

    return Case(Files(paths, transforms.Compose(CROP)), before)


@situation
def files_rewritten_with_same_size_and_time(folder):
    paths = [str(folder / f"{i}.bmp") for i in range(SIZE)]
    for i, path in enumerate(paths):
        picture(i).save(path)

    def before(dataset, epoch):
        keep_times(paths[epoch], lambda: picture(40 + epoch).save(paths[epoch]))

    return Case(Files(paths, transforms.Compose(CROP)), before)


@situation
def files_replaced_with_same_size_and_time(folder):
    paths = [str(folder / f"{i}.bmp") for i in range(SIZE)]
    for i, path in enumerate(paths):
        picture(i).save(path)

    def before(dataset, epoch):
        def replace():
            picture(40 + epoch).save(folder / "new.bmp")
            os.replace(folder / "new.bmp", paths[epoch])

        keep_times(paths[epoch], replace)

    return Case(Files(paths, transforms.Compose(CROP)), before)


@situation
def links_to_other_files(folder):
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    for i in range(SIZE):
        for name in "ab":
            path = folder / name / f"{i}.bmp"
            picture(i + ord(name)).save(path)
            os.utime(path, ns=(10**18, 10**18))
    os.symlink(folder / "a", folder / "now")

    def before(dataset, epoch):
        os.remove(folder / "now")
        os.symlink(folder / "ab"[epoch % 2], folder / "now")

    return Case(Files([str(folder / "now" / f"{i}.bmp") for i in range(SIZE)], transforms.Compose(CROP)), before)


@situation
def deleted_files(folder):
    def before(dataset, epoch):
        if epoch == 2:
            os.remove(dataset.paths[4])

    return Case(Files(write(folder), transforms.Compose(CROP)), before)


@situation
def one_file_for_all_samples(folder):
    class One(Files):
        def __getitem__(self, i):
            return self.transform(self.load(i).crop((i, 0, i + 5, 8))), i

    paths = write(folder, 1) * SIZE
    return Case(One(paths, transforms.Compose([identity, transforms.RandomCrop(4), transforms.ToTensor()])))


@situation(workers=True)
def zip_archive_is_replaced(folder):
    class Zipped(Memory):
        archive = None

        def __getitem__(self, i):
            if self.archive is None:
                self.archive = zipfile.ZipFile(folder / "all.zip")
            with self.archive.open(f"{i}.png") as file:
                return self.transform(Image.open(file).convert("RGB")), i

    def pack(shift):
        with zipfile.ZipFile(folder / "all.zip", "w") as archive:
            for i in range(SIZE):
                data = io.BytesIO()
                picture(i + shift).save(data, "png")
                archive.writestr(f"{i}.png", data.getvalue())

    def before(dataset, epoch):
        if epoch == 1:
            pack(30)
            dataset.archive = None

    pack(0)
    return Case(Zipped(transforms.Compose(CROP)), before)


@situation
def archive_opened_per_sample(folder):
    class Zipped(Memory):
        def __getitem__(self, i):
            with zipfile.ZipFile(folder / "all.zip") as archive, archive.open(f"{i}.png") as file:
                return self.transform(Image.open(file).convert("RGB")), i

    def pack(shift):
        with zipfile.ZipFile(folder / "all.zip", "w") as archive:
            for i in range(SIZE):
                data = io.BytesIO()
                picture(i + shift).save(data, "png")
                archive.writestr(f"{i}.png", data.getvalue())

    def before(dataset, epoch):
        if epoch == 1:
            pack(30)

    pack(0)
    return Case(Zipped(transforms.Compose(CROP)), before)


@situation
def memory_mapped_array(folder):
    np.save(folder / "all.npy", np.arange(SIZE * 6, dtype="float32").reshape(SIZE, 6))

    class Mapped(Memory):
        def __init__(self, transform):
            super().__init__(transform)
            self.array = np.load(folder / "all.npy", mmap_mode="r+")

        def __getitem__(self, i):
            return self.transform(torch.tensor(self.array[i])), i

    def before(dataset, epoch):
        dataset.array[epoch] = 70 + epoch

    return Case(Mapped(transforms.Compose([double, noise])), before)


@situation
def memory_mapped_array_opened_per_sample(folder):
    np.save(folder / "all.npy", np.arange(SIZE * 6, dtype="float32").reshape(SIZE, 6))

    class Mapped(Memory):
        def __getitem__(self, i):
            array = np.load(folder / "all.npy", mmap_mode="r")
            return self.transform(torch.tensor(array[i])), i

    def before(dataset, epoch):
        array = np.load(folder / "all.npy")
        array[epoch] = 70 + epoch
        np.save(folder / "all.npy", array)

    return Case(Mapped(transforms.Compose([double, noise])), before)


@situation
def raw_handle_kept_open(folder):
    (folder / "all.bin").write_bytes(np.arange(SIZE * 6, dtype="float32").tobytes())

    class Handle(Memory):
        file = None

        def __getitem__(self, i):
            if self.file is None:
                self.file = os.open(folder / "all.bin", os.O_RDONLY)
            return self.transform(torch.frombuffer(bytearray(os.pread(self.file, 24, 24 * i)), dtype=torch.float32)), i

    def before(dataset, epoch):
        with open(folder / "all.bin", "r+b") as file:
            file.seek(24 * epoch)
            file.write(np.full(6, 70, dtype="float32").tobytes())

    return Case(Handle(transforms.Compose([double, noise])), before)


@situation
def directory_is_listed(folder):
    class Listed(Memory):
        def __getitem__(self, i):
            return self.transform(self.data[i] + len(os.listdir(folder))), i

    def before(dataset, epoch):
        (folder / f"new{epoch}").touch()

    return Case(Listed(transforms.Compose([double, noise])), before)


@situation
def transform_reads_a_file(folder):
    (folder / "scale.txt").write_text("1.0")

    def by_file(x):
        return x * float((folder / "scale.txt").read_text())

    def before(dataset, epoch):
        (folder / "scale.txt").write_text(f"{epoch + 1}.0")

    return Case(Memory(transforms.Compose([by_file, noise])), before)


@situation
def file_read_after_transform(folder):
    for i in range(SIZE):
        (folder / f"{i}.txt").write_text("1")

    class Labels(Memory):
        def __getitem__(self, i):
            return self.transform(self.data[i].clone()), (folder / f"{i}.txt").read_text()

    def before(dataset, epoch):
        (folder / f"{epoch}.txt").write_text(str(epoch + 5))

    return Case(Labels(), before)


@situation
def tensor_files(folder):
    for i in range(SIZE):
        torch.save({"x": torch.full((6,), float(i)), "y": i}, folder / f"{i}.pt")

    class Saved(Memory):
        def __getitem__(self, i):
            item = torch.load(folder / f"{i}.pt")
            return self.transform(item["x"]), item["y"]

    def before(dataset, epoch):
        torch.save({"x": torch.full((6,), 70.0), "y": 7}, folder / f"{epoch}.pt")

    return Case(Saved(), before)


@situation
def decoded_by_torchvision(folder):
    from torchvision.io import read_image

    paths = write(folder)

    class Read(Files):
        def __getitem__(self, i):
            return self.transform(read_image(self.paths[i])), i

    def before(dataset, epoch):
        if epoch:
            for i, path in enumerate(paths):
                picture(60 + i + epoch).save(path)

    return Case(Read(paths, v2.Compose([v2.Resize(7), v2.RandomCrop(5)])), before)


@situation
def file_written_by_dataset(folder):
    class Decoded(Files):
        """Keeps decoded images on the disk."""

        def load(self, i):
            path = self.paths[i] + ".npy"
            if not os.path.exists(path):
                np.save(path, np.asarray(Image.open(self.paths[i])))
            return Image.fromarray(np.load(path))

    return Case(Decoded(write(folder), transforms.Compose(CROP)))


# indices and loaders


@situation
def subset_with_other_indices(folder):
    def before(dataset, epoch):
        dataset.indices = [[0, 1, 2, 3], [2, 3, 4, 5], [5, 0, 5, 0]][epoch]

    return Case(Subset(Memory(), [0, 1, 2, 3]), before)


@situation
def subset_indices_changed_in_place(folder):
    def before(dataset, epoch):
        random.shuffle(dataset.indices)

    return Case(Subset(Memory(), [0, 1, 2, 3]), before)


@situation
def concatenated(folder):
    one, two = Files(write(folder), transforms.Compose(CROP)), Memory(transforms.Compose([noise, double]))
    return Case(ConcatDataset([one, two, one]))


@situation
def split_of_one_dataset(folder):
    base = Files(write(folder), transforms.Compose(CROP))
    train, test = random_split(base, [4, 2], torch.Generator().manual_seed(1))
    return Case(ConcatDataset([train, test, Subset(train, [1, 2, 1])]))


@situation
def subset_whose_dataset_gets_other_transform(folder):
    base = Files(write(folder), transforms.Compose(CROP))
    train, _ = random_split(base, [4, 2], torch.Generator().manual_seed(1))

    def before(dataset, epoch):
        base.transform = transforms.Compose([transforms.Resize(5 + epoch), *CROP[1:]])

    return Case(train, before)


class WithTransform(Dataset):
    """The usual wrapper of a subset that adds a transform."""

    def __init__(self, subset, transform):
        self.subset, self.transform = subset, transform

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, i):
        x, y = self.subset[i]
        return self.transform(x), y


@situation
def transform_around_random_dataset(folder):
    base = Files(write(folder), transforms.Compose(CROP))
    return Case(WithTransform(Subset(base, [0, 1, 4]), transforms.Compose([double, noise])))


@situation
def transform_around_dataset_without(folder):
    base = Files(write(folder), transforms.Compose([transforms.Resize(6), transforms.ToTensor()]))
    return Case(WithTransform(Subset(base, [0, 1, 4]), transforms.Compose([double, noise])))


class Batched(Memory):
    def __getitems__(self, indices):
        shift = torch.rand(())
        return [(self.transform(self.data[i].clone()) + shift, len(indices)) for i in indices]


@situation
def items_of_a_batch(folder):
    return Case(Batched())


class BatchedAlike(Memory):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


@situation
def items_of_a_batch_one_by_one(folder):
    return Case(BatchedAlike())


@situation
def negative_and_other_indices(folder):
    sampler = [0, -1, -SIZE, np.int64(2), torch.tensor(3), True, 5]
    return Case(Memory(), sampler=sampler)


@situation
def index_out_of_range(folder):
    return Case(Memory(), sampler=[0, 1, 2, SIZE, 3])


@situation
def index_out_of_range_negative(folder):
    return Case(Memory(), sampler=[0, 1, 2, -SIZE - 1, 3])


class SizeOfIndex(Memory):
    """The sampler gives index and size, as detectors with several scales do."""

    def __getitem__(self, index):
        i, size = index if isinstance(index, tuple) else (index, 4)
        return self.transform(self.data[i][:size].clone()), i


@situation
def indices_with_sizes(folder):
    return Case(SizeOfIndex(), batch_sampler=[[(0, 3), (1, 3)], [(2, 4), (0, 4)], [(0, 3), 5]])


class Slices(Memory):
    def __getitem__(self, i):
        return self.transform(self.data[i].clone()), i


@situation
def slices_as_indices(folder):
    return Case(Slices(), batch_sampler=[[slice(0, 3)], [slice(2, 5)], [[0, 1]]])


class Dictionary(Dataset):
    """Keys that are no numbers."""

    def __init__(self):
        self.data = {key: torch.full((3,), float(ord(key))) for key in "abc"}
        self.transform = transforms.Compose([double, noise])

    def __len__(self):
        return len(self.data)

    def __getitem__(self, key):
        return self.transform(self.data[key].clone())


@situation
def keys_of_text(folder):
    return Case(Dictionary(), sampler=list("abcab"))


class FloatIndex(Memory):
    def __getitem__(self, i):
        return self.transform(torch.full((3,), i * 1.0)), type(i).__name__


@situation
def type_of_index_is_seen(folder):
    return Case(FloatIndex(), sampler=[0, np.int64(0), True, torch.tensor(0), 1, 1.0])


@situation
def loader_with_generator(folder):
    return Case(Memory(), generator=torch.Generator().manual_seed(4))


class WorkerAware(Memory):
    def __getitem__(self, i):
        info = get_worker_info()
        return self.transform(self.data[i] + (0 if info is None else 100 * (info.id + 1))), i


@situation(workers=True)
def sample_depends_on_worker(folder):
    return Case(WorkerAware())


class WorkerSeed(Memory):
    def __getitem__(self, i):
        info = get_worker_info()
        return self.transform(self.data[i] + (0 if info is None else info.seed % 1000)), i


@situation
def sample_depends_on_seed_of_worker(folder):
    return Case(WorkerSeed())


class ProcessName:
    def __call__(self, x):
        return x + len(multiprocessing.current_process().name)


@situation
def transform_depends_on_process(folder):
    def child(x):
        return x + (multiprocessing.parent_process() is not None)

    return Case(Memory(transforms.Compose([child, noise])))


def offset_by_worker(worker):
    dataset = get_worker_info().dataset
    dataset.data = dataset.data + 100 * worker


@situation
def init_of_worker_changes_data(folder):
    return Case(Memory(), num_workers=2, worker_init_fn=offset_by_worker)


def transform_by_worker(worker):
    get_worker_info().dataset.transform.transforms[0] = functools.partial(scale, by=[worker + 3])


@situation
def init_of_worker_changes_transform(folder):
    return Case(Memory(), num_workers=2, worker_init_fn=transform_by_worker)


def own_seed(worker):
    random.seed(worker)
    np.random.seed(worker)
    torch.manual_seed(worker)


@situation
def init_of_worker_seeds(folder):
    return Case(Files(write(folder), transforms.Compose(CROP)), num_workers=2, worker_init_fn=own_seed)


@situation
def one_persistent_worker_after_change(folder):
    def before(dataset, epoch):
        dataset.data[0] = 50 + epoch

    return Case(Memory(), before, num_workers=1, persistent_workers=True)


@situation
def tiny_budget(folder):
    return Case(Files(write(folder), transforms.Compose(CROP)), cache={"byte_budget": 400})


@situation
def no_budget(folder):
    return Case(Files(write(folder), transforms.Compose(CROP)), cache={"byte_budget": 1})


@situation
def samples_of_very_different_size(folder):
    class Uneven(Memory):
        def __getitem__(self, i):
            return self.transform(torch.full((10 ** (i % 6),), float(i))), i

    return Case(Uneven(transforms.Compose([double, noise])), cache={"byte_budget": 10_000})


@situation
def samples_grow_after_change_of_files(folder):
    def before(dataset, epoch):
        picture(1, size=(10 * 4**epoch, 9)).save(dataset.paths[1])

    return Case(
        Files(write(folder), transforms.Compose([identity, transforms.RandomCrop(5), transforms.ToTensor()])), before
    )


class Raises(Memory):
    def __getitem__(self, i):
        if i == 4:
            raise KeyError("no such sample")
        return super().__getitem__(i)


@situation
def errors_of_samples(folder):
    return Case(Raises())


@situation
def errors_of_random_transforms(folder):
    def sometimes(x):
        if random.random() < 0.3:
            raise ValueError(f"bad {float(x[0])}")
        return x

    return Case(Memory(transforms.Compose([double, sometimes])), epochs=5)


@situation
def errors_of_first_transforms_start_later(folder):
    class Checks(Memory):
        limit = 1e9

        def __getitem__(self, i):
            if self.data[i][0] > self.limit:
                raise ValueError(i)
            return super().__getitem__(i)

    def before(dataset, epoch):
        dataset.limit = 12 if epoch else 1e9

    return Case(Checks(), before)


class Iterable(torch.utils.data.IterableDataset):
    transform = transforms.Compose([double, noise])

    def __iter__(self):
        return (self.transform(torch.full((3,), float(i))) for i in range(4))


def test_iterable_datasets_are_refused():
    with pytest.raises(NotCacheable):
        PrefixCache(Iterable())


# transforms of other kinds


@situation
def subclass_of_compose(folder):
    class Twice(transforms.Compose):
        def __call__(self, image):
            return super().__call__(image) + super().__call__(image)

    return Case(Files(write(folder), Twice(CROP)))


@situation
def subclass_of_compose_that_shuffles(folder):
    class Shuffled(transforms.Compose):
        def __call__(self, image):
            order = list(self.transforms)
            random.shuffle(order)
            for each in order:
                image = each(image)
            return image

    return Case(Memory(Shuffled([double, lambda x: x + 1, noise])))


@situation
def sequential_of_modules(folder):
    class Read(Files):
        def __getitem__(self, i):
            return self.transform(functional.pil_to_tensor(self.load(i))), i

    return Case(Read(write(folder), torch.nn.Sequential(transforms.Resize(7), transforms.RandomCrop(5))))


@situation
def dropout_as_transform_in_both_modes(folder):
    def before(dataset, epoch):
        dataset.transform.train(epoch != 1)

    return Case(Memory(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5))), before)


@situation
def module_with_weights_as_transform(folder):
    linear = torch.nn.Linear(6, 6)

    def before(dataset, epoch):
        with torch.no_grad():
            linear.weight.add_(1)

    return Case(Memory(transforms.Compose([lambda x: linear(x).detach(), noise])), before)


@situation
def same_transform_twice(folder):
    crop = transforms.RandomCrop(6)
    return Case(Files(write(folder), transforms.Compose([crop, transforms.Resize(8), crop, transforms.ToTensor()])))


@situation
def nested_compose(folder):
    inner = transforms.Compose([transforms.Resize(9), transforms.Compose([transforms.CenterCrop(8), *CROP])])
    return Case(Files(write(folder), transforms.Compose([inner, noise])))


@situation
def transform_called_by_getitem_in_parts(folder):
    class Parts(Files):
        def __getitem__(self, i):
            image = self.load(i)
            for each in self.transform.transforms:
                image = each(image)
            return image, i

    return Case(Parts(write(folder), transforms.Compose(CROP)))


@situation
def transform_with_other_arguments(folder):
    class Named:
        def __init__(self):
            self.transform = transforms.Compose([double, noise])

        def __call__(self, image, *, epoch=0, **rest):
            return {"image": self.transform(image) + epoch, **rest}

    class Calls(Memory):
        def __getitem__(self, i):
            return self.transform(image=self.data[i].clone(), epoch=i, mask=self.data[0])

    return Case(Calls(Named()))


@situation
def transform_of_index(folder):
    def of_pair(pair):
        return pair[0] + pair[1]

    class Pairs(Memory):
        def __getitem__(self, i):
            return self.transform((self.data[i].clone(), i)), i

    return Case(Pairs(transforms.Compose([of_pair, noise])))


@situation
def order_of_calls_by_dataset(folder):
    """The second transform gets the result of the first, which draws."""

    class Chain(Memory):
        def __init__(self):
            super().__init__(transforms.Compose([double, noise]))
            self.post_transform = transforms.Compose([double, noise])

        def __getitem__(self, i):
            return self.post_transform(self.transform(self.data[i].clone())), i

    return Case(Chain())


@situation
def fixed_transform_then_random_transform(folder):
    class Chain(Memory):
        def __init__(self):
            super().__init__(double)
            self.post_transform = transforms.Compose([double, noise])

        def __getitem__(self, i):
            return self.post_transform(self.transform(self.data[i].clone()) + 1), i

    return Case(Chain())


@situation
def transforms_as_methods(folder):
    class Methods(Memory):
        def __init__(self):
            super().__init__()
            self.transform = transforms.Compose([self.bigger, noise])
            self.by = 2

        def bigger(self, x):
            return x * self.by

    def before(dataset, epoch):
        dataset.by = 2 + epoch

    return Case(Methods(), before)


@situation
def transform_property(folder):
    class Property(Memory):
        def __init__(self):
            self.parts = transforms.Compose([double, noise])
            self.data = torch.arange(12.0).reshape(6, 2)
            self.targets = torch.arange(6)

        @property
        def transform(self):
            return self.parts

    return Case(Property())


@situation
def transform_of_class(folder):
    class OfClass(Dataset):
        transform = transforms.Compose([double, noise])

        def __len__(self):
            return SIZE

        def __getitem__(self, i):
            return self.transform(torch.full((3,), float(i))), i

    return Case(OfClass())


@situation
def transform_through_self_in_closure(folder):
    fixed = transforms.Compose([double, noise])

    class Closure(Memory):
        def __getitem__(self, i):
            return fixed(self.data[i].clone()), i

    return Case(Closure(fixed))


@situation
def transform_checks_type_of_itself(folder):
    class Checked(Memory):
        def __getitem__(self, i):
            assert type(self.transform) is transforms.Compose
            assert self.transform is self.known
            return self.transform(self.data[i].clone()), len(self.transform.transforms), repr(self.transform)

    dataset = Checked()
    dataset.known = dataset.transform
    return Case(dataset)


@situation
def transform_catches_errors(folder):
    class Robust(Memory):
        def __getitem__(self, i):
            try:
                return self.transform(self.data[i].clone()), i
            except BaseException as error:
                return type(error).__name__, i

    def bad(x):
        if float(x[0]) == 24:  # a sample that the first look does not see
            raise ValueError
        return x

    return Case(Robust(transforms.Compose([bad, double, noise])))


@situation
def code_after_transform_uses_locals(folder):
    class Cleanup(Memory):
        def __init__(self):
            super().__init__()
            self.depth = 0

        def __getitem__(self, i):
            self.depth += 1
            try:
                return self.transform(self.data[i].clone()), i, self.depth
            finally:
                self.depth -= 1

    return Case(Cleanup())


@situation
def lock_around_transform(folder):
    lock = threading.Lock()

    class Locked(Memory):
        def __getitem__(self, i):
            with lock:
                return self.transform(self.data[i].clone()), i

    return Case(Locked())


@situation
def generator_seeded_by_stack(folder):
    """The sample is made in a thread of the dataset."""

    class Threaded(Memory):
        def __getitem__(self, i):
            result = []
            thread = threading.Thread(target=lambda: result.append(self.transform(self.data[i].clone())))
            thread.start()
            thread.join()
            return result[0], i

    return Case(Threaded())


@situation
def transforms_without_draws(folder):
    return Case(Memory(transforms.Compose([double, lambda x: x + 1])))


@situation
def no_transform(folder):
    dataset = Memory()
    dataset.transform = None

    class Plain(Memory):
        def __getitem__(self, i):
            return self.data[i].clone() if self.transform is None else self.transform(self.data[i].clone())

    dataset.__class__ = Plain

    def before(dataset, epoch):
        dataset.transform = noise if epoch == 1 else None

    return Case(dataset, before)


# the tests


@pytest.fixture(autouse=True)
def put_back():
    here = os.getcwd()
    yield
    os.chdir(here)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_samples_are_the_users(name, tmp_path):
    compare(CASES[name], tmp_path)


@pytest.mark.parametrize("name", sorted(WITH_WORKERS))
def test_samples_of_workers_are_the_users(name, tmp_path):
    compare(CASES[name], tmp_path, workers=2)


@pytest.fixture
def files(tmp_path):
    return Files(write(tmp_path), transforms.Compose(CROP))


def test_two_iterators_at_once(files):
    def record(dataset, workers):
        seed(1)
        loader = DataLoader(dataset, 2, shuffle=True, collate_fn=as_list, num_workers=workers)
        return [(facts(a), facts(b)) for _ in range(2) for a, b in zip(loader, loader, strict=True)]

    cached = PrefixCache(files)
    assert record(cached, 0) == record(files, 0)
    assert record(cached, 2) == record(files, 2)


def test_evaluation_with_another_transform_in_the_middle_of_an_epoch(files):
    evaluation = transforms.Compose([transforms.Resize(6), transforms.ToTensor()])

    def record(dataset):
        seed(1)
        train = files.transform
        seen = []
        loader = DataLoader(dataset, 2, shuffle=True, collate_fn=as_list)
        for _ in range(3):
            for batch in loader:
                seen.append(facts(batch))
                files.transform = evaluation
                seen.append(facts([files[0], dataset[1]]))
                files.transform = train
        return seen, generators()

    plain = record(files)
    assert record(PrefixCache(files)) == plain


def test_evaluation_loader_of_the_same_files(files):
    other = copy.copy(files)
    other.transform = transforms.Compose([transforms.Resize(6), transforms.RandomCrop(6), transforms.ToTensor()])

    def record(train, test):
        seed(1)
        seen = []
        for _ in range(3):
            for dataset in (train, test):
                seen += [facts(batch) for batch in DataLoader(dataset, 2, shuffle=True, collate_fn=as_list)]
        return seen, generators()

    plain = record(files, other)
    assert record(PrefixCache(files), PrefixCache(other)) == plain


def test_two_caches_of_one_dataset(files):
    def record(one, two):
        seed(1)
        seen = []
        for _ in range(2):
            for dataset in (one, two):
                seen += [facts(batch) for batch in DataLoader(dataset, 2, shuffle=True, collate_fn=as_list)]
        return seen, generators()

    plain = record(files, Subset(files, [5, 4, 3]))
    assert record(PrefixCache(files), PrefixCache(Subset(files, [5, 4, 3]))) == plain


def test_a_cache_of_a_cache(files):
    seed(1)
    plain = [facts(files[i]) for _ in range(3) for i in range(SIZE)]
    try:
        cached = PrefixCache(PrefixCache(files))
    except NotCacheable:
        return
    seed(1)
    assert [facts(cached[i]) for _ in range(3) for i in range(SIZE)] == plain


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_the_cache(copied, files):
    cached = PrefixCache(files)
    for i in range(4):
        cached[i]
    other = copied(cached)
    seed(1)
    plain = [facts(files[i]) for _ in range(2) for i in range(SIZE)]
    seed(1)
    assert [facts(other[i]) for _ in range(2) for i in range(SIZE)] == plain
    other.dataset.transform.transforms[0] = transforms.Resize(6)
    seed(1)
    plain = [facts(other.dataset[i]) for i in range(SIZE)]
    seed(1)
    assert [facts(other[i]) for i in range(SIZE)] == plain
    seed(1)
    plain = [facts(files[i]) for i in range(SIZE)]
    seed(1)
    assert [facts(cached[i]) for i in range(SIZE)] == plain


def test_workers_started_in_a_thread(files):
    def record(dataset):
        seed(1)
        seen = []
        loader = DataLoader(dataset, 2, shuffle=True, num_workers=2, collate_fn=as_list)

        def read():
            seen.extend(facts(batch) for _ in range(2) for batch in loader)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return seen

    assert record(PrefixCache(files)) == record(files)


def test_threads_read_samples_at_once(files):
    """Only the samples of each thread must be right: draws of threads have no order."""
    fixed = Files(files.paths, transforms.Compose([transforms.Resize(7), double_draw]))
    cached = PrefixCache(fixed)
    expected = [facts(functional.to_tensor(transforms.Resize(7)(fixed.load(i)))) for i in range(SIZE)]
    found: list = []

    def read():
        for _ in range(10):
            found.extend((i, facts(cached[i][0])) for i in range(SIZE))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4 * 10 * SIZE
    assert all(value == expected[i] for i, value in found)


def double_draw(image):
    random.random()
    return functional.to_tensor(image)


def test_results_are_the_callers_own(files):
    """Writing to a batch changes no later sample."""
    cached = PrefixCache(Memory(transforms.Compose([double, lambda x: (random.random(), x)[1]])))
    for _ in range(3):
        for i in range(SIZE):
            x, _ = cached[i]
            assert x.tolist() == [2.0 * (6 * i + k) for k in range(6)]
            x.fill_(-1)


def test_state_of_a_run_in_the_middle_of_an_epoch(tmp_path):
    import flatout
    from tests.jobs import NO_TECHNIQUES

    def optimized():
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 12))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return flatout.optimize(
            model,
            DataLoader(Memory(size=12), 2, shuffle=True),
            optimizer,
            torch.nn.functional.cross_entropy,
            techniques=NO_TECHNIQUES | {"prefix_cache": True},
            budget=0,
            expected_steps=10**4,
        )

    def rest(loader):
        return [facts(batch) for _ in range(3) for batch in loader], generators()

    first = optimized()
    seed(1)
    iterator = iter(first.loader)
    for _ in range(2):
        next(iterator)
    state, rng = (
        copy.deepcopy(first.loader.state_dict()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    )
    expected = [facts(batch) for batch in iterator], rest(first.loader)
    second = optimized()
    second.loader.load_state_dict(state)
    torch.set_rng_state(rng[0])
    random.setstate(rng[1])
    np.random.set_state(rng[2])
    iterator = iter(second.loader)
    assert ([facts(batch) for batch in iterator], rest(second.loader)) == expected
    first.undo()
    second.undo()
