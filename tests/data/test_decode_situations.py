"""Uses of an image folder that native decoding may get wrong: each one gives the plain dataset's samples and errors."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import random
import shutil
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from flatout.data import NotCacheable, PrefixCache
from tests.process_state import put_back

torchvision = pytest.importorskip("torchvision")
pytest.importorskip("simplejpeg")
# ruff: noqa: E402
import PIL.Image
from PIL import Image, ImageFile
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets import folder as torchvision_folder
from torchvision.transforms import InterpolationMode, functional

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE = 12
OWN_WARNING = "samples are not cached any more"
LAST_BATCH = 40
"""Largest number of batches of an epoch."""


# images


def jpeg(
    seed: int = 0, size: tuple[int, int] = (40, 30), mode: str = "RGB", form: str = "JPEG", **settings: Any
) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form, **settings)
    return file.getvalue()


def with_segment(marker: int, content: bytes, image: bytes | None = None) -> bytes:
    """Return a JPEG file with one more segment after its first two bytes."""
    image = jpeg() if image is None else image
    return image[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content + image[2:]


def orientation() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


GOOD = {f"{name}/{i}.jpg": jpeg(i, (20 + 9 * i, 45 - 5 * i), quality=60 + i) for i in range(6) for name in "ab"}
SIXTEEN_BITS = io.BytesIO()
Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50).save(SIXTEEN_BITS, "PNG")
ODD = {
    "CMYK": jpeg(mode="CMYK"),
    "grey": jpeg(mode="L"),
    "palette": jpeg(mode="P", form="PNG"),
    "palette with a transparent color": jpeg(mode="P", form="PNG", transparency=3),
    "palette with transparent bytes": jpeg(mode="P", form="PNG", transparency=bytes(range(200))),
    "alpha": jpeg(mode="RGBA", form="PNG"),
    "grey and alpha": jpeg(mode="LA", form="PNG"),
    "16 bits": SIXTEEN_BITS.getvalue(),
    "animated": jpeg(mode="P", form="GIF", save_all=True, append_images=[Image.new("P", (40, 30))]),
    "WebP": jpeg(form="WEBP"),
    "bitmap": jpeg(form="BMP"),
    "orientation": jpeg(exif=orientation()),
    "color profile": jpeg(icc_profile=b"profile" * 30),
    "progressive": jpeg(progressive=True),
    "truncated": jpeg()[:900],
    "truncated in the header": jpeg()[:300],
    "without its end": jpeg()[:-2],
    "empty": b"",
    "text": b"no image",
    "trailing bytes": jpeg() + b"trailing",
    "damaged": jpeg()[:800] + b"\xff\x00\xff\xd9" + jpeg()[804:],
    "wrong Exif": with_segment(0xE1, b"Exif\0\0" + bytes(range(40))),
    "wrong byte order in Exif": with_segment(
        0xE1, b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x09" + b"\x01\x1a\0\x05\0\0\0\x01\xff\xff\xff\xff"
    ),
    "wrong multi-picture index": with_segment(0xE2, b"MPF\0" + bytes(range(40))),
    "short color profile": with_segment(0xE2, b"ICC_PROFILE\0"),
    "short Photoshop block": with_segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04\x05"),
    "short Adobe marker": with_segment(0xEE, b"Adobe"),
    "Adobe marker of RGB": with_segment(0xEE, b"Adobe\0\x64\0\0\0\0\0"),
    "two JFIF markers": with_segment(0xE0, b"JFIF\0\x01\x01\x01\0\x48\0\x48\0\0"),
    "short JFIF marker": with_segment(0xE0, b"JFIF\0"),
    "filling bytes": jpeg()[:2] + b"\xff\xff\xff" + jpeg()[2:],
    "extraneous bytes": jpeg()[:2] + b"\x00\x01" + jpeg()[2:],
    "12 bits in the header": jpeg().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "arithmetic coding in the header": jpeg().replace(b"\xff\xc0\0\x11", b"\xff\xc9\0\x11"),
    "no height": jpeg().replace(b"\xff\xc0\0\x11\x08\0\x1e", b"\xff\xc0\0\x11\x08\0\0"),
    "taller in the header": jpeg().replace(b"\xff\xc0\0\x11\x08\0\x1e", b"\xff\xc0\0\x11\x08\0\x5e"),
    "one pixel": jpeg(size=(1, 1)),
    "one row": jpeg(size=(700, 1)),
    "one column": jpeg(size=(1, 700)),
    "wide": jpeg(size=(1500, 2)),
    "tall": jpeg(size=(3, 1500)),
}


# what is compared


def facts(value: Any) -> Any:
    """Return the properties of a value that a user can see, to be compared."""
    if isinstance(value, torch.Tensor):
        flags = {name: getattr(value, name)() for name in ("is_inference", "is_shared", "is_contiguous", "is_pinned")}
        flags |= {name: getattr(value, name) for name in ("requires_grad", "is_leaf", "device", "layout")}
        if value.is_meta:
            return type(value), value.dtype, tuple(value.shape), value.stride(), flags
        content = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return type(value), value.dtype, tuple(value.shape), value.stride(), flags, content
    if isinstance(value, Image.Image):
        return type(value), value.mode, value.size, value.tobytes(), sorted(map(str, value.info)), value.format
    if isinstance(value, (list, tuple)):
        return type(value), [facts(each) for each in value]
    return type(value), repr(value)


def memory_of(image: torch.Tensor) -> dict[str, Any]:
    """Return facts of a sample's memory, which other samples of a batch should not share."""
    storage = image.untyped_storage()
    return {
        "bytes of storage": storage.nbytes(),
        "offset": image.storage_offset(),
        "view": image._is_view(),
    }


def states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
    }


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of a call or its error, its warnings, and the states of the generators."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result = facts(call())
        except Exception as error:
            lines = str(error).splitlines()
            result = type(error), lines[-1:] if "Original Traceback" in str(error) else lines
    heard = {(each.category, str(each.message)) for each in seen if not str(each.message).startswith(OWN_WARNING)}
    return {"result": result, "warnings": sorted(heard, key=str), "states": states()}


def epoch(dataset: Any, **options: Any) -> list[Any]:
    """Return the record of each batch of an epoch. An epoch continues after an error."""
    options = {"batch_size": 4, "shuffle": "batch_sampler" not in options, "collate_fn": list} | options
    if "batch_sampler" in options:
        del options["batch_size"], options["shuffle"]
    return batches(DataLoader(dataset, **options))


def batches(loader: DataLoader) -> list[Any]:
    iterators: list[Any] = []
    records: list[Any] = []

    def following() -> Any:
        if not iterators:
            iterators.append(iter(loader))
        return next(iterators[0])

    for _ in range(LAST_BATCH):
        records.append(attempt(following))
        if records[-1]["result"][0] is StopIteration:
            break
    return records


def differences(plain: Any, cached: Any, place: str = "") -> Iterator[str]:
    """Yield the places at which two records differ."""
    if isinstance(plain, dict) and isinstance(cached, dict) and plain.keys() == cached.keys():
        for key in plain:
            yield from differences(plain[key], cached[key], f"{place} {key}")
    elif isinstance(plain, (list, tuple)) and type(plain) is type(cached) and len(plain) == len(cached):
        for i, (left, right) in enumerate(zip(plain, cached, strict=True)):
            yield from differences(left, right, f"{place} {i}")
    elif plain != cached:
        yield f"{place}: {repr(plain)[:200]} became {repr(cached)[:200]}"


@dataclass
class Use:
    """One run of a situation: with the plain dataset, or with the cache of ``photos`` in its place."""

    dataset: Any
    photos: Any
    folder: Path
    patch: pytest.MonkeyPatch

    @property
    def chain(self) -> list[Any]:
        return self.photos.transform.transforms

    def file(self, i: int = 0) -> Path:
        return Path(self.photos.samples[i][0])


def floats() -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(list(MEAN), list(STD))]


def usual() -> list[Any]:
    return [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), *floats()]


def fixed() -> list[Any]:
    return [transforms.Resize(SIZE + 3), transforms.CenterCrop(SIZE), *floats()]


@dataclass
class Situation:
    """Code that uses a dataset, and the dataset."""

    use: Callable[[Use], Any]
    chain: Callable[[], list[Any]] = usual
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda photos: photos
    files: dict[str, bytes] = field(default_factory=dict)


def record_of(situation: Situation, folder: Path, wrap: Callable[[Any], Any]) -> Any:
    place = folder / "images"
    shutil.rmtree(place, ignore_errors=True)
    for name, content in (GOOD | situation.files).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    with put_back(), pytest.MonkeyPatch.context() as patch:
        photos = ImageFolder(str(place), transforms.Compose(situation.chain()), **situation.options)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        use = Use(wrap(situation.wrap(photos)), photos, place, patch)
        return situation.use(use)


def without_warnings(record: Any) -> Any:
    """Return a record without warnings, which Pillow gives when it reads a file."""
    if isinstance(record, dict):
        return {key: without_warnings(value) for key, value in record.items() if key != "warnings"}
    return type(record)(map(without_warnings, record)) if type(record) in (list, tuple) else record


def compare(situation: Situation, folder: Path, budget: int, may_refuse: bool = False) -> None:
    plain = record_of(situation, folder, lambda dataset: dataset)
    try:
        cached = record_of(situation, folder, functools.partial(PrefixCache, byte_budget=budget))
    except NotCacheable:
        if may_refuse:
            return
        raise
    if budget:  # a sample from memory reads no file
        plain, cached = without_warnings(plain), without_warnings(cached)
    assert list(islice(differences(plain, cached), 6)) == []


with_and_without_memory = pytest.mark.parametrize("budget", [0, 1 << 24])


# transforms


class Larger(transforms.RandomResizedCrop):
    def forward(self, image: Any) -> Any:
        return super().forward(image).resize((20, 20))


def two_epochs(use: Use) -> list[Any]:
    return [epoch(use.dataset), epoch(use.dataset), [attempt(lambda i=i: use.dataset[i]) for i in range(-2, 3)]]


T = transforms
CHAINS: dict[str, Callable[[], list[Any]]] = {
    "usual": usual,
    "fixed": fixed,
    "bytes": lambda: [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.PILToTensor()],
    "bytes of a fixed crop": lambda: [T.Resize(SIZE), T.CenterCrop(SIZE), T.PILToTensor()],
    "floats without constants": lambda: [T.Resize(SIZE), T.RandomCrop(SIZE), T.ToTensor()],
    "an image": lambda: [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip()],
    "a flip before the crop": lambda: [T.RandomHorizontalFlip(), T.RandomResizedCrop(SIZE), *floats()],
    "a flip between crops": lambda: [
        T.Resize(20),
        T.RandomCrop(16),
        T.RandomHorizontalFlip(),
        T.CenterCrop(SIZE),
        *floats(),
    ],
    "two flips": lambda: [T.RandomHorizontalFlip(), T.RandomHorizontalFlip(0.3), T.RandomResizedCrop(SIZE), *floats()],
    "a flip always": lambda: [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(1), *floats()],
    "a flip never": lambda: [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(0), *floats()],
    "a flip of a tensor": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.RandomHorizontalFlip()],
    "a crop of a tensor": lambda: [T.Resize(SIZE), T.ToTensor(), T.RandomCrop(SIZE), T.Normalize(list(MEAN), STD)],
    "a crop beyond the image": lambda: [T.RandomCrop(200), *floats()],
    "a padded crop": lambda: [T.RandomCrop(42, pad_if_needed=True), *floats()],
    "a crop with padding": lambda: [T.Resize(SIZE), T.RandomCrop(SIZE, padding=3, padding_mode="reflect"), *floats()],
    "a large crop of the center": lambda: [T.CenterCrop((50, 33)), T.RandomHorizontalFlip(), *floats()],
    "one pixel": lambda: [T.RandomResizedCrop(1), *floats()],
    "one row": lambda: [T.RandomResizedCrop((1, 33)), *floats()],
    "enlarged": lambda: [T.Resize(90), T.RandomCrop(80), *floats()],
    "the longer side": lambda: [T.Resize(SIZE, max_size=SIZE + 2), T.RandomHorizontalFlip(), *floats()],
    "two sides": lambda: [T.Resize((SIZE, 19)), T.RandomHorizontalFlip(), *floats()],
    "sides in a list of NumPy": lambda: [T.RandomResizedCrop([np.int64(SIZE), np.int64(9)]), *floats()],
    "narrow parts": lambda: [T.RandomResizedCrop(SIZE, scale=(0.001, 0.01), ratio=(0.01, 100.0)), *floats()],
    "parts larger than the image": lambda: [T.RandomResizedCrop(SIZE, scale=(2.0, 3.0), ratio=(0.2, 0.3)), *floats()],
    "limits in the wrong order": lambda: [T.RandomResizedCrop(SIZE, scale=(0.9, 0.1)), *floats()],
    "resized twice": lambda: [T.Resize(20), T.RandomResizedCrop(SIZE), *floats()],
    "resized after the crop": lambda: [T.RandomCrop(15), T.Resize(SIZE), *floats()],
    "two random parts": lambda: [T.RandomResizedCrop(20), T.RandomResizedCrop(SIZE), *floats()],
    "nested": lambda: [T.Compose([T.RandomResizedCrop(SIZE), T.Compose([T.RandomHorizontalFlip()])]), *floats()],
    "a module of modules": lambda: [
        torch.nn.Sequential(T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip()),
        *floats(),
    ],
    "a subclass": lambda: [Larger(SIZE), T.RandomHorizontalFlip(), *floats()],
    "in place": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize(list(MEAN), STD, inplace=True)],
    "one constant for three channels": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize([0.5], [0.25])],
    "two constants for three channels": lambda: [
        T.RandomResizedCrop(SIZE),
        T.ToTensor(),
        T.Normalize([0.5] * 2, [0.2] * 2),
    ],
    "a number as constant": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize(0.5, 0.25)],
    "constants of four channels": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize([0.5] * 4, [0.2] * 4)],
    "constants in tensors": lambda: [
        T.RandomResizedCrop(SIZE),
        T.ToTensor(),
        T.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    ],
    "constants of double precision": lambda: [
        T.RandomResizedCrop(SIZE),
        T.ToTensor(),
        T.Normalize(np.array(MEAN), np.array(STD)),
    ],
    "whole numbers as constants": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize([0, 1, 2], [1, 2, 3])],
    "a deviation of zero": lambda: [T.RandomResizedCrop(SIZE), T.ToTensor(), T.Normalize(list(MEAN), [0.1, 0.0, 0.1])],
    "a deviation of nearly zero": lambda: [
        T.RandomResizedCrop(SIZE),
        T.ToTensor(),
        T.Normalize(list(MEAN), [0.1, 1e-60, 0.1]),
    ],
    "infinite and undefined constants": lambda: [
        T.RandomResizedCrop(SIZE),
        T.ToTensor(),
        T.Normalize([float("nan"), float("inf"), 0.1], [1.0, 1e-40, float("inf")]),
    ],
    "normalized twice": lambda: [*usual(), T.Normalize(list(MEAN), STD)],
    "bytes cannot be normalized": lambda: [T.RandomResizedCrop(SIZE), T.PILToTensor(), T.Normalize(list(MEAN), STD)],
    "bytes as floats": lambda: [
        T.RandomResizedCrop(SIZE),
        T.PILToTensor(),
        T.ConvertImageDtype(torch.float32),
        T.Normalize(list(MEAN), STD),
    ],
    "erased parts": lambda: [*usual(), T.RandomErasing(0.7, value="random")],
    "sometimes more": lambda: [*usual(), T.RandomApply([T.GaussianBlur(3)], 0.5)],
    "a random order": lambda: [*usual(), T.RandomOrder([T.RandomErasing(0.7), T.RandomHorizontalFlip()])],
    "a choice": lambda: [T.RandomChoice([T.CenterCrop(SIZE), T.RandomCrop(SIZE)]), *floats()],
    "colors before": lambda: [T.ColorJitter(0.3, 0.3, 0.3, 0.1), *usual()],
    "colors between": lambda: [T.RandomResizedCrop(SIZE), T.ColorJitter(0.3), T.RandomHorizontalFlip(), *floats()],
    "grey": lambda: [T.RandomResizedCrop(SIZE), T.RandomGrayscale(0.5), *floats()],
    "upside down": lambda: [T.RandomResizedCrop(SIZE), T.RandomVerticalFlip(), *floats()],
    "a random number of Python after Normalize": lambda: [*usual(), T.Lambda(lambda x: x + random.random())],
    "a random number of NumPy before the crop": lambda: [T.Lambda(lambda x: x.rotate(np.random.randint(90))), *usual()],
    "a view": lambda: [*usual(), T.Lambda(lambda x: x[:, ::2, 1:])],
    "five crops": lambda: [
        T.Resize(20),
        T.FiveCrop(SIZE),
        T.Lambda(lambda crops: torch.stack([T.ToTensor()(c) for c in crops])),
    ],
    "nothing": list,
    **{
        f"by {mode.value}": lambda mode=mode: [
            T.RandomResizedCrop(SIZE, interpolation=mode),
            T.Resize(9, mode),
            *floats(),
        ]
        for mode in InterpolationMode
    },
    **{
        f"one step by {mode.value}": lambda mode=mode: [T.RandomResizedCrop(SIZE, interpolation=mode), *floats()]
        for mode in InterpolationMode
    },
    "without antialiasing": lambda: [T.RandomResizedCrop(SIZE, antialias=False), *floats()],
    "a number for the mode": lambda: [T.RandomResizedCrop(SIZE, interpolation=3), *floats()],
}


@with_and_without_memory
@pytest.mark.parametrize("name", CHAINS)
def test_transforms(name, tmp_path, budget):
    compare(Situation(two_epochs, CHAINS[name]), tmp_path, budget, may_refuse=name not in ("usual", "fixed", "bytes"))


# files


def changed_to(content: bytes) -> Callable[[Use], Any]:
    """Return a use in which the content of a file changes after the first epoch, and back after the second."""

    def use(use: Use) -> list[Any]:
        before, seen = use.file(3).read_bytes(), [epoch(use.dataset)]
        use.file(3).write_bytes(content)
        seen += [epoch(use.dataset), attempt(lambda: use.dataset[3]), attempt(lambda: use.dataset[2])]
        use.file(3).write_bytes(before)
        return [*seen, epoch(use.dataset)]

    return use


FILE_CHAINS = {"random": usual, "a crop only": lambda: [T.RandomCrop(5), T.PILToTensor()]}


@with_and_without_memory
@pytest.mark.parametrize("chain", FILE_CHAINS)
@pytest.mark.parametrize("name", ODD)
def test_a_file_becomes_another(name, chain, tmp_path, budget):
    compare(Situation(changed_to(ODD[name]), FILE_CHAINS[chain]), tmp_path, budget, may_refuse=chain != "random")


@with_and_without_memory
@pytest.mark.parametrize("name", [name for name in ODD if "truncated" not in name and name not in ("empty", "text")])
def test_a_folder_with_an_odd_file(name, tmp_path, budget):
    compare(
        Situation(two_epochs, files={"a/0.jpg": ODD[name], "b/3.png": ODD[name]}), tmp_path, budget, may_refuse=True
    )


NAMES = [
    "with space.jpg",
    "%d.jpg",
    "ünïcode 猫.JPG",
    "new\nline.jpeg",
    "tab\t'quotes\".jpg",
    "-.jpg",
    "a.png.jpg",
    "x" * 240 + ".jpg",
]


def test_unusual_names(tmp_path):
    files = {f"a/{name}": jpeg(i) for i, name in enumerate(NAMES)}
    compare(Situation(two_epochs, files=files), tmp_path, 0)


def test_a_resized_image_that_is_very_wide(tmp_path):
    """The image between ``Resize`` and ``RandomCrop`` is more than a million pixels wide."""
    chain = lambda: [T.Resize(20), T.RandomCrop(16), *floats()]  # noqa: E731
    compare(Situation(changed_to(jpeg(size=(60_000, 1))), chain), tmp_path, 0)


@with_and_without_memory
def test_a_limit_of_pillow_returns(tmp_path, budget):
    """A truncated file is read while Pillow allows truncated files, and again when Pillow does not allow them."""

    def use(use: Use) -> list[Any]:
        use.file(3).write_bytes(use.file(3).read_bytes()[:-200])
        use.patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        seen = [epoch(use.dataset)]
        use.patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
        return [*seen, attempt(lambda: use.dataset[3]), epoch(use.dataset)]

    compare(Situation(use), tmp_path, budget)


@with_and_without_memory
def test_a_name_that_is_no_unicode(tmp_path, budget):
    compare(Situation(two_epochs, files={"a/" + os.fsdecode(b"\xff\xfe.jpg"): jpeg()}), tmp_path, budget)


def replaced(path: Path, content: bytes) -> None:
    """Replace a file by another of the same time. The kernel's time of the change differs."""
    before = path.stat()
    path.unlink()
    path.write_bytes(content)
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def links_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def becomes_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES = {
    "deleted": Path.unlink,
    "a folder": becomes_a_folder,
    "a loop of links": links_to_itself,
    "its folder moved": lambda path: path.parent.rename(path.parent.with_name("moved")),
    "another image of the same time": lambda path: replaced(path, jpeg(77, (31, 29))),
    "the same bytes plus a tail": lambda path: path.write_bytes(path.read_bytes() + bytes(9)),
    "unreadable": lambda path: path.chmod(0),
}


@with_and_without_memory
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_file_changes_in_the_folder(name, workers, tmp_path, budget):
    def use(use: Use) -> list[Any]:
        seen = [epoch(use.dataset, num_workers=workers)]
        CHANGES[name](use.file(1))
        return [*seen, epoch(use.dataset, num_workers=workers), attempt(lambda: use.dataset[1]), epoch(use.dataset)]

    compare(Situation(use), tmp_path, budget)


@with_and_without_memory
def test_a_relative_folder_and_another_working_directory(tmp_path, budget, monkeypatch):
    def use(use: Use) -> list[Any]:
        seen = [epoch(use.dataset)]
        use.patch.chdir("/")
        seen.append(epoch(use.dataset))
        use.patch.chdir(tmp_path)
        return [*seen, epoch(use.dataset)]

    monkeypatch.chdir(tmp_path)
    compare(Situation(use), Path(), budget)


# settings of the process and of the dataset, changed between epochs


def grey_loader(path: str) -> Any:
    return Image.open(path).convert("L").convert("RGB")


def reversed_hook(module: Any, inputs: Any, output: Any) -> Any:
    return output.transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def always_flipped(self: Any, image: Any) -> Any:
    return functional.hflip(image)


def set_attributes(target: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def change_first_samples(use: Use) -> None:
    use.photos.samples[0], use.photos.samples[1] = use.photos.samples[5], (use.photos.samples[1][0], 17)


SETTINGS: dict[str, Callable[[Use], Any]] = {
    "size": lambda use: set_attributes(use.chain[0], size=(7, 9)),
    "size by a number": lambda use: set_attributes(use.chain[0], size=7),
    "wrong size": lambda use: set_attributes(use.chain[0], size=(0, 4)),
    "size of no number": lambda use: set_attributes(use.chain[0], size=None),
    "scale": lambda use: set_attributes(use.chain[0], scale=(0.5, 0.6)),
    "ratio": lambda use: set_attributes(use.chain[0], ratio=(3.0, 4.0)),
    "interpolation": lambda use: set_attributes(use.chain[0], interpolation=InterpolationMode.BICUBIC),
    "always flipped": lambda use: set_attributes(use.chain[1], p=1.0),
    "flipped by a tensor": lambda use: set_attributes(use.chain[1], p=torch.tensor(0.4)),
    "mean": lambda use: set_attributes(use.chain[3], mean=[0.1, 0.2, 0.3]),
    "an entry of the mean": lambda use: use.chain[3].mean.__setitem__(1, 0.9),
    "deviation of zero": lambda use: set_attributes(use.chain[3], std=[0.1, 0.0, 0.1]),
    "in place": lambda use: set_attributes(use.chain[3], inplace=True),
    "a transform less": lambda use: use.chain.pop(1),
    "a transform more": lambda use: use.chain.append(T.RandomErasing(0.9)),
    "another first transform": lambda use: use.chain.__setitem__(0, T.RandomCrop(SIZE)),
    "reversed transforms": lambda use: use.chain.reverse(),
    "another chain": lambda use: set_attributes(use.photos, transform=T.Compose(fixed())),
    "no transform": lambda use: set_attributes(use.photos, transform=None),
    "another chain by the cache": lambda use: set_attributes(use.dataset, transform=T.Compose(fixed())),
    "a random target": lambda use: set_attributes(use.photos, target_transform=lambda y: y + torch.rand(()).item()),
    "a hook": lambda use: use.chain[1].register_forward_hook(reversed_hook),
    "a hook before": lambda use: use.chain[0].register_forward_pre_hook(lambda module, inputs: (inputs[0].rotate(90),)),
    "a global hook": lambda use: torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output if isinstance(output, torch.Tensor) else output.rotate(90)
    ),
    "a method of an object": lambda use: set_attributes(use.chain[1], forward=functional.vflip),
    "a method of a class": lambda use: use.patch.setattr(T.RandomHorizontalFlip, "forward", always_flipped),
    "call of a class": lambda use: use.patch.setattr(
        T.ToTensor, "__call__", lambda self, image: functional.to_tensor(image) * 2
    ),
    "parameters of a class": lambda use: use.patch.setattr(
        T.RandomResizedCrop, "get_params", staticmethod(lambda image, scale, ratio: (1, 2, 9, 8))
    ),
    "a function of torchvision": lambda use: use.patch.setattr(functional, "hflip", functional.vflip),
    "loader": lambda use: set_attributes(use.photos, loader=grey_loader),
    "a method of Pillow's loader": lambda use: use.patch.setattr(torchvision_folder, "pil_loader", grey_loader),
    "samples": lambda use: set_attributes(use.photos, samples=use.photos.samples[::-1]),
    "entries of samples": change_first_samples,
    "fewer samples": lambda use: use.photos.samples.__delitem__(slice(4, None)),
    "more samples": lambda use: use.photos.samples.extend(use.photos.samples[:3]),
    "another root": lambda use: set_attributes(use.photos, root="/nowhere"),
    "a method of the dataset": lambda use: use.patch.setattr(
        ImageFolder, "__getitem__", lambda self, i: self.samples[i][1]
    ),
    "an unknown backend": lambda use: use.patch.setattr(torchvision, "_image_backend", "accimage"),
    "truncated images": lambda use: use.patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "a limit with a warning": lambda use: use.patch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1300),
    "a limit with an error": lambda use: use.patch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 500),
    "no limit": lambda use: use.patch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None),
    "double precision": lambda use: torch.set_default_dtype(torch.float64),
    "half precision": lambda use: torch.set_default_dtype(torch.float16),
    "brain floats": lambda use: torch.set_default_dtype(torch.bfloat16),
    "one thread": lambda use: torch.set_num_threads(1),
    "three threads": lambda use: torch.set_num_threads(3),
    "deterministic algorithms": lambda use: torch.use_deterministic_algorithms(True),
    "no gradients": lambda use: torch.set_grad_enabled(False),
    "a smaller block of Pillow": lambda use: use.patch.setattr(ImageFile, "MAXBLOCK", 64),
    "draft mode of Pillow": lambda use: use.patch.setattr(
        PIL.Image, "open", lambda path, open=PIL.Image.open: open(path).transpose(Image.Transpose.ROTATE_90)
    ),
    "another resize of Pillow": lambda use: use.patch.setattr(
        PIL.Image.Image, "resize", lambda self, size, *rest, **more: self.crop((0, 0, *size))
    ),
    "another generator's draws": lambda use: torch.manual_seed(99),
}


@with_and_without_memory
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_changes_after_an_epoch(name, tmp_path, budget):
    def use(use: Use) -> list[Any]:
        seen = [epoch(use.dataset)]
        handle = SETTINGS[name](use)
        try:
            seen += [epoch(use.dataset), len(use.dataset), [attempt(lambda i=i: use.dataset[i]) for i in range(3)]]
        finally:
            if hasattr(handle, "remove"):
                handle.remove()
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        return [*seen, epoch(use.dataset)]

    compare(Situation(use), tmp_path, budget)


@with_and_without_memory
@pytest.mark.parametrize("name", ["truncated images", "a limit with a warning", "a limit with an error"])
def test_a_setting_of_pillow_with_truncated_files_and_workers(name, tmp_path, budget):
    def use(use: Use) -> list[Any]:
        seen = [epoch(use.dataset, num_workers=2)]
        use.file(1).write_bytes(use.file(1).read_bytes()[:-200])
        SETTINGS[name](use)
        return [*seen, epoch(use.dataset, num_workers=2), epoch(use.dataset)]

    compare(Situation(use), tmp_path, budget)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "automatic precision": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("cpu"),
    "a default device without memory": lambda: torch.device("meta"),
    "warnings as errors": warnings.catch_warnings,
}


@with_and_without_memory
@pytest.mark.parametrize("chain", ["usual", "fixed", "bytes", "an image"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context(name, chain, tmp_path, budget):
    def use(use: Use) -> list[Any]:
        seen = [epoch(use.dataset)]
        with CONTEXTS[name]():
            seen += [epoch(use.dataset), attempt(lambda: use.dataset[1])]
        return [*seen, epoch(use.dataset)]

    compare(Situation(use, CHAINS[chain]), tmp_path, budget, may_refuse=chain != "usual")


# indices and batches


INDICES = [
    np.int64(1),
    np.uint8(2),
    torch.tensor(1),
    torch.tensor([1]),
    True,
    -1,
    -12,
    -13,
    12,
    1.0,
    None,
    "0",
    slice(0, 2),
    [1, 2],
    (1,),
]


def each_index(use: Use) -> list[Any]:
    return [[attempt(lambda i=i: use.dataset[i]) for i in INDICES] for _ in range(2)]


def once(values: list[Any]) -> Iterator[Any]:
    yield from values


BATCHES: dict[str, Callable[[], list[Any]]] = {
    "repeated": lambda: [[1, 1, 1], [0, 2, 0]],
    "negative": lambda: [[-1, 3], [3, -12]],
    "beyond the end": lambda: [[0, 1, 12, 2], [3]],
    "beyond the start": lambda: [[0, -13], [3]],
    "empty": lambda: [[], [1]],
    "a tuple": lambda: [(1, 2), (3,)],
    "a tensor": lambda: [torch.tensor([1, 2]), torch.tensor([3])],
    "an array": lambda: [np.array([1, 2]), np.array([3])],
    "a range": lambda: [range(3), range(5, 2, -1)],
    "a generator": lambda: [once([1, 2]), once([3])],
    "a set": lambda: [{1, 2, 3}],
    "floats": lambda: [[1, 2.0], [3]],
    "slices": lambda: [[1, slice(2)], [3]],
    "other objects": lambda: [[1, None], [3], ["1"], None, 5],
    "kinds of numbers": lambda: [[np.int64(1), torch.tensor(2), True, np.int8(-1)]],
    "large": lambda: [list(range(12)) * 5],
    "of one": lambda: [[i] for i in range(12)],
}


@with_and_without_memory
@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_indices(name, tmp_path, budget):
    def use(use: Use) -> list[Any]:
        return [epoch(use.dataset, batch_sampler=BATCHES[name]()) for _ in range(2)]

    compare(Situation(use), tmp_path, budget)


@with_and_without_memory
def test_indices(tmp_path, budget):
    compare(Situation(each_index), tmp_path, budget)


def retried(use: Use) -> list[Any]:
    seen = [epoch(use.dataset, shuffle=False)]
    for i in (1, 6):
        use.file(i).rename(use.file(i).with_suffix(".away"))
    use.file(3).write_bytes(b"no image")
    seen += [epoch(use.dataset, shuffle=False), epoch(use.dataset, shuffle=False)]
    for i in (1, 6):
        use.file(i).with_suffix(".away").rename(use.file(i))
    return [*seen, epoch(use.dataset, shuffle=False)]


def interrupted(use: Use) -> list[Any]:
    """A target transform raises in the middle of a batch, also errors that are no ``Exception``."""
    seen = []
    for error in (ValueError("wrong"), StopIteration("end"), IndexError("index"), KeyError("key"), RuntimeError()):
        use.photos.target_transform = functools.partial(raise_at, error)
        seen.append(epoch(use.dataset, shuffle=False))
    use.photos.target_transform = None
    return [*seen, epoch(use.dataset)]


def raise_at(error: Exception, label: int) -> int:
    if label == 1 and torch.rand(()) < 0.5:
        raise error
    return label


# samples that the user keeps and changes


def kept(use: Use) -> list[Any]:
    """Samples are kept over epochs and described at the end."""
    memory: list[Any] = []

    def collate(samples: list[Any]) -> int:
        memory.extend(samples)
        return len(samples)

    for _ in range(3):
        epoch(use.dataset, collate_fn=collate)
    memory.extend(use.dataset[i] for i in range(3))
    images = [image for image, _ in memory]
    addresses = {image.untyped_storage().data_ptr() for image in images}
    return [facts(memory), len(addresses)]


def changed_by_the_user(use: Use) -> list[Any]:
    def collate(samples: list[Any]) -> list[Any]:
        samples[0][0].zero_()
        samples[1][0].mul_(2).requires_grad_()
        return samples

    return [epoch(use.dataset, collate_fn=collate, batch_sampler=[[1, 1, 2], [0, 2, 2]]) for _ in range(3)]


def resized_by_the_user(use: Use) -> list[Any]:
    def collate(samples: list[Any]) -> list[Any]:
        samples[0][0].resize_(3, 40, 40).fill_(1)
        samples[2][0].share_memory_()
        return samples

    return [epoch(use.dataset, collate_fn=collate, shuffle=False) for _ in range(2)]


def saved(use: Use) -> list[Any]:
    """A sample is written to a file: its size shows the size of the sample's memory."""
    sizes = []
    for sample in DataLoader(use.dataset, batch_size=4, collate_fn=list):
        file = io.BytesIO()
        torch.save(sample[0][0].clone() if sample[0][0].is_meta else sample[0][0], file)
        sizes += [len(file.getvalue()), len(pickle.dumps(sample[0]))]
    return sizes


def memory(use: Use) -> list[Any]:
    facts_of: list[Any] = []

    def collate(samples: list[Any]) -> int:
        facts_of.extend(memory_of(image) for image, _ in samples)
        return 0

    epoch(use.dataset, collate_fn=collate)
    return [facts_of, memory_of(use.dataset[0][0])]


def gradients(use: Use) -> list[Any]:
    """One sample is part of a graph while another one changes."""

    def collate(samples: list[Any]) -> list[Any]:
        image, weight = samples[0][0], torch.ones((), requires_grad=True)
        loss = (weight * image).sum()
        samples[1][0].mul_(0)
        loss.backward()
        return [weight.grad, *samples]

    return epoch(use.dataset, collate_fn=collate)


def containers(use: Use) -> list[Any]:
    """A batch is a new list of new tuples in each request."""
    seen: list[Any] = []

    def collate(samples: Any) -> Any:
        seen.append((type(samples), [type(each) for each in samples], len({id(each) for each in samples})))
        samples.append(1)
        return samples

    return [epoch(use.dataset, collate_fn=collate), epoch(use.dataset, collate_fn=collate), seen]


# loaders and copies


def with_seed(worker: int, base: int) -> None:
    torch.manual_seed(base + worker), random.seed(worker), np.random.seed(worker)


def workers_of(context: str, **options: Any) -> Callable[[Use], Any]:
    def use(use: Use) -> list[Any]:
        loader = DataLoader(
            use.dataset, 5, True, num_workers=2, multiprocessing_context=context, collate_fn=list, **options
        )
        return [batches(loader), epoch(use.dataset), batches(loader)]

    return use


def own_generator(use: Use) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(use.dataset, 5, True, generator=generator, drop_last=True, collate_fn=list)
    return [(batches(loader), generator.get_state().tolist()) for _ in range(2)]


def default_collate(use: Use) -> list[Any]:
    return [batches(DataLoader(use.dataset, 5, True, num_workers=workers)) for workers in (0, 2, 0)]


def without_batches(use: Use) -> list[Any]:
    by_lists = BatchSampler(SequentialSampler(use.dataset), 4, False)
    return [batches(DataLoader(use.dataset, batch_size=None, sampler=each)) for each in (None, [3, -1, 40], by_lists)]


def interleaved(use: Use) -> list[Any]:
    """Two epochs run at the same time, and the user draws between."""
    loader, seen = DataLoader(use.dataset, 4, True, collate_fn=list), []
    for left, right in zip(loader, loader, strict=True):
        seen += [facts(left), torch.rand(2).tolist(), facts(right), facts(use.dataset[0]), states()]
    return seen


def in_threads(use: Use) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        return [list(pool.map(lambda i: facts(use.dataset[i % 12]), range(60))) for _ in range(2)]


def batches_in_threads(use: Use) -> list[Any]:
    def one(i: int) -> list[Any]:
        loader = DataLoader(use.dataset, batch_sampler=[[i, 11 - i, i], [3, 4, 5, 6]], collate_fn=list)
        return [facts(batch) for batch in loader]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, list(range(12)) * 2))


def copied(how: Callable[[Any], Any]) -> Callable[[Use], Any]:
    def use(use: Use) -> list[Any]:
        early = how(use.dataset)
        seen = [epoch(use.dataset), epoch(early)]
        late = how(use.dataset)
        if how is not copy.copy:  # a shallow copy of the cache has the same dataset
            use.photos.transform = T.Compose(fixed())
        return [*seen, epoch(late), epoch(use.dataset), epoch(early), epoch(how(late), num_workers=2)]

    return use


def after_a_fork(use: Use) -> list[Any]:
    """Threads of native code run in this process before its workers start."""
    torch.set_num_threads(2)
    return [epoch(use.dataset, num_workers=workers, batch_size=6) for workers in (0, 2, 0, 2)]


def in_a_new_process(use: Use) -> list[Any]:
    """The process of the workers does not know the settings of this process, or changes settings."""
    options = {"num_workers": 1, "worker_init_fn": change_settings}
    return [epoch(use.dataset, **options, multiprocessing_context=each) for each in ("fork", "spawn")]


def change_settings(worker: int) -> None:
    torch.set_default_dtype(torch.float64)
    PIL.Image.MAX_IMAGE_PIXELS = 1300
    ImageFile.LOAD_TRUNCATED_IMAGES = True


def use_two_threads(worker: int) -> None:
    torch.set_num_threads(2)


def threads_in_workers(use: Use) -> list[Any]:
    """Workers ask for two threads, after this process has used two. A worker that never answers is an error."""
    torch.set_num_threads(2)
    loader = DataLoader(use.dataset, 4, num_workers=1, worker_init_fn=use_two_threads, timeout=20)
    return [epoch(use.dataset), attempt(lambda: list(loader))]


def change_transforms(worker: int) -> None:
    chain = get_worker_info().dataset.transform.transforms
    chain[1].p, chain[3].mean = 1.0, [0.1, 0.2, 0.3]


def transforms_in_workers(context: str) -> Callable[[Use], Any]:
    """Return a use whose workers change the transforms of their own copies of the dataset."""
    options = {"num_workers": 1, "worker_init_fn": change_transforms, "multiprocessing_context": context}
    return lambda use: [epoch(use.dataset, **options), epoch(use.dataset)]


def draws_of_another_thread(use: Use) -> list[Any]:
    """Another thread draws while this thread reads the first file."""
    drawn: list[float] = []
    opened = PIL.Image.open

    def open_and_wait(*args: Any, **options: Any) -> Any:
        if not drawn:
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(()).item()))
            thread.start()
            thread.join()
        return opened(*args, **options)

    use.patch.setattr(PIL.Image, "open", open_and_wait)
    return [attempt(lambda: use.dataset[3]), drawn, attempt(lambda: use.dataset[2])]


def inside_others(use: Use) -> list[Any]:
    parts = Subset(use.dataset, [3, 1, 1, 5]), Subset(Subset(use.dataset, [0, 2, 4, 6]), [3, 1])
    joined = ConcatDataset([use.dataset, parts[0], parts[1]])
    return [epoch(each, num_workers=workers) for workers in (0, 2) for each in (*parts, joined)]


class WithIndex(Dataset[Any]):
    """Uses a dataset, and draws before and after it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return torch.rand(()), *self.dataset[i], random.random(), i


def wrapped(use: Use) -> list[Any]:
    return [epoch(WithIndex(use.dataset)) for _ in range(2)]


def warnings_as_errors(use: Use) -> list[Any]:
    seen = [epoch(use.dataset)]
    use.patch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1300)
    for i in (*range(12), *range(12)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                seen.append((facts(use.dataset[i]), states()))
            except Warning as error:
                seen.append((type(error), str(error), states()))
    return seen


def attributes(use: Use) -> list[Any]:
    names = ("root", "classes", "class_to_idx", "samples", "targets", "imgs", "extensions", "transform", "nothing")
    return [attempt(lambda name=name: str(getattr(use.dataset, name))) for name in names] + [len(use.dataset)]


def random_target(label: int) -> float:
    return label + random.random() + torch.rand(()).item() + np.random.random()


def is_even(path: str) -> bool:
    return path.endswith(("0.jpg", "2.jpg", "4.jpg"))


USES: dict[str, Situation] = {
    "a retry after errors in a batch": Situation(retried),
    "errors of the user in a batch": Situation(interrupted),
    "samples kept": Situation(kept),
    "bytes kept": Situation(kept, CHAINS["bytes"]),
    "fixed samples kept": Situation(kept, fixed),
    "samples changed": Situation(changed_by_the_user),
    "fixed samples changed": Situation(changed_by_the_user, fixed),
    "samples resized": Situation(resized_by_the_user),
    "samples saved": Situation(saved),
    "memory of samples": Situation(memory),
    "memory of bytes": Situation(memory, CHAINS["bytes"]),
    "memory of fixed samples": Situation(memory, fixed),
    "a sample in a graph": Situation(gradients),
    "containers": Situation(containers),
    "default collate": Situation(default_collate),
    "own generator": Situation(own_generator),
    "without batches": Situation(without_batches),
    "interleaved": Situation(interleaved),
    "fork": Situation(workers_of("fork")),
    "spawn": Situation(workers_of("spawn", persistent_workers=True)),
    "forkserver": Situation(workers_of("forkserver", worker_init_fn=functools.partial(with_seed, base=7))),
    "seeded workers that persist": Situation(
        workers_of("fork", worker_init_fn=functools.partial(with_seed, base=3), persistent_workers=True, drop_last=True)
    ),
    "workers of other settings": Situation(in_a_new_process),
    "threads in workers": Situation(threads_in_workers),
    "transforms in workers by fork": Situation(transforms_in_workers("fork")),
    "transforms in workers by spawn": Situation(transforms_in_workers("spawn")),
    "draws of another thread": Situation(draws_of_another_thread),
    "threads": Situation(in_threads, fixed),
    "batches in threads": Situation(batches_in_threads, fixed),
    "a copy": Situation(copied(copy.copy)),
    "a deep copy": Situation(copied(copy.deepcopy)),
    "a pickled copy": Situation(copied(lambda dataset: pickle.loads(pickle.dumps(dataset)))),
    "after a fork": Situation(after_a_fork),
    "inside other datasets": Situation(inside_others),
    "wrapped": Situation(wrapped),
    "warnings as errors": Situation(warnings_as_errors),
    "attributes": Situation(attributes),
    "a random target": Situation(two_epochs, options={"target_transform": random_target}),
    "own choice of files": Situation(two_epochs, options={"is_valid_file": is_even}),
    "empty classes": Situation(two_epochs, options={"allow_empty": True}),
    "a part": Situation(two_epochs, wrap=lambda photos: Subset(photos, [3, 1, 1, 5])),
    "a part of a part": Situation(two_epochs, wrap=lambda photos: Subset(Subset(photos, [3, 1, 1, 5]), [2, 0, 3])),
    "a part by an array": Situation(two_epochs, wrap=lambda photos: Subset(photos, np.array([3, 1, -1, 5]))),
    "a part by a tensor": Situation(two_epochs, wrap=lambda photos: Subset(photos, torch.tensor([3, 1, 1, 5]))),
    "joined": Situation(two_epochs, wrap=lambda photos: ConcatDataset([photos, Subset(photos, [0, 3, 3, 2])])),
    "one file": Situation(two_epochs, wrap=lambda photos: Subset(photos, [3])),
}


@with_and_without_memory
@pytest.mark.parametrize("name", USES)
def test_uses(name, tmp_path, budget):
    compare(USES[name], tmp_path, budget, may_refuse=USES[name].chain is not usual)


def test_a_sample_that_does_not_fit_in_the_memory(tmp_path):
    compare(USES["after a fork"], tmp_path, 9000)
