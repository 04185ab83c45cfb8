"""Images of any shape and strides, and their normalized values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
SHAPES = [  # [N, H, W]: whole and partial groups, images smaller than a group, one element, no element
    (2, 8, 8), (3, 7, 5), (1, 1, 1), (9, 1, 1), (40, 1, 3), (5, 1, 9), (2, 33, 31), (1, 64, 129), (0, 3, 3), (2, 0, 3),
]  # fmt: skip

shapes = st.one_of(st.sampled_from(SHAPES), st.tuples(*(st.integers(0, most) for most in (4, 9, 30))))


def constants(channels: int) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation, different for every channel."""
    return [0.485 - 0.03 * (c % 13) for c in range(channels)], [0.229 + 0.011 * (c % 17) for c in range(channels)]


def images(shape, channels, memory_format=torch.contiguous_format, offset=0, seed=0):
    """Return random uint8 images [N, C, H, W]. Their memory begins ``offset`` bytes after an aligned address."""
    n, h, w = shape
    generator = torch.Generator().manual_seed(seed)
    count = n * channels * h * w
    flat = torch.empty(count + offset, dtype=torch.uint8)[offset:]
    flat.copy_(torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8))
    flat[:256] = torch.arange(256, dtype=torch.uint8)[:count]
    if memory_format == torch.channels_last:
        return flat.view(n, h, w, channels).permute(0, 3, 1, 2)
    return flat.view(n, channels, h, w)


def exact(x, mean, std, dtype):
    """Normalize in float32, as torchvision's ``ToTensor`` and ``Normalize`` do on a CPU."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
    return x.cpu().float().div(255).sub_(mean).div_(std).to(dtype)


def assert_normalized(result, x, mean, std, dtype, memory_format):
    assert (result.dtype, result.device) == (dtype, x.device)
    expected, found = exact(x, mean, std, dtype), result.cpu()
    if not torch.equal(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # reports the place of a difference, but is slow
        raise AssertionError("NaN where there is none")
    assert result.stride() == torch.empty(x.shape, memory_format=memory_format).stride()
