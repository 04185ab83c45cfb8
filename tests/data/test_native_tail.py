"""Native form of the last transforms: bits and draws of torchvision on images of Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.random_state import RandomState
from flatout.data.native_tail import is_vertical_first, native_tail

pytest.importorskip("torchvision")
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional, v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


def resampled(pixels, box, size, window, flip=False, mean=(), std=()):
    order = is_vertical_first(box[2:], size)
    image = torch.from_numpy(pixels)
    return torch.ops.flatout.resample_image(image, box, size, window, flip, order, list(mean), list(std))


@given(st.data())
def test_bytes_and_floats_are_those_of_torchvision(data):
    def part_of(height, width):
        sizes = [data.draw(st.integers(1, most)) for most in (height, width)]
        begins = [data.draw(st.integers(0, most - own)) for most, own in zip((height, width), sizes, strict=True)]
        return [*begins, *sizes]

    height, width, *size = (data.draw(st.integers(1, 60)) for _ in range(4))
    channels, flip = data.draw(st.sampled_from([1, 3])), data.draw(st.booleans())
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    pixels = generator.integers(0, 256, (height, width, channels), dtype=np.uint8)
    if data.draw(st.booleans()):
        pixels = pixels // 128 * 255
    box, window = part_of(height, width), part_of(*size)
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    expected = functional.crop(functional.resized_crop(image, *box, size), *window)
    expected = functional.hflip(expected) if flip else expected
    assert torch.equal(resampled(pixels, box, size, window, flip), functional.pil_to_tensor(expected))
    mean, std = (MEAN, STD) if channels == 3 else ([0.5], [0.2])
    floats = functional.normalize(functional.to_tensor(expected), mean, std)
    assert torch.equal(resampled(pixels, box, size, window, flip, mean, std), floats)


TAILS = {
    "crop": [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), *FLOATS],
    "bytes": [transforms.RandomResizedCrop((9, 20)), transforms.RandomHorizontalFlip(0.9), transforms.PILToTensor()],
    "resize": [transforms.Resize(20), transforms.RandomCrop(16), transforms.ToTensor()],
    "resize to both": [transforms.Resize((20, 30)), transforms.CenterCrop((16, 19)), *FLOATS],
    "window": [transforms.RandomCrop((30, 20)), transforms.RandomHorizontalFlip(), *FLOATS],
    "center": [transforms.CenterCrop(21), *FLOATS],
    "longest": [transforms.Resize(20, max_size=22), *FLOATS],
}


@pytest.mark.parametrize("name", TAILS)
def test_transforms_have_the_draws_and_bits_of_torchvision(name):
    steps, generator = TAILS[name], np.random.default_rng(0)
    tail = native_tail([*steps, transforms.RandomErasing()])
    assert tail is not None
    assert tail.length == len(steps)
    for i in range(30):
        pixels = generator.integers(0, 256, (31 + i, 64 - i, 3), dtype=np.uint8)
        assert tail.fits(*pixels.shape[:2])
        torch.manual_seed(i)
        expected = transforms.Compose(steps)(Image.fromarray(pixels))
        state = RandomState.capture()
        torch.manual_seed(i)
        assert torch.equal(tail(pixels), expected)
        assert state.moved() is None


class Own(transforms.RandomResizedCrop):
    pass


def hooked():
    step = transforms.CenterCrop(8)
    step.register_forward_hook(lambda *_: None)
    return step


OTHERS = {
    "a subclass": [Own(8), *FLOATS],
    "a hook": [hooked(), *FLOATS],
    "another filter": [transforms.Resize(8, transforms.InterpolationMode.BICUBIC), *FLOATS],
    "padding": [transforms.RandomCrop(8, padding=2), *FLOATS],
    "a crop after a flip": [transforms.RandomHorizontalFlip(), transforms.RandomCrop(8), *FLOATS],
    "two resizes": [transforms.Resize(20), transforms.RandomResizedCrop(8), *FLOATS],
    "version 2": [v2.RandomResizedCrop(8), *FLOATS],
    "no tensor": [transforms.CenterCrop(8), transforms.ColorJitter(), *FLOATS],
    "no move": FLOATS,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_transforms_have_no_native_form(name):
    assert native_tail(OTHERS[name]) is None


def test_an_image_that_is_too_small_does_not_fit():
    tail = native_tail([transforms.Resize(20), transforms.RandomCrop((16, 40)), *FLOATS])
    assert tail is not None
    assert not tail.fits(30, 30)
    assert tail.fits(30, 90)


GOOD = {"box": [0, 0, 4, 5], "size": [4, 5], "window": [0, 0, 4, 5]}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"box": [0, 0, 5, 5]}, "box must be within"),
        ({"box": [-1, 0, 2, 2]}, "box must be within"),
        ({"box": [0, 0, 2]}, "box must be"),
        ({"size": [0, 5]}, "size must be"),
        ({"size": [4]}, "size must be"),
        ({"window": [1, 0, 4, 5]}, "window must be within"),
        ({"window": [0, 0, 0, 5]}, "window must be within"),
        ({"mean": [0.5], "std": [0.5]}, "mean and std"),
        ({"mean": [0.5] * 3, "std": [0.0] * 3}, "std"),
    ],
)
def test_wrong_arguments_are_refused(wrong, match):
    arguments = {"mean": [], "std": []} | GOOD | wrong
    image = torch.zeros(4, 5, 3, dtype=torch.uint8)
    parts = [arguments[name] for name in ("box", "size", "window")]
    with pytest.raises(RuntimeError, match=match):
        torch.ops.flatout.resample_image(image, *parts, False, False, arguments["mean"], arguments["std"])


@pytest.mark.parametrize("image", [torch.zeros(4, 5, 2, dtype=torch.uint8), torch.zeros(4, 5, 3), torch.zeros(4, 5)])
def test_other_images_are_refused(image):
    with pytest.raises(RuntimeError, match="image must"):
        torch.ops.flatout.resample_image(image, *GOOD.values(), False, False, [], [])


@pytest.mark.parametrize("mean", [[], MEAN])
def test_the_operator_can_be_traced(mean):
    image = torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8)
    torch.library.opcheck(
        torch.ops.flatout.resample_image.default, (image, *GOOD.values(), True, False, mean, STD if mean else [])
    )
