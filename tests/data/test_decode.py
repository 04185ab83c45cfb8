"""JPEG files decoded by simplejpeg in place of Pillow: the same images, errors and attributes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.core.random_state import RandomState
from flatout.data import PrefixCache
from flatout.data.decode import FastDecoding, decoded_files, pixels_of, why_not_decodable
from flatout.data.packed import bytes_of

pytest.importorskip("torchvision")
simplejpeg = pytest.importorskip("simplejpeg")
from PIL import Image, ImageFile, JpegImagePlugin
from torchvision import transforms
from torchvision.datasets import ImageFolder

DRAWS = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip()]
FLOATS = [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]


class Files(Dataset):
    """Images of files, as people open them."""

    def __init__(self, paths, convert="RGB"):
        self.paths, self.convert = paths, convert

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index])
        return image.convert(self.convert) if self.convert else image


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


@pytest.fixture
def decoded(monkeypatch):
    """Return a list, to which each call of simplejpeg adds its result."""
    results, decode = [], simplejpeg.decode_jpeg

    def noted(*arguments):
        results.append(decode(*arguments))
        return results[-1]

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    return results


def test_two_thousand_files_have_the_bits_of_pillow(tmp_path, decoded):
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
            expected = np.asarray(image.convert("RGB"))
        decoded.clear()
        found = FastDecoding(Files([path]))[0]
        assert len(decoded) == 1, settings
        assert np.array_equal(np.asarray(found), expected), settings
        assert np.array_equal(pixels_of(str(path)), expected), settings


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


def test_odd_files_give_the_sample_or_the_error_of_pillow(folder):
    paths = [*sorted(folder.iterdir()), folder / "vanished.jpg"]
    for convert in ("RGB", "L", ""):
        dataset = Files(paths, convert)
        for i, path in enumerate(paths):
            assert result_of(FastDecoding(dataset), i) == result_of(dataset, i), (path.name, convert)


def test_truncated_files_are_decoded_as_pillow_is_told(folder, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    dataset = Files([folder / "truncated.jpg", folder / "damaged.jpg"])
    for i in range(2):
        assert result_of(FastDecoding(dataset), i) == result_of(dataset, i)


def test_a_large_image_warns_as_by_pillow(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    dataset = Files([folder / "orientation.jpg"])
    expected = result_of(dataset, 0)
    assert expected[1]
    assert result_of(FastDecoding(dataset), 0) == expected
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert result_of(FastDecoding(dataset), 0) == result_of(dataset, 0)


def test_an_image_keeps_its_attributes(folder):
    path = folder / "comment and dpi.jpg"
    with Image.open(path) as expected:
        expected.load()
        found = FastDecoding(Files([path], ""))[0]
        with decoded_files() as files:
            found.load()
        assert files  # Image.open is lazy, so this one is decoded outside of the dataset
        assert (found.mode, found.size, found.info, found.format) == (
            expected.mode,
            expected.size,
            expected.info,
            expected.format,
        )


class Drafts(Files):
    def __getitem__(self, index):
        image = Image.open(self.paths[index])
        image.draft("RGB", (20, 15))
        return image.convert("RGB")


def test_a_draft_is_decoded_by_pillow(folder, decoded):
    dataset = Drafts([folder / "comment and dpi.jpg"])
    assert result_of(FastDecoding(dataset), 0) == result_of(dataset, 0)
    assert not decoded


def test_pillow_decodes_again_after_each_sample(folder):
    load = JpegImagePlugin.JpegImageFile.load
    FastDecoding(Files([folder / "orientation.jpg"]))[0]
    assert JpegImagePlugin.JpegImageFile.load is load
    assert "load" not in vars(JpegImagePlugin.JpegImageFile)


def test_decoders_that_differ_are_refused(monkeypatch):
    assert why_not_decodable() == ""
    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data, *args: decode(data, *args, fastupsample=True))
    why_not_decodable.cache_clear()
    try:
        assert "different images" in why_not_decodable()
    finally:
        why_not_decodable.cache_clear()


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
