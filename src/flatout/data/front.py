"""Front of a dataset's transforms: the steps before the first one that may draw random numbers."""

from __future__ import annotations

import copy
import dis
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from flatout.core.batches import map_tensors
from flatout.data.decode import pixels_of, why_not_decodable
from flatout.data.native_tail import Drawn, NativeTail, native_tail, run
from flatout.data.packed import Pixels

Step = Callable[..., Any]

_LIBRARIES = ("torchvision.transforms.", "timm.data.transforms.")
_DETERMINISTIC = {
    *("CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "MaybePILToTensor", "MaybeToTensor", "Normalize"),
    *("Pad", "PILToTensor", "RGB", "Resize", "ToDtype", "ToImage", "ToNumpy", "ToPILImage", "ToPureTensor", "ToTensor"),
}
_CALLED_SO = re.compile("transform|augment|tfm|preprocess|(^|_)augs?(_|$)")
"""Names of attributes that hold a transform of the user's."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DEEPEST = 4
"""Levels of datasets within datasets, such as a ``Subset`` of an ``ImageFolder``."""


class _Args(tuple):
    """Several positional arguments of a transform."""

    __slots__ = ()


class _Kwargs(dict):
    """Keyword arguments of a transform, as those of albumentations have."""


class Cut:
    """Value between the front of a transform and the rest of it. A sample holds it as a leaf.

    Args:
        value: result of the front.
        number: position among the values of a sample, in the order in which the dataset makes them.
        rest: for each transform that is still to run, its number and its first step.
        key: item of the transform's result; None for the whole result.
    """

    def __init__(
        self, value: Any, number: int, rest: tuple[tuple[int, int], ...], key: int | str | None = None
    ) -> None:
        self.value, self.number, self.rest, self.key = value, number, rest, key


@dataclass(eq=False)
class Front:
    """Copy of a dataset whose transforms run up to the first step that may draw. Its samples hold :class:`Cut`.

    Attributes:
        dataset: the copy. Its other attributes are those of the user's dataset.
        transforms: steps of each transform that was cut.
        lengths: number of steps in the front of each transform.
        tails: native form of the steps after the front of each transform, or None.
        may_catch: True if the dataset may catch an error of a transform: its code has a ``try`` or ``with``.
        why_not_read: reason why the copy does not read image files for the native forms; empty if it does.
    """

    dataset: Any = None
    transforms: list[list[Step]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tails: list[NativeTail | None] = field(default_factory=list)
    may_catch: bool = False
    why_not_read: str = "the dataset is no ImageFolder of torchvision with torchvision's own loader"
    _made: dict[int, int] = field(default_factory=dict)  # cut values of the current sample, by thread

    def sample(self, index: Any) -> Any:
        """Return sample ``index`` after the front."""
        self._made[threading.get_ident()] = 0
        return self.dataset[index]

    def changed_attributes(self, dataset: Any) -> Iterator[tuple[Any, str, Any]]:
        """Yield the owner, name and new value of each attribute that the copy has set since it was made."""
        yield from _changed_attributes(dataset, self.dataset)

    def finished(self, sample: Any) -> Any:
        """Run the rest of the transforms, in the order in which the dataset runs them."""
        return self.run([self.drawn(sample)])[0]

    def drawn(self, sample: Any) -> Any:
        """Draw the random numbers of the remaining transforms. :meth:`run` then runs those in native code."""
        done: dict[int, Any] = {}
        for cut in sorted(cuts_in(sample), key=lambda cut: cut.number):
            if cut.number not in done:
                done[cut.number] = self._rest_of(cut)

        def result(leaf: Any) -> Any:
            if type(leaf) is not Cut:
                return leaf
            return done[leaf.number] if leaf.key is None else done[leaf.number][leaf.key]

        return _mapped(result, sample)

    def run(self, samples: list[Any]) -> list[Any]:
        """Return the samples of :meth:`drawn` after their native transforms, which run together."""
        images = {id(image): image for sample in samples for image in leaves_in(sample, Drawn)}
        if not images:
            return samples
        done = dict(zip(images, run(list(images.values())), strict=True))
        return [_mapped(lambda leaf: done.get(id(leaf), leaf), sample) for sample in samples]

    def tail(self, number: int) -> NativeTail | None:
        """Return the native form of the steps after the front of a transform, if these steps are still the same."""
        tail = self.tails[number]
        return tail if tail is not None and tail.is_current() else None

    @property
    def is_native(self) -> bool:
        """True if native code makes samples from their files."""
        return not self.why_not_read and any(self.tails)

    def use_native_code(self) -> bool:
        """Find the native forms. Return True if there are any."""
        parts = (steps[length:] for steps, length in zip(self.transforms, self.lengths, strict=True))
        self.tails = [native_tail(part) for part in parts]
        return any(self.tails)

    def use_python(self) -> None:
        """Run the transforms themselves."""
        self.tails = [None] * len(self.transforms)

    def values(self, cut: Cut) -> Iterator[Any]:
        """Yield the values between the steps after a cut, up to the first step that may draw."""
        number, first = cut.rest[0]
        value = cut.value
        yield value
        for step in self.transforms[number][first : _deterministic_steps(self.transforms[number])]:
            value = _applied(step, value)
            yield value

    def _rest_of(self, cut: Cut) -> Any:
        value, done = cut.value, 0
        if type(value) is Pixels:
            number, first = cut.rest[0]
            tail = self.tail(number)
            if tail is None:
                value = sys.modules["PIL.Image"].fromarray(value.array)
            elif len(cut.rest) == 1 and first + tail.length == len(self.transforms[number]):
                return tail.draw(value.array)
            else:
                value, done = run([tail.draw(value.array)])[0], tail.length
        for number, first in cut.rest:
            begin, done = first + done, 0
            for step in self.transforms[number][begin:]:
                value = _applied(step, value)
        return value

    def _cut(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value: Any = args[0] if len(args) == 1 and not kwargs else _Kwargs(kwargs) if kwargs else _Args(args)
        if type(value) is Cut and value.key is None:  # one transform's result is the argument of the next
            return Cut(value.value, value.number, (*value.rest, (number, 0)))
        if (args and kwargs) or any(type(each) is Cut for each in (*args, *kwargs.values())):
            raise TypeError("the arguments of a transform are no values of one kind")
        thread = threading.get_ident()
        length, order = self.lengths[number], self._made[thread]
        self._made[thread] += 1
        self.may_catch = self.may_catch or _is_in_try(sys._getframe(2))
        for step in self.transforms[number][:length]:
            value = _applied(step, value)
        if getattr(value, "mode", "") == "RGB" and (tail := self.tail(number)) is not None:
            width, height = value.size
            value = Pixels(np.array(value)) if tail.fits(height, width) else value
        rest = ((number, length),)
        if type(value) is _Kwargs:
            return {key: Cut(value, order, rest, key) for key in value}
        return (
            tuple(Cut(value, order, rest, i) for i in range(len(value)))
            if type(value) is _Args
            else Cut(value, order, rest)
        )


def _applied(step: Step, value: Any) -> Any:
    if type(value) is _Kwargs:
        return step(**value)
    return _Args(step(*value)) if type(value) is _Args else step(value)


@dataclass(frozen=True)
class _CutTransform:
    """Transform of a :class:`Front`, in place of the user's."""

    front: Front
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.front._cut(self.number, args, kwargs)


@dataclass(frozen=True)
class _PixelLoader:
    """Loader of image files of a :class:`Front`, in place of torchvision's. It returns bytes for a native tail."""

    front: Front
    number: int
    loader: Callable[[str], Any]
    functions: list[Any]

    def __call__(self, path: str) -> Any:
        tail = None if self.front.lengths[self.number] else self.front.tail(self.number)
        if tail is None or _functions_of_folder() != self.functions:
            return self.loader(path)
        pixels = pixels_of(path)
        return self.loader(path) if pixels is None or not tail.fits(*pixels.shape[:2]) else Pixels(pixels)


_TRY = {dis.opmap[name] for name in ("SETUP_FINALLY", "SETUP_WITH") if name in dis.opmap}


def _is_in_try(frame: FrameType | None) -> bool:
    """Return True if one of the callers within ``Front.sample`` has code with a ``try`` or ``with``."""
    while frame is not None and frame.f_code is not Front.sample.__code__:
        code = frame.f_code
        if getattr(code, "co_exceptiontable", b"") or (
            sys.version_info < (3, 11) and not _TRY.isdisjoint(code.co_code[::2])
        ):
            return True
        frame = frame.f_back
    return False


def _changed_attributes(holder: Any, copied: Any) -> Iterator[tuple[Any, str, Any]]:
    if copied is holder:
        return
    before = vars(holder)
    for name, value in list(vars(copied).items()):
        old = before.get(name)
        if value is old or type(value) in (_CutTransform, _PixelLoader):
            continue
        if isinstance(old, Dataset) or type(old).__qualname__ == "StandardTransform":
            yield from _changed_attributes(old, value)
        elif type(old) is list and any(isinstance(each, Dataset) for each in old):
            for inner, its_copy in zip(old, value, strict=True):
                yield from _changed_attributes(inner, its_copy)
        else:
            yield holder, name, value


def front_of(dataset: Any) -> Front | None:
    """Return the front of a dataset, with no step in it. None if the dataset has no transform.

    A transform is an attribute of the dataset, or of a dataset inside it. It is a transform of torchvision or timm, or
    a callable whose name says that it is one. The user's objects do not change.
    """
    front = Front()
    front.dataset = _with_cuts(dataset, front, _DEEPEST)
    return front if front.transforms else None


def cuts_in(sample: Any) -> list[Cut]:
    """Return all cut values in a sample."""
    return leaves_in(sample, Cut)


def leaves_in(sample: Any, kind: type) -> list[Any]:
    """Return the leaves of a sample with exactly this type, in the order of :func:`map_tensors`."""
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        if type(leaf) is kind:
            found.append(leaf)
        return leaf

    _mapped(look, sample)
    return found


def _mapped(change: Callable[[Any], Any], sample: Any) -> Any:
    return map_tensors(lambda tensor: tensor, sample, change)


def _with_cuts(holder: Any, front: Front, depth: int) -> Any:
    """Return a copy of a dataset with cut transforms; the dataset itself if there is nothing to cut."""
    attributes = getattr(holder, "__dict__", None)
    if attributes is None or not depth:
        return holder
    changed: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, Dataset) or type(value).__qualname__ == "StandardTransform":
            made: Any = _with_cuts(value, front, depth - 1)
        elif type(value) is list and value and all(isinstance(each, Dataset) for each in value):  # ConcatDataset
            made = [_with_cuts(each, front, depth - 1) for each in value]
            made = value if all(map(is_, made, value)) else made
        elif _is_transform(value, name):
            made = _cut_transform(value, front)
        else:
            continue
        if made is not value:
            changed[name] = made
    if not changed:
        return holder
    if type(changed.get("transform")) is _CutTransform and _is_folder_of_images(holder):
        front.why_not_read = why_not_decodable()
        if not front.why_not_read:
            changed["loader"] = _PixelLoader(front, changed["transform"].number, holder.loader, _functions_of_folder())
    copied = copy.copy(holder)
    vars(copied).update(changed)
    return copied


def _is_folder_of_images(holder: Any) -> bool:
    """Return True for an ``ImageFolder`` whose images come from torchvision's own loader."""
    folder = sys.modules.get("torchvision.datasets.folder")
    return (
        folder is not None
        and getattr(type(holder), "__getitem__", None) is folder.DatasetFolder.__getitem__
        and getattr(holder, "loader", None) in (folder.default_loader, folder.pil_loader)
        and sys.modules["torchvision"].get_image_backend() == "PIL"
    )


def _functions_of_folder() -> list[Any]:
    """Return the functions and the backend with which torchvision loads images, to be compared."""
    folder, torchvision = sys.modules["torchvision.datasets.folder"], sys.modules["torchvision"]
    return [folder.default_loader, folder.pil_loader, torchvision.get_image_backend()]


def runs_known_code(dataset: Any) -> bool:
    """Return True if only code of torch and torchvision runs before the transforms of a dataset."""
    return _is_folder_of_images(dataset) or (type(dataset) is Subset and runs_known_code(dataset.dataset))


def _cut_transform(transform: Any, front: Front) -> _CutTransform:
    """Return the cut form of a transform. A transform in two attributes, as in ``VisionDataset``, is cut once."""
    steps = list(_steps_of(transform))
    for number, known in enumerate(front.transforms):
        if len(known) == len(steps) and all(map(is_, known, steps)):
            return _CutTransform(front, number)
    front.transforms.append(steps)
    front.lengths.append(0)
    front.tails.append(None)
    return _CutTransform(front, len(front.transforms) - 1)


def _deterministic_steps(steps: Sequence[Step]) -> int:
    """Return the number of steps before the first one that may draw random numbers."""
    return next((i for i, step in enumerate(steps) if not _is_deterministic(step)), len(steps))


def _steps_of(transform: Any) -> Iterator[Step]:
    """Yield the steps of a transform, those of nested ``Compose`` objects included."""
    is_sequential = type(transform) is torch.nn.Sequential
    is_compose = type(transform).__name__ == "Compose" and _is_of_library(transform)
    if (is_sequential or is_compose) and not any(getattr(transform, name, None) for name in _HOOKS):
        for step in transform if is_sequential else transform.transforms:
            yield from _steps_of(step)
    else:
        yield transform


def _is_transform(value: Any, name: str) -> bool:
    """Return True if an attribute is a transform of torchvision or timm, or a callable that is called a transform."""
    if not callable(value) or isinstance(value, type):
        return False
    return _is_of_library(value) or _CALLED_SO.search(name) is not None


def _is_deterministic(step: Step) -> bool:
    """Return True if a step is known to draw no random numbers, and to depend on its arguments alone."""
    return type(step).__name__ in _DETERMINISTIC and _is_of_library(step)


def _is_of_library(value: Any) -> bool:
    return f"{type(value).__module__}.".startswith(_LIBRARIES)
