"""Decoding of JPEG files by simplejpeg, with the bits of Pillow."""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
from typing import Any

import numpy as np

_FORMS = tuple(itertools.product(((17, 23), (64, 48)), ("4:4:4", "4:2:2", "4:2:0"), (30, 95), (False, True)))
"""Sizes, subsamplings, qualities and progressive modes of the images with which the two decoders are compared."""


def pixels_of(file: Any) -> np.ndarray | None:
    """Return the image of a JPEG file as ``PIL.Image.open(file).convert("RGB")`` decodes it, uint8 [H, W, 3].

    Args:
        file: path, or a binary file.

    Returns:
        The image, or None if Pillow has to decode it: if it does not have three channels, if simplejpeg has an error or
        a warning, or if Pillow raises.
    """
    import simplejpeg
    from PIL import Image, ImageFile

    try:
        with Image.open(file) as image:
            if (
                type(image).__name__ != "JpegImageFile"
                or image.mode != "RGB"
                or [tuple(tile) for tile in image.tile] != [("jpeg", (0, 0, *image.size), 0, ("RGB", ""))]
                or image.fp is None
                or ImageFile.LOAD_TRUNCATED_IMAGES
            ):
                return None
            image.fp.seek(0)
            pixels = simplejpeg.decode_jpeg(image.fp.read(), "RGB")
            return pixels if pixels.shape[:2] == (image.height, image.width) else None
    except Exception:  # an error of Pillow appears again when Pillow decodes
        return None


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
        found = pixels_of(file)
        if found is None or not np.array_equal(found, np.asarray(Image.open(file))):
            return "simplejpeg and Pillow decode the same files to different images"
    return ""
