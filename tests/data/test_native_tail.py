"""Native form of the last transforms: bits and draws of torchvision on images of Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.random_state import RandomState
from flatout.data.native_tail import is_vertical_first, native_tail, run

pytest.importorskip("torchvision")
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional, v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


def place_of(box, size, window, flip=False):
    return [*box, *size, *window[:2], flip, is_vertical_first(box[2:], size)]


def resampled(pixels, box, size, window, flip=False, mean=(), std=()):
    out = torch.empty((3, *window[2:])) if mean else torch.empty((*window[2:], 3), dtype=torch.uint8)
    place = place_of(box, size, window, flip)
    torch.ops.flatout.resample_images([torch.from_numpy(pixels)], place, [out], list(mean), list(std))
    return out if mean else out.permute(2, 0, 1)


@given(st.data())
def test_bytes_and_floats_are_those_of_torchvision(data):
    def part_of(height, width):
        sizes = [data.draw(st.integers(1, most)) for most in (height, width)]
        begins = [data.draw(st.integers(0, most - own)) for most, own in zip((height, width), sizes, strict=True)]
        return [*begins, *sizes]

    height, width, *size = (data.draw(st.integers(1, 60)) for _ in range(4))
    flip = data.draw(st.booleans())
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if data.draw(st.booleans()):
        pixels = pixels // 128 * 255
    box, window = part_of(height, width), part_of(*size)
    image = Image.fromarray(pixels)
    expected = functional.crop(functional.resized_crop(image, *box, size), *window)
    expected = functional.hflip(expected) if flip else expected
    assert torch.equal(resampled(pixels, box, size, window, flip), functional.pil_to_tensor(expected))
    floats = functional.normalize(functional.to_tensor(expected), MEAN, STD)
    assert torch.equal(resampled(pixels, box, size, window, flip, MEAN, STD), floats)


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
        assert torch.equal(run([tail.draw(pixels)])[0], expected)
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


def test_images_of_several_sizes_and_tails_run_together():
    generator = np.random.default_rng(0)
    tails = [native_tail(TAILS[name]) for name in ("crop", "bytes", "longest")]
    images = [generator.integers(0, 256, (30 + i, 60 - i, 3), dtype=np.uint8) for i in range(24)]
    drawn = [tails[i % 3].draw(image) for i, image in enumerate(images)]
    for result, each in zip(run(drawn), drawn, strict=True):
        assert torch.equal(result, run([each])[0])


GOOD = place_of([0, 0, 4, 5], [4, 5], [0, 0])
IMAGE = torch.zeros(4, 5, 3, dtype=torch.uint8)


def bytes_of_size(height, width):
    return torch.zeros(height, width, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "size", "match"),
    [
        (place_of([0, 0, 5, 5], [4, 5], [0, 0]), (4, 5), "rows of the box must be within 4"),
        (place_of([0, 1, 4, 5], [4, 5], [0, 0]), (4, 5), "columns of the box must be within 5"),
        (place_of([-1, 0, 2, 2], [4, 5], [0, 0]), (4, 5), "rows of the box"),
        (place_of([0, 0, 2, 0], [4, 5], [0, 0]), (4, 5), "columns of the box"),
        (place_of([0, 0, 4, 5], [0, 5], [0, 0]), (4, 5), "rows of the window"),
        (place_of([0, 0, 4, 5], [4, 2**20 + 1], [0, 0]), (4, 5), r"2\^20"),
        (place_of([0, 0, 4, 5], [4, 5], [1, 0]), (4, 5), "rows of the window"),
        (GOOD, (4, 0), "columns of the window"),
        (GOOD[:-1], (4, 5), "10 numbers"),
        ([], (4, 5), "10 numbers"),
    ],
)
def test_wrong_places_are_refused(place, size, match):
    with pytest.raises(RuntimeError, match=match):
        torch.ops.flatout.resample_images([IMAGE], place, [bytes_of_size(*size)], [], [])


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.5]), ([0.5] * 3, [0.0] * 3)])
def test_wrong_constants_are_refused(mean, std):
    with pytest.raises(RuntimeError, match="std"):
        torch.ops.flatout.resample_images([IMAGE], GOOD, [torch.zeros(3, 4, 5)], mean, std)


@pytest.mark.parametrize("image", [torch.zeros(4, 5, 2, dtype=torch.uint8), torch.zeros(4, 5, 3), torch.zeros(4, 5)])
def test_other_images_are_refused(image):
    with pytest.raises(RuntimeError, match="images must"):
        torch.ops.flatout.resample_images([image], GOOD, [bytes_of_size(4, 5)], [], [])


@pytest.mark.parametrize("out", [torch.zeros(3, 4, 5), bytes_of_size(4, 5).permute(2, 0, 1), torch.zeros(4, 5)])
def test_other_results_are_refused(out):
    with pytest.raises(RuntimeError, match="out must"):
        torch.ops.flatout.resample_images([IMAGE], GOOD, [out], [], [])


@pytest.mark.parametrize("mean", [[], MEAN])
def test_the_operator_can_be_traced(mean):
    images = [torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8) for _ in range(2)]
    out = [torch.zeros(3, 4, 5) if mean else bytes_of_size(4, 5) for _ in images]
    arguments = (images, [*GOOD, *GOOD], out, mean, STD if mean else [])
    torch.library.opcheck(torch.ops.flatout.resample_images.default, arguments)


CHANGES = {
    "size of a crop": None,
    "filter": lambda steps: setattr(steps[0], "interpolation", transforms.InterpolationMode.NEAREST),
    "antialiasing": lambda steps: setattr(steps[0], "antialias", False),
    "mean": lambda steps: setattr(steps[3], "mean", [0.0, 0.0, 0.0]),
    "element of std": lambda steps: steps[3].std.__setitem__(0, 0.5),
    "hook": lambda steps: steps[1].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_the_native_form_does_not_follow_ends_it(name):
    floats = [transforms.ToTensor(), transforms.Normalize(list(MEAN), list(STD))]
    steps = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), *floats]
    tail = native_tail(steps)
    assert tail.is_current()
    if CHANGES[name] is None:  # read at each draw
        steps[0].size = (9, 10)
        pixels = np.zeros((30, 30, 3), np.uint8)
        assert run([tail.draw(pixels)])[0].shape == (3, 9, 10)
    else:
        CHANGES[name](steps)
    assert tail.is_current() == (CHANGES[name] is None)
