"""Image files decoded by simplejpeg in place of Pillow: the same samples, errors, warnings and draws."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.core.random_state import RandomState
from flatout.data import NotCacheable, PrefixCache
from flatout.data.decode import pixels_of, why_not_decodable
from flatout.data.packed import bytes_of

pytest.importorskip("torchvision")
simplejpeg = pytest.importorskip("simplejpeg")
# ruff: noqa: E402
from PIL import Image, ImageFile
from torchvision import transforms
from torchvision.datasets import ImageFolder

DRAWS = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip()]
FLOATS = [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]


def jpeg(seed=0, size=(40, 30), mode="RGB", **settings):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **settings)
    return file.getvalue()


def result_of(dataset, index):
    """Return the sample's bytes, or the class and the text of its error, and the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result = bytes_of(dataset[index])
        except Exception as error:
            result = type(error), str(error)
    return result, sorted({(each.category, str(each.message)) for each in seen}, key=str)


def test_two_thousand_files_have_the_bits_of_pillow(tmp_path):
    generator = np.random.default_rng(0)
    path = tmp_path / "image.jpg"
    for i in range(2000):
        settings = {
            "quality": int(generator.integers(1, 101)),
            "subsampling": ("4:4:4", "4:2:2", "4:2:0", "4:1:1")[generator.integers(4)],
            "progressive": bool(generator.integers(2)),
            "optimize": bool(generator.integers(2)),
            "restart_marker_blocks": int(generator.integers(0, 4)),
        }
        path.write_bytes(jpeg(i, tuple(generator.integers(1, 70, 2)), **settings))
        with Image.open(path) as image:
            assert np.array_equal(pixels_of(str(path)), np.asarray(image.convert("RGB"))), settings


def test_decoders_that_differ_are_refused(monkeypatch):
    assert why_not_decodable() == ""
    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data, *args: decode(data, *args, fastupsample=True))
    why_not_decodable.cache_clear()
    try:
        assert "different images" in why_not_decodable()
    finally:
        why_not_decodable.cache_clear()


def odd_files(folder: Path):
    good = jpeg(quality=90)
    pixels = np.random.default_rng(1).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    oriented = Image.Exif()
    oriented[0x0112] = 6

    def saved(image, form, **settings):
        file = io.BytesIO()
        image.save(file, form, **settings)
        return file.getvalue()

    files = {
        "truncated": good[: len(good) // 2],
        "header only": good[:200],
        "without its end": good[:-2],
        "empty": b"",
        "zeros": bytes(500),
        "text": b"no image",
        "damaged": good[:700] + b"\xff\x00\xff\xd9" + good[704:],
        "damaged tables": good[:60] + bytes(20) + good[80:],
        "trailing bytes": good + b"trailing",
        "two images": good + jpeg(2),
        "CMYK": saved(image.convert("CMYK"), "JPEG"),
        "grey": saved(image.convert("L"), "JPEG"),
        "16 bits": saved(Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), "PNG"),
        "palette": saved(image.convert("P"), "PNG"),
        "alpha": saved(image.convert("RGBA"), "PNG"),
        "PNG named JPEG": saved(image, "PNG"),
        "animated": saved(image.convert("P"), "GIF", save_all=True, append_images=[image.convert("P").rotate(90)]),
        "orientation": saved(image, "JPEG", exif=oriented),
        "comment and dpi": saved(image, "JPEG", comment=b"a comment", dpi=(300, 300)),
        "RGB without conversion": saved(image, "JPEG", keep_rgb=True),
        "several pictures": saved(image, "MPO", save_all=True, append_images=[image.rotate(180)]),
        "one pixel": jpeg(size=(1, 1)),
    }
    for name, content in files.items():
        (folder / f"{name}.jpg").write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("files")
    odd_files(made)
    return made


@pytest.fixture
def images(tmp_path):
    for i in range(12):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        (tmp_path / str(i % 2) / f"{i}.jpg").write_bytes(jpeg(i, (50 + i, 60 - i)))
    return tmp_path


def epoch_of(dataset, **settings):
    torch.manual_seed(0)
    batches = list(DataLoader(dataset, 4, shuffle=True, **settings))
    return batches, RandomState.capture()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("budget", [0, 20_000, 1 << 30])
def test_a_folder_gives_the_same_batches_with_any_memory(images, budget, workers):
    dataset = ImageFolder(str(images), transforms.Compose([*DRAWS, *FLOATS]))
    cache = PrefixCache(dataset, byte_budget=budget)
    for _ in range(2):
        expected, after = epoch_of(dataset, num_workers=workers)
        found, _ = epoch_of(cache, num_workers=workers)
        assert after.moved() is None
        for left, right in zip(expected, found, strict=True):
            assert all(map(torch.equal, left, right))


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_files_that_become_odd_give_the_samples_and_errors_of_pillow(folder, tmp_path, budget):
    odd = sorted(folder.iterdir())
    (tmp_path / "class").mkdir()
    for i in range(len(odd)):
        (tmp_path / "class" / f"{i:02}.jpg").write_bytes(jpeg(i))
    dataset = ImageFolder(str(tmp_path), transforms.Compose([*DRAWS, *FLOATS]))
    cache = PrefixCache(dataset, byte_budget=budget)
    assert cache._front.is_native
    for (path, _), changed in zip(dataset.samples, odd, strict=True):
        Path(path).write_bytes(changed.read_bytes())
    Path(dataset.samples[3][0]).unlink()
    for i, changed in enumerate(odd):
        torch.manual_seed(i)
        expected = result_of(dataset, i)
        after = RandomState.capture()
        torch.manual_seed(i)
        assert result_of(cache, i) == expected, changed.name
        assert after.moved() is None


def test_settings_of_pillow_count(images, folder, monkeypatch):
    dataset = ImageFolder(str(images), transforms.Compose([*DRAWS, *FLOATS]))
    cache = PrefixCache(dataset, byte_budget=0)
    path = Path(dataset.samples[0][0])
    path.write_bytes((folder / "truncated.jpg").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        torch.manual_seed(0)
        expected = result_of(dataset, 0)
        torch.manual_seed(0)
        assert result_of(cache, 0) == expected
    path.write_bytes(jpeg(0, (60, 60)))
    for limit in (3000, 1000):  # a warning, and an error
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        torch.manual_seed(0)
        expected = result_of(dataset, 0)
        torch.manual_seed(0)
        assert result_of(cache, 0) == expected
        assert expected[1] or expected[0][0] is Image.DecompressionBombError


class Own(ImageFolder):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image, target, self.loader(self.samples[index][0]).size


OTHERS = {
    "an own loader": lambda folder, steps: ImageFolder(folder, steps, loader=lambda path: Image.open(path)),
    "an own dataset": Own,
    "an own transform": lambda folder, steps: ImageFolder(folder, lambda image: steps(image)),
    "other transforms": lambda folder, _: ImageFolder(folder, transforms.Compose([transforms.ColorJitter(), *FLOATS])),
    "no transform": lambda folder, _: ImageFolder(folder),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_datasets_are_refused(images, name):
    with pytest.raises(NotCacheable):
        PrefixCache(OTHERS[name](str(images), transforms.Compose([*DRAWS, *FLOATS])), byte_budget=0)
