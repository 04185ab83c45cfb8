"""Lanes and warps of the CUDA kernels for images, played on the host over the functions that the kernels call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.data  # noqa: F401  (loads the operators)
from tests.images import DTYPES, FORMATS, SHAPES, assert_normalized, constants, images, shapes


def play(x, mean, std, dtype, channels_last, general=False):
    return torch.ops.flatout_testing.normalize_images(x, mean, std, dtype, channels_last, general)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given_format", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_every_element_is_written_once_and_right(channels, given_format, channels_last, dtype):
    mean, std = constants(channels)
    for shape in SHAPES:
        for offset in (0, 1, 4):
            x = images(shape, channels, given_format, offset)
            for general in (False, True):
                result, _ = play(x, mean, std, dtype, channels_last, general)
                assert_normalized(result, x, mean, std, dtype, FORMATS[channels_last])


@settings(max_examples=150)
@given(
    shape=shapes,
    channels=st.integers(1, 6),
    given_format=st.sampled_from(FORMATS),
    channels_last=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 17),
    general=st.booleans(),
)
def test_any_shape(shape, channels, given_format, channels_last, dtype, offset, general):
    mean, std = constants(channels)
    x = images(shape, channels, given_format, offset)
    result, _ = play(x, mean, std, dtype, channels_last, general)
    assert_normalized(result, x, mean, std, dtype, FORMATS[channels_last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_batches_the_kernel_for_few_channels_takes(dtype):
    """All of 1, 3 and 4 channels, but planar output only where its packs are aligned."""
    group = 16 // dtype.itemsize
    for channels in (1, 2, 3, 4, 5):
        for given_format in FORMATS:
            for channels_last in (False, True):
                for pixels in (group, group + 1):
                    x = images((2, 1, pixels), channels, given_format)
                    _, few = play(x, *constants(channels), dtype, channels_last)
                    whole = channels_last or channels == 1 or pixels == group
                    assert few == (channels in (1, 3, 4) and whole)


@settings(max_examples=300)
@given(
    divisor=st.one_of(st.integers(1, 2**31 - 1), st.integers(0, 30).map(lambda n: 2**n), st.integers(1, 2000)),
    multiple=st.integers(0, 2**31 - 1),
    number=st.integers(0, 2**31 - 1),
)
def test_division_by_multiplication(divisor, multiple, number):
    multiple -= multiple % divisor
    values = [v for v in (0, number, multiple - 1, multiple, multiple + 1, 2**31 - 1) if 0 <= v < 2**31]
    quotients = torch.ops.flatout_testing.divide(torch.tensor(values), divisor)
    assert quotients.tolist() == [v // divisor for v in values]
