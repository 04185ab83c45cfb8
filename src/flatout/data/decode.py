"""``FastDecoding``: a dataset whose JPEG files simplejpeg decodes in place of Pillow, with the same bits."""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from flatout.core.replaced import replaced
from flatout.data.forwarding import Forwarding

_CODEC = "flatout_jpeg"
_FORMS = tuple(itertools.product(((17, 23), (64, 48)), ("4:4:4", "4:2:2", "4:2:0"), (30, 95), (False, True)))
"""Sizes, subsamplings, qualities and progressive modes of the images with which the two decoders are compared."""


class FastDecoding(Forwarding, Dataset):
    """Map-style dataset whose code decodes JPEG files with simplejpeg instead of Pillow.

    The code of ``dataset`` does not change: ``PIL.Image.open(path).convert("RGB")`` gives the same image, with the same
    attributes. simplejpeg decodes images of three channels, baseline or progressive. Pillow decodes all other files,
    and those for which simplejpeg has an error or a warning, so that Pillow's errors appear.

    Args:
        dataset: map-style.
    """

    _OWN = frozenset({"dataset"})

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def _wrapped(self) -> Any:
        return self.dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with _replaced_load(_by_simplejpeg):
            return self.dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples of many indices, from ``dataset.__getitems__`` if it exists."""
        with _replaced_load(_by_simplejpeg):
            batched = getattr(self.dataset, "__getitems__", None)
            return batched(indices) if batched else [self.dataset[index] for index in indices]


def pixels_of(path: str) -> np.ndarray | None:
    """Return the image of a file as ``PIL.Image.open(path).convert("RGB")`` decodes it, uint8 [H, W, 3].

    None if simplejpeg does not decode it, or if Pillow raises.
    """
    import simplejpeg
    from PIL import Image

    try:
        with Image.open(path) as image:
            if not _is_plain(image) or image.fp is None:
                return None
            image.fp.seek(0)
            pixels = simplejpeg.decode_jpeg(image.fp.read(), "RGB")
            return pixels if pixels.shape[:2] == (image.height, image.width) else None
    except Exception:  # an error of Pillow appears again when Pillow decodes
        return None


@contextmanager
def decoded_files() -> Iterator[list[str]]:
    """Yield a list, to which each JPEG image that Pillow loads within the block adds its file's name."""
    names: list[str] = []

    def noted(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def load_noted(image: Any) -> Any:
            if _is_plain(image):
                names.append(str(image.filename))
            return load(image)

        return load_noted

    with _replaced_load(noted):
        yield names


@functools.cache
def why_not_decodable() -> str:
    """Return why simplejpeg cannot decode in place of Pillow, as a clause; empty if it can."""
    if importlib.util.find_spec("simplejpeg") is None:
        return "simplejpeg, a faster decoder with the same results, is not installed: pip install simplejpeg"
    from PIL import Image

    pixels = np.random.default_rng(0)
    for (height, width), subsampling, quality, progressive in _FORMS:
        file = io.BytesIO()
        image = Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(file, "JPEG", subsampling=subsampling, quality=quality, progressive=progressive)
        with Image.open(file) as expected, Image.open(io.BytesIO(file.getvalue())) as found:
            expected.load()
            with _replaced_load(_by_simplejpeg):
                found.load()
            if expected.tobytes() != found.tobytes():
                return "simplejpeg and Pillow decode the same files to different images"
    return ""


def _replaced_load(wrap: Callable[[Any], Any]) -> Any:
    from PIL import Image, JpegImagePlugin

    if _CODEC not in Image.DECODERS:
        Image.register_decoder(_CODEC, _decoder())
    return replaced(JpegImagePlugin.JpegImageFile, "load", wrap)


def _by_simplejpeg(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method ``load`` that lets simplejpeg decode, or Pillow if simplejpeg cannot."""

    def load_fast(image: Any) -> Any:
        if not _is_plain(image):
            return load(image)
        tiles = image.tile
        image.tile = [tiles[0]._replace(codec_name=_CODEC)]
        try:
            return load(image)
        except _Unlike:
            image.tile = tiles
            return load(image)

    return load_fast


def _is_plain(image: Any) -> bool:
    """Return True if an image is still to be decoded, whole, from three channels in a file."""
    return (
        type(image).__name__ == "JpegImageFile"
        and image.mode == "RGB"
        and not image.decoderconfig
        and [tuple(tile) for tile in image.tile] == [("jpeg", (0, 0, *image.size), 0, ("RGB", ""))]
        and not sys.modules["PIL.ImageFile"].LOAD_TRUNCATED_IMAGES
    )


class _Unlike(Exception):
    """Result that may differ from Pillow's."""


@functools.cache
def _decoder() -> type:
    import simplejpeg
    from PIL import ImageFile

    class SimplejpegDecoder(ImageFile.PyDecoder):
        """Decoder of Pillow for whole files."""

        _pulls_fd = True

        def decode(self, buffer: Any) -> tuple[int, int]:
            assert self.fd is not None
            try:
                pixels = simplejpeg.decode_jpeg(self.fd.read(), "RGBA")
            except ValueError as error:  # warnings of the library included
                raise _Unlike from error
            if pixels.shape[:2] != (self.state.ysize, self.state.xsize):
                raise _Unlike
            self.set_as_raw(pixels.data, "RGBX")
            return -1, 0

    return SimplejpegDecoder
