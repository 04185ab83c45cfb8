"""torchvision pipelines over image files: equal batches through every loader of flatout, and their findings."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.data import NotCacheable, Prefetcher, cache_in_memory
from tests.clock import simulated_time
from tests.data.harness import TICK, examined
from tests.jobs import job_of
from tests.reasons import reasons
from tests.techniques.harness import findings

try:  # a torchvision that was built for another torch raises RuntimeError
    from PIL import Image
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2
except (ImportError, RuntimeError) as error:
    pytest.skip(f"needs a torchvision for torch {torch.__version__}: {error}", allow_module_level=True)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TAIL = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
VERSION_2 = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
PLAIN = [transforms.Resize(224), transforms.CenterCrop(224), *TAIL]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread. A second core slows operations on small images a hundredfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write 24 files of different sizes, kinds and color modes in 3 class folders."""
    generator = np.random.default_rng(0)
    for i in range(24):
        (tmp_path / f"class{i % 3}").mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (40 + 3 * i, 70 - 2 * i, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).convert("L" if i % 5 == 4 else "RGB")
        image.save(tmp_path / f"class{i % 3}" / f"{i:02}.{'png' if i % 2 else 'jpg'}")
    return tmp_path


def loader_of(folder: Path, steps: list, workers: int = 0) -> DataLoader:
    dataset = ImageFolder(str(folder), transforms.Compose(steps))
    return DataLoader(dataset, 5, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(1))


def epochs(loader) -> list[list]:
    """Return a cold epoch, then a warm epoch."""
    return [[(x.clone(), y.clone()) for x, y in loader] for _ in range(2)]


def same(left: list[list], right: list[list]) -> bool:
    assert [len(epoch) for epoch in left] == [len(epoch) for epoch in right] == [5, 5]
    pairs = ((a, b) for old, new in zip(left, right, strict=True) for a, b in zip(old, new, strict=True))
    return all(torch.equal(a, b) for old, new in pairs for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_gives_the_same_batches_cold_and_warm(folder, workers):
    expected = epochs(loader_of(folder, PLAIN, workers))
    assert expected[0][0][0].shape == (5, 3, 224, 224)
    assert same(epochs(Prefetcher(loader_of(folder, PLAIN, workers), "cpu")), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_is_prefetched_as_it_is(folder, workers):
    steps = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), *TAIL]
    torch.manual_seed(4)
    expected = epochs(loader_of(folder, steps, workers))
    torch.manual_seed(4)
    assert same(epochs(Prefetcher(loader_of(folder, steps, workers), "cpu")), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_cache_gives_the_same_batches_until_a_file_is_gone(folder, workers):
    expected = epochs(loader_of(folder, PLAIN))
    cached = cache_in_memory(loader_of(folder, PLAIN, workers))
    assert same(epochs(cached), expected)
    next(folder.glob("*/*")).unlink()
    with pytest.warns(UserWarning, match="has changed"), pytest.raises(FileNotFoundError):
        epochs(cached)


@pytest.mark.parametrize("step", [transforms.RandomCrop(24), transforms.RandomHorizontalFlip()], ids=lambda s: str(s))
def test_random_augmentation_is_not_cached(folder, step):
    with pytest.raises(NotCacheable) as caught:
        cache_in_memory(loader_of(folder, [transforms.Resize((32, 32)), step, *TAIL]))
    assert "random-samples" in reasons(str(caught.value))


def turned(image):
    """Python's random does not show which of the running functions it drew for."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.9 else image


PIPELINES = {
    "a choice of Python before": ([transforms.CenterCrop(32), turned, *TAIL], ["Normalize"]),
    "no random choice": (PLAIN, ["ToTensor", "Normalize"]),
    "random choices before": (
        [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(0.9), transforms.ColorJitter(0.5), *TAIL],
        ["ToTensor", "Normalize"],
    ),
    "sizes differ until late": (
        [transforms.ToTensor(), transforms.Resize((32, 32)), transforms.Normalize(MEAN, STD)],
        ["Resize", "Normalize"],  # of the former, the view that it returns
    ),
    "a random choice between": (
        [transforms.CenterCrop(32), TAIL[0], transforms.RandomVerticalFlip(0.9), TAIL[1]],
        ["Normalize"],
    ),
    "a random choice behind": ([transforms.CenterCrop(32), *TAIL, transforms.RandomErasing()], []),
    "a random choice of the normalisation": (
        [transforms.CenterCrop(32), TAIL[0], transforms.RandomApply([TAIL[1]], p=0.9)],
        [],
    ),
    "random data": ([transforms.Lambda(lambda x: torch.randn(3, 32, 32)), TAIL[1]], ["Normalize"]),
    "no torch work": ([transforms.Resize((32, 32)), transforms.PILToTensor(), transforms.RandomCrop(24)], []),
    "version 2": (
        [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *VERSION_2],
        ["ToImage", "ToDtype", "Normalize"],
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_movable_transforms_are_named_with_their_place(folder, name, workers):
    steps, expected = PIPELINES[name]
    found = {work.what: work for work in examined(loader_of(folder, steps, workers), everything=True)}
    assert sorted(found) == sorted(expected)
    for kind, work in found.items():
        number = next(i for i, step in enumerate(steps) if type(step).__name__ == kind)
        assert (work.file, work.line) == (None, None)
        assert str(work).startswith(f"dataset.transform.transforms[{number}]: {kind} (")
        assert kind != "Resize" or work.operators == ("squeeze",)
        assert work.normalizes == ("ToTensor" in expected or "ToDtype" in expected)
    if "Normalize" in found:
        assert {"sub_", "sub"} & set(found["Normalize"].operators)
        assert "div_" in found["Normalize"].operators


def test_functions_in_a_pipeline_are_named_with_file_and_line(folder):
    def brighter(x):
        return x.mul(1.5).clamp(0, 1)  # brighter

    steps = [transforms.CenterCrop(32), transforms.ToTensor(), transforms.Lambda(brighter)]
    found = {work.what: work for work in examined(loader_of(folder, steps))}
    assert sorted(found) == ["ToTensor", "brighter"]
    lines = Path(__file__).read_text().splitlines()
    assert found["brighter"].file == __file__
    assert lines[found["brighter"].line - 1].endswith("# brighter")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 7, 32), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.convolution(x).mean((2, 3)))


@pytest.mark.parametrize("in_memory", [False, True])
def test_optimize_trains_on_it(folder, in_memory):
    expected = epochs(loader_of(folder, PLAIN))
    model, loader = Small(), loader_of(folder, PLAIN)
    techniques = {"compile": False, "precision": False, "workers": False, "in_memory": in_memory}
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert same(epochs(run.loader), expected)
    row = run.report.row("transforms")
    assert row.status == ("not applicable" if in_memory else "not tried")
    assert ("samples-in-memory" if in_memory else "budget-spent") in reasons(row)
    assert all(torch.isfinite(run.step(batch)) for batch in run.loader)
    assert "transforms" not in run.plan.decisions
    assert flatout.report.Report.from_json(run.report.to_json()).row("transforms") == row


def test_the_report_names_each_transform_and_gives_its_advice_once(folder):
    job = job_of(Small(), loader=loader_of(folder, PLAIN))
    with simulated_time(TICK):
        *found, advice = findings("transforms", job, math.inf)
    places = [f"dataset.transform.transforms[{i}]: " for i in (2, 3)]
    assert sorted(finding.partition(" (")[0] for finding in found) == [places[0] + "ToTensor", places[1] + "Normalize"]
    assert "flatout.data.Normalize" in advice
