"""Normalization of images on a real GPU: the CPU's bits, on the current stream of any device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout import native
from flatout.data import Normalize
from tests.gpu.trace import traced
from tests.images import DTYPES, FORMATS, SHAPES, assert_normalized, constants, exact, images, shapes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not native.BUILT_WITH_CUDA, reason="this build has no CUDA kernels"),
]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def on_gpu(x, device="cuda", offset=0):
    """Copy ``x`` to the GPU with its strides, ``offset`` bytes after the start of the allocation."""
    storage = torch.empty(x.numel() + offset, dtype=torch.uint8, device=device)
    return storage[offset:].as_strided(x.shape, x.stride()).copy_(x)


# All kernels except float16's, which equals bfloat16's: whole groups, odd sizes and odd addresses.
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[] if d == torch.float16 else pytest.mark.sanitize) for d in DTYPES], ids=str
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given_format", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_every_shape(channels, given_format, channels_last, dtype):
    mean, std = constants(channels)
    transform = Normalize(mean, std, dtype=dtype, channels_last=channels_last)
    for i, shape in enumerate(SHAPES):
        x = on_gpu(images(shape, channels, given_format), offset=(0, 1, 4)[i % 3])
        assert_normalized(transform(x), x, mean, std, dtype, FORMATS[channels_last])


@settings(max_examples=60)
@given(
    shape=shapes,
    channels=st.integers(1, 6),
    given_format=st.sampled_from(FORMATS),
    channels_last=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 17),
)
def test_any_shape(shape, channels, given_format, channels_last, dtype, offset):
    mean, std = constants(channels)
    x = on_gpu(images(shape, channels, given_format), offset=offset)
    result = Normalize(mean, std, dtype=dtype, channels_last=channels_last)(x)
    assert_normalized(result, x, mean, std, dtype, FORMATS[channels_last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_for_few_channels_takes_aligned_groups_of_1_3_and_4(dtype):
    group = 16 // dtype.itemsize
    for channels in (1, 2, 3, 4, 5):
        for given_format in FORMATS:
            for channels_last in (False, True):
                for pixels in (group, group + 1):
                    x = on_gpu(images((2, 1, pixels), channels, given_format))
                    transform = Normalize(*constants(channels), dtype=dtype, channels_last=channels_last)
                    [kernel] = traced(lambda transform=transform, x=x: transform(x)).kernels
                    aligned = channels_last or channels == 1 or pixels == group
                    assert ("group_kernel" in kernel) == (channels in (1, 3, 4) and aligned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given_format", FORMATS, ids=str)
@pytest.mark.parametrize("side", [32, 224, 227])
@pytest.mark.parametrize("offset", [0, 3])
def test_many_blocks(side, given_format, channels_last, dtype, offset):
    x = on_gpu(images((37, side, side), 3, given_format), offset=offset)
    result = Normalize(MEAN, STD, dtype=dtype, channels_last=channels_last)(x)
    assert_normalized(result, x, MEAN, STD, dtype, FORMATS[channels_last])


@pytest.mark.parametrize("channels", [240, 241])
def test_many_channels(channels):
    """The kernel takes up to 240 channels. For 241 channels, torch's operations give the same bits."""
    mean, std = constants(channels)
    x = images((2, 9, 11), channels).cuda()
    assert_normalized(Normalize(mean, std)(x), x, mean, std, torch.float32, torch.channels_last)
    if channels > 240:
        with pytest.raises(RuntimeError, match="240 channels at most, got 241"):
            torch.ops.flatout.normalize_images(x, mean, std, torch.float32, True)


def test_other_strides_are_copied_first():
    x = images((4, 12, 10), 6).cuda()[:, ::2]
    assert_normalized(Normalize(MEAN, STD)(x), x, MEAN, STD, torch.float32, torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels", "images_", "side"), [(3, 14_300, 224), (1, 2_150, 1001)])
def test_more_elements_than_32_bits_count(channels, images_, side, channels_last):
    """3 channels use the kernel for few channels. 1 channel has more than 2^31 pixels, and uses the general kernel."""
    mean, std = constants(channels)
    needed = 3.2 * images_ * channels * side * side
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free GPU memory")
    x = torch.empty(images_, channels, side, side, dtype=torch.uint8, device="cuda").random_(0, 256)
    assert x.numel() > 2**31
    result = Normalize(mean, std, dtype=torch.bfloat16, channels_last=channels_last)(x)
    for part in (slice(0, 2), slice(images_ // 2, images_ // 2 + 2), slice(-3, None)):
        torch.testing.assert_close(result[part].cpu(), exact(x[part], mean, std, torch.bfloat16), rtol=0, atol=0)


def test_one_kernel_and_no_wait():
    x = images((8, 224, 224), 3).cuda()
    transform = Normalize(MEAN, STD, dtype=torch.bfloat16)
    transform(x)
    trace = traced(lambda: transform(x))
    assert len(trace.kernels) == 1
    assert trace.waits == []


def test_it_runs_on_the_current_stream():
    x = torch.zeros(8, 3, 224, 224, dtype=torch.uint8, device="cuda")
    later = images((8, 224, 224), 3).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(later)
        result = Normalize(MEAN, STD)(x)
    stream.synchronize()
    assert_normalized(result, later, MEAN, STD, torch.float32, torch.channels_last)


def test_a_cuda_graph_keeps_the_constants():
    x = images((4, 33, 31), 3).cuda()
    transform = Normalize(MEAN, STD, dtype=torch.float16)
    transform(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = transform(x)
    for seed in (1, 2):
        x.copy_(images((4, 33, 31), 3, seed=seed))
        graph.replay()
        assert_normalized(result, x, MEAN, STD, torch.float16, torch.channels_last)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    x = on_gpu(images((4, 33, 31), 3), "cuda:1")
    result = Normalize(MEAN, STD)(x)
    assert torch.cuda.current_device() == 0
    assert_normalized(result, x, MEAN, STD, torch.float32, torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(channels_last):
    args = (images((2, 7, 5), 3).cuda(), MEAN, STD, torch.bfloat16, channels_last)
    torch.library.opcheck(torch.ops.flatout.normalize_images.default, args)


def test_it_is_compiled_in_one_graph():
    transform = Normalize(MEAN, STD, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: transform(x) * 2, fullgraph=True)
    x = images((3, 7, 5), 3).cuda()
    assert torch.equal(compiled(x), transform(x) * 2)
