"""torchvision pipelines over image files: equal batches through every loader of flatout, and their findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import flatout
from flatout.data import NotCacheable, Prefetcher, Stage, cache_in_memory, sample_stages
from tests.reasons import reasons

try:  # a torchvision that was built for another torch raises RuntimeError
    from PIL import Image
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_jpeg, read_file
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


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write 8 JPEGs of about a megapixel."""
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for i in range(8):
        pixels = Image.fromarray(generator.integers(0, 255, (90, 120, 3), dtype=np.uint8)).resize((1200, 900))
        pixels.save(tmp_path / "photos" / f"{i}.jpg")
    return tmp_path


def stages_of(source, **options) -> dict[str, Stage]:
    """Return the stages by name, and transforms by class."""
    return {
        stage.what if stage.name == "transform" else stage.name: stage for stage in sample_stages(source, **options)
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_of_an_image_folder(photos, workers):
    steps = [transforms.RandomResizedCrop(700), transforms.RandomHorizontalFlip(0.9), *TAIL]
    found = stages_of(loader_of(photos, steps, workers))
    assert (found["decode"].what, found["decode"].place) == ("PIL", "dataset.loader")
    assert (found["resize"].what, found["resize"].place) == ("RandomResizedCrop", "dataset.transform.transforms[0]")
    assert found["ToTensor"].place == "dataset.transform.transforms[2]"
    assert found["Normalize"].place == "dataset.transform.transforms[3]"
    assert found["decode"].share > 0.1
    assert sum(stage.share for stage in found.values()) == pytest.approx(1, abs=0.1)


def test_stages_of_version_2_and_of_concatenated_folders(photos):
    steps = [v2.Resize(600), v2.CenterCrop(500), *VERSION_2]
    folders = ConcatDataset([ImageFolder(str(photos), v2.Compose(steps)) for _ in range(2)])
    found = stages_of(Subset(folders, range(4, 12)))
    assert found["decode"].place.startswith("dataset.dataset.datasets[")
    assert found["resize"].place == "dataset.dataset.datasets[0].transform.transforms[0]"
    assert found["resize"].what == "Resize"


class Opened(Dataset):
    """Dataset that reads images in ``__getitem__`` and calls a global transform."""

    def __init__(self, folder, loads):
        self.files, self.loads = sorted(folder.glob("*/*")), loads

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return SHRUNK(self.loads(self.files[i]))  # shrunk


SHRUNK = transforms.Resize(500)


def by_pillow(file):
    return Image.open(file).convert("RGB")  # by Pillow


def by_torchvision(file):
    return decode_jpeg(read_file(str(file)))  # by torchvision


@pytest.mark.parametrize(
    ("loads", "package", "mark"), [(by_pillow, "PIL", "by Pillow"), (by_torchvision, "torchvision", "by torchvision")]
)
def test_code_of_the_users_is_named_with_file_and_line(photos, loads, package, mark):
    lines = Path(__file__).read_text().splitlines()
    found = stages_of(Opened(photos, loads))
    for name, what, end in (("decode", package, mark), ("resize", "Resize", "shrunk")):
        number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {end}"))
        assert found[name].what == what
        assert found[name].place.endswith(f"test_torchvision.py:{number}")
    assert found["decode"].share > 0.1


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
    row = run.report.row("loading_stages")
    assert row.status == ("not applicable" if in_memory else "not tried")
    assert ("samples-in-memory" if in_memory else "budget-spent") in reasons(row)
    assert all(torch.isfinite(run.step(batch)) for batch in run.loader)
    assert "loading_stages" not in run.plan.decisions
    assert flatout.report.Report.from_json(run.report.to_json()).row("loading_stages") == row
