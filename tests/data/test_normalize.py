"""``Normalize`` and its operator: bit-equal to torchvision's arithmetic for any dtype, shape and strides."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data import Normalize
from tests.data.harness import is_normalized_by_kernel, kernels_there
from tests.images import DTYPES, FORMATS, SHAPES, assert_normalized, constants, exact, images, shapes

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def operator(x, mean, std, dtype=torch.float32, channels_last=True):
    return torch.ops.flatout.normalize_images(x, mean, std, dtype, channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given_format", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 17, 241])
def test_every_shape(channels, given_format, channels_last, dtype):
    mean, std = constants(channels)
    for shape in SHAPES:
        x = images(shape, channels, given_format, offset=3)
        result = Normalize(mean, std, dtype=dtype, channels_last=channels_last)(x)
        assert_normalized(result, x, mean, std, dtype, FORMATS[channels_last])


@settings(max_examples=60)
@given(
    shape=shapes,
    channels=st.integers(1, 9),
    given_format=st.sampled_from(FORMATS),
    channels_last=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 17),
    data=st.data(),
)
def test_any_shape_and_constants(shape, channels, given_format, channels_last, dtype, offset, data):
    mean, std = (data.draw(st.lists(st.floats(0.001, 2.0), min_size=channels, max_size=channels)) for _ in range(2))
    x = images(shape, channels, given_format, offset)
    result = operator(x, mean, std, dtype, channels_last)
    assert_normalized(result, x, mean, std, dtype, FORMATS[channels_last])


@settings(max_examples=200)
@given(
    mean=st.floats(-1e18, 1e18).filter(lambda m: m == 0 or abs(m) >= 1e-18),
    std=st.floats(1e-18, 1e18),
)
def test_all_values_are_exact_with_any_mean_and_std(mean, std):
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for dtype in DTYPES:
        assert_normalized(operator(x, [mean], [std], dtype), x, [mean], [std], dtype, torch.channels_last)


@pytest.mark.parametrize(
    ("value", "mean", "std"),
    [
        (250, 0.806204, 0.394433),
        (207, 0.807125, 0.941055),
        (186, 0.547667, 0.809189),
        (84, 0.535784, 0.437713),
        (167, 0.573010, 0.243605),
        (86, 0.935083, 0.485064),
    ],
)
def test_quotients_beside_the_middle_of_two_floats(value, mean, std):
    """A search found these values, one in five million. The product with the reciprocal rounds the wrong way."""
    for count in (1, 300):  # a vector's tail, and vectors
        x = torch.full((1, 1, 1, count), value, dtype=torch.uint8)
        assert_normalized(operator(x, [mean], [std]), x, [mean], [std], torch.float32, torch.channels_last)


def test_it_is_torchvisions_to_tensor_and_normalize():
    try:  # a torchvision that was built for another torch raises RuntimeError
        from torchvision import transforms
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs a torchvision for torch {torch.__version__}: {error}")
    array = np.random.default_rng(0).integers(0, 256, (33, 31, 3), dtype=np.uint8)
    expected = transforms.Normalize(MEAN, STD)(transforms.ToTensor()(array))
    result = Normalize(MEAN, STD)(torch.from_numpy(array).permute(2, 0, 1)[None])
    assert torch.equal(result[0], expected)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)], ids=str)
def test_it_is_near_the_true_value(dtype, digits):
    """A comparison with float64 would show a mistake in ``exact``. The bound is about half a unit in the last place."""
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    true = (x.double() / 255 - 0.449) / 0.226
    bound = true.abs() * 2.0**-digits + 2.0**-22
    assert ((operator(x, [0.449], [0.226], dtype).double() - true).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_other_strides_are_copied_first(channels_last, dtype):
    whole = images((4, 12, 10), 6)
    views = {
        "some channels": whole[:, ::2],
        "a crop": whole[:, :3, 2:9, 1:8],
        "every other image": whole[::2, :3],
        "transposed": whole[:, :3].transpose(2, 3),
        "one image for all": whole[:1, :3].expand(3, -1, -1, -1),
        "flipped": whole[:, :3].flip(3),
    }
    for name, x in views.items():
        before = x.clone()
        result = operator(x, MEAN, STD, dtype, channels_last)
        assert_normalized(result, x, MEAN, STD, dtype, FORMATS[channels_last])
        assert torch.equal(x, before), name


def test_many_threads_do_what_one_does():
    x = images((7, 129, 127), 3)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(operator(x, MEAN, STD, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, exact(x, MEAN, STD, torch.bfloat16)) for result in results)


# ---- batches -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


def test_images_are_found_in_any_nesting_and_all_else_passes():
    transform = Normalize(MEAN, STD)
    x = images((2, 5, 4), 3)
    others = {
        "labels": torch.arange(2),
        "floats": torch.rand(2, 3, 5, 4),
        "one image": x[0],
        "video": x[None],
        "mask": images((2, 5, 4), 1),
        "signed": x.to(torch.int8),
        "name": "cat",
        "nothing": None,
    }
    result = transform({"x": [x, (x, Sample(x, "dog"))], **others})
    for found in (result["x"][0], result["x"][1][0], result["x"][1][1].image):
        assert_normalized(found, x, MEAN, STD, torch.float32, torch.channels_last)
    assert result["x"][1][1].name == "dog"
    for name, other in others.items():
        assert result[name] is other, name


class Tagged(torch.Tensor):
    """Subclass of Tensor, as torchvision's ``tv_tensors.Image`` is."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("why", ["subclass", "no kernels"])
def test_fallback_to_torch_operations(why, channels_last, dtype):
    """The fallback is bit-equal, for devices without kernels and for subclasses of Tensor."""
    transform = Normalize(MEAN, STD, dtype=dtype, channels_last=channels_last)
    x = images((3, 7, 5), 3)
    with kernels_there(why != "no kernels"):
        result = transform(x.as_subclass(Tagged) if why == "subclass" else x)
    assert_normalized(result.as_subclass(torch.Tensor), x, MEAN, STD, dtype, FORMATS[channels_last])
    assert type(result) is (Tagged if why == "subclass" else torch.Tensor)


def test_fallback_for_more_channels_than_a_kernel_supports():
    """A kernel receives its constants as an argument of limited size."""
    cuda = torch.device("cuda", 0)
    assert [is_normalized_by_kernel(cuda, channels) for channels in (1, 240, 241)] == [True, True, False]
    assert is_normalized_by_kernel(torch.device("cpu"), 241)


def test_it_is_a_value():
    transform = Normalize(torch.tensor([0.5, 0.25]), np.array([1, 2]), dtype=torch.bfloat16, channels_last=False)
    same = Normalize((0.5, 0.25), (1.0, 2.0), dtype=torch.bfloat16, channels_last=False)
    assert transform == same == pickle.loads(pickle.dumps(transform))
    assert hash(transform) == hash(same)
    assert repr(transform) == (
        "Normalize(mean=(0.5, 0.25), std=(1.0, 2.0), dtype=torch.bfloat16, channels_last=False)"
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        transform.mean = (0.0, 0.0)


@pytest.mark.parametrize(
    ("mean", "std", "options", "message"),
    [
        ([0.5], [0.0], {}, r"^std\[0\].*1e-18.* 0\.0$"),
        ([0.5] * 2, [1.0, -0.2], {}, r"^std\[1\].* -0\.2$"),
        ([0.5], [math.nan], {}, r"^std\[0\].* nan$"),
        ([0.5], [math.inf], {}, r"^std\[0\].* inf$"),
        ([math.nan], [0.5], {}, r"^mean\[0\].* nan$"),
        ([1e-30], [0.5], {}, r"^mean\[0\].* 1e-30$"),
        ([0.5] * 3, [0.5] * 2, {}, r"^mean and std .*\b3\b.*\b2\b"),
        ([], [], {}, "^mean "),
        (0.5, 0.5, {}, r"^mean .* 0\.5$"),
        (["red"], [0.5], {}, r"^mean .*\['red'\]$"),
        ([0.5], [0.5], {"dtype": torch.float64}, "^dtype .*torch.float32.* torch.float64$"),
        ([0.5], [0.5], {"dtype": "bfloat16"}, "^dtype .*torch.float32.* bfloat16$"),
    ],
)
def test_what_makes_no_sense_is_refused(mean, std, options, message):
    with pytest.raises(ValueError, match=message):
        Normalize(mean, std, **options)


# ---- the operator in torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 1, 1), (0, 3, 3)])
def test_opcheck(shape, channels, channels_last):
    args = (images(shape, channels), *constants(channels), torch.bfloat16, channels_last)
    torch.library.opcheck(torch.ops.flatout.normalize_images.default, args)


def test_it_is_compiled_in_one_graph():
    transform = Normalize(MEAN, STD, dtype=torch.bfloat16)
    compiled = torch.compile(lambda batch: transform(batch)["x"] * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 8, 8), (3, 7, 5)):
        x = images(shape, 3)
        expected = transform({"x": x})["x"] * 2
        result = compiled({"x": x})
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 5, 5, dtype=torch.uint8)}, r"uint8.*\b4\b.*\b3\b.*Byte"),
        ({"x": torch.zeros(1, 3, 5, 5)}, "uint8.*Float"),
        ({"x": torch.zeros(1, 4, 5, 5, dtype=torch.uint8)}, r"\b4 channels.*\b3 and 3\b"),
        ({"std": [1.0]}, r"\b3 channels.*\b3 and 1\b"),
        ({"std": [1.0, 0.0, 1.0]}, r"std\[1\].*1e-18.* 0\b"),
        ({"mean": [0.0, 0.0, math.inf]}, r"mean\[2\]"),
        ({"dtype": torch.float64}, "dtype.*bfloat16.*Double"),
    ],
)
def test_the_operator_refuses_what_it_does_not_know(change, message):
    arguments = {"x": images((1, 5, 5), 3), "mean": MEAN, "std": STD} | change
    with pytest.raises(RuntimeError, match=message):
        operator(**arguments)
