"""Comparison of loaders of image files: flatout with and without memory, against DataLoaders with three decoders.

    pytest benchmarks/images.py -s --full

The files are JPEGs of quality 90 with detail at all scales. All loaders take turns of whole epochs in one process. The
first turn is the first epoch, in which flatout stores samples. Files are in the page cache, so disks play no part.
Ratios are medians over turns. simplejpeg is required. torchcodec takes part if it is installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scale import scaled
from torch.utils.data import DataLoader

from flatout.data import PrefixCache
from flatout.data.decode import pixels_of

torchvision = pytest.importorskip("torchvision")
pytest.importorskip("simplejpeg")
from PIL import Image  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

TURNS = scaled(5, 2)
BATCH = scaled(64, 8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
FLOATS_OF_TENSORS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
SIZES = {"500x375": ((500, 375), scaled(2000, 40)), "1920x1080": ((1920, 1080), scaled(200, 8))}


def randomly_cropped() -> tuple[list[Any], list[Any]]:
    draws = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    return [*draws, *FLOATS], [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), *FLOATS_OF_TENSORS]


def resized() -> tuple[list[Any], list[Any]]:
    draws = [transforms.Resize(256), transforms.RandomCrop(224), transforms.RandomHorizontalFlip()]
    of_tensors = [v2.Resize(256, antialias=True), v2.RandomCrop(224), v2.RandomHorizontalFlip(), *FLOATS_OF_TENSORS]
    return [*draws, *FLOATS], of_tensors


def rand_augmented() -> tuple[list[Any], None]:
    timm = pytest.importorskip("timm.data")
    return list(timm.create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5").transforms), None


def of_bytes() -> tuple[list[Any], list[Any]]:
    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), *FLOATS_OF_TENSORS]
    return [v2.PILToTensor(), *steps], steps


PIPELINES: dict[str, Callable[[], tuple[list[Any], list[Any] | None]]] = {
    "random crop": randomly_cropped,
    "resize, random crop": resized,
    "rand-augment": rand_augmented,
    "version 2 on bytes": of_bytes,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the files of each size, in two class folders."""
    found, generator = {}, np.random.default_rng(0)
    for name, (size, count) in SIZES.items():
        found[name] = tmp_path_factory.mktemp(name)
        for i in range(count):
            folder = found[name] / str(i % 2)
            folder.mkdir(exist_ok=True)
            coarse = generator.integers(0, 255, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
            pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
            pixels = (pixels + generator.integers(-20, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:04}.jpg", quality=90)
    return found


def read_by_torchvision(path: str) -> torch.Tensor:
    return torchvision.io.decode_image(torchvision.io.read_file(path), torchvision.io.ImageReadMode.RGB)


def read_by_torchcodec(path: str) -> torch.Tensor:
    from torchcodec.decoders import decode_image

    return decode_image(path)


class Epochs:
    """Endless epochs of a loader, one for each call, with the seconds of a sample."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.ms: list[float] = []

    def run(self) -> None:
        begun, samples = time.perf_counter(), 0
        for images, _ in self.loader:
            samples += images.shape[0]
        self.ms.append(1e3 * (time.perf_counter() - begun) / samples)


def contenders(folder: Path, pipeline: str) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield loaders by name. Each kind of dataset has no, one and two workers."""
    steps, of_tensors = PIPELINES[pipeline]()
    plain = ImageFolder(str(folder), transforms.Compose(steps))
    datasets: dict[str, Callable[[], Any]] = {
        "PIL": lambda: plain,
        "flatout": lambda: PrefixCache(plain),
        "nothing stored": lambda: PrefixCache(plain, byte_budget=0),
    }
    if of_tensors is not None:
        composed = v2.Compose(of_tensors)
        datasets["torchvision"] = lambda: ImageFolder(str(folder), composed, loader=read_by_torchvision)
        if importlib.util.find_spec("torchcodec"):
            datasets["torchcodec"] = lambda: ImageFolder(str(folder), composed, loader=read_by_torchcodec)
    for name, make in datasets.items():
        for workers in (0, 1, 2):
            settings = {"num_workers": workers, "persistent_workers": workers > 0}
            yield f"{name}, {workers} workers", DataLoader(make(), BATCH, shuffle=True, **settings)


def best_of(later: dict[str, float], *kinds: str) -> str:
    return min((name for name in later if name.startswith(kinds)), key=later.__getitem__)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("size", SIZES)
def test_epochs(benchmark, folders, size, pipeline):
    """Compare the first and later epochs with those of the best DataLoader."""
    torch.manual_seed(0)
    epochs = {name: Epochs(loader) for name, loader in contenders(folders[size], pipeline)}
    for _ in range(TURNS + 1):
        for each in epochs.values():
            each.run()
    later = {name: statistics.median(each.ms[1:]) for name, each in epochs.items()}
    ours, not_kept = best_of(later, "flatout"), best_of(later, "nothing stored")
    peer, alone = best_of(later, "PIL", "torchvision", "torchcodec"), later["PIL, 0 workers"]
    for name, ms in later.items():
        print(
            f"\n{size:10} {pipeline:20} {name:24} {epochs[name].ms[0]:7.2f} ms in the first epoch, {ms:7.2f} later",
            end="",
        )
    ratios = {
        "first epoch": epochs["PIL, 0 workers"].ms[0] / epochs["flatout, 0 workers"].ms[0],
        "one process": alone / later[ours],
        "best other": later[peer] / later[ours],
        "nothing stored, one process": alone / later[not_kept],
        "nothing stored, best other": later[peer] / later[not_kept],
    }
    shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    print(f"\n{size:10} {pipeline:20} {ours} against {peer}: {shown}", end="")
    benchmark.extra_info.update(
        {name: round(ratio, 3) for name, ratio in ratios.items()} | {"ours": ours, "peer": peer}
    )
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("size", SIZES)
def test_decoders(benchmark, folders, size):
    """Compare the time to decode a file to bytes."""
    paths = [str(path) for path in sorted(folders[size].rglob("*.jpg"))[: scaled(100, 4)]]
    decoders: dict[str, Callable[[str], Any]] = {
        "PIL": lambda path: np.asarray(Image.open(path).convert("RGB")),
        "flatout": pixels_of,
        "torchvision": read_by_torchvision,
    }
    if importlib.util.find_spec("torchcodec"):
        decoders["torchcodec"] = read_by_torchcodec
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for path in [path for _ in range(TURNS) for path in paths]:
        for name, decode in decoders.items():
            begun = time.perf_counter()
            decode(path)
            seconds[name].append(time.perf_counter() - begun)
    ms = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    print("".join(f"\n{size:10} {name:12} {value:6.2f} ms" for name, value in ms.items()), end="")
    benchmark.extra_info.update({f"against {name}": round(value / ms["flatout"], 3) for name, value in ms.items()})
    benchmark.pedantic(lambda: None, rounds=1)
