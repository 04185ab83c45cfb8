"""Watches a call and writes down every torch operation on the way: what it reads and writes, and where it stands."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatout.core.batches import tensors_of
from flatout.core.random_state import RandomState
from flatout.data.transform_places import Place, Places, is_own, package_of, transform_of

MOST = 2000
"""Operations that are looked at in one call; a sample with more is a program of its own."""

_SMALL = 64 * 1024  # bytes of a tensor that is compared by value: means, windows, matrices
_METADATA = re.compile(
    "__get__|__len__|__hash__|dim|ndimension|size|numel|nelement|stride|storage_offset|element_size|get_device"
    "|is_(contiguous|floating_point|complex|signed|pinned|same_size)"
)
_CONTAINERS = ("Compose", "Sequential", "StandardTransform")
_FETCHING = ("__getitem__", "__getitems__", "<listcomp>")  # of a library's dataset
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Input:
    """A tensor that an operation reads.

    Attributes:
        memory: names its storage within one recording.
        producer: key of the operation that wrote there last; None when no operation did.
        dtype: its element type.
        shape: its sizes.
        value: equal where the values are; None where an operation produced it.
    """

    memory: int
    producer: Hashable | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Hashable = None


@dataclass(frozen=True)
class Operation:
    """One torch operation of a call.

    Attributes:
        key: the same for the same operation of another call of the same function.
        name: as torch spells it: ``sub_``.
        seconds: what it took.
        inputs: every tensor in its arguments, in order.
        settings: every other argument.
        floats: whether it makes floats of bytes.
        drew: whether it drew random numbers.
        stays: whether it has to run where it does: it drew, may depend on a choice that was drawn, hands memory or
            values to Python or NumPy, or does not run on the CPU at all.
        place: where it comes from; None when that cannot be told.
    """

    key: Hashable
    name: str
    seconds: float
    inputs: tuple[Input, ...]
    settings: Hashable
    floats: bool
    drew: bool
    stays: bool
    place: Place | None


@dataclass
class Recording:
    """What a call did.

    Attributes:
        operations: in the order in which they ran.
        result: what the call returned.
        producers: keys of the operations that wrote the tensors of ``result``.
        seconds: what the call took, without the watching.
        kept: objects that must outlive the recording, so that no other gets their identity.
    """

    operations: list[Operation] = field(default_factory=list)
    result: Any = None
    producers: list[Hashable] = field(default_factory=list)
    seconds: float = 0.0
    kept: list[Any] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Records the torch operations that one call after the other makes on this thread.

    Sees torch as Python calls it, with the caller's frames at hand; a dispatch mode sees the same work in ATen's
    words, costs the same 10 microseconds an operation, and takes functions such as ``interpolate`` apart.

    Args:
        roots: what transforms and generators may be reached from, by name: the dataset.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        super().__init__()
        self._places = Places(roots)
        self._random = RandomState.capture(list(roots.values()))

    def record(self, function: Callable[..., Any], *arguments: Any) -> Recording:
        """Call ``function`` and write down what it does. Whatever it raises comes out."""
        self._recording = Recording()
        self._producers: dict[int, Hashable] = {}
        self._seen: Counter[Hashable] = Counter()
        self._chose: set[FrameType] = set()  # calls whose course a random choice may have decided
        self._random = self._random.reread()
        self._watching = 0.0
        try:
            begun = time.perf_counter()
            with self:
                self._recording.result = function(*arguments)
            self._recording.seconds = time.perf_counter() - begun - self._watching
        finally:
            self._chose.clear()
        for tensor in tensors_of(self._recording.result):
            self._recording.producers.append(self._producers.get(memory_of(tensor)))
        return self._recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter()
        name = getattr(func, "__name__", str(func))
        kwargs = kwargs or {}
        tells_type = name == "type" and len(args) == 1 and not kwargs
        if tells_type or _METADATA.fullmatch(name) or len(self._recording.operations) >= MOST:
            return func(*args, **kwargs)
        frames = list(_frames(sys._getframe(1)))
        self._note_choices_since(frames)
        inputs, settings = self._arguments(args, kwargs)
        started = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - started
        drew = self._note_choice(frames)
        outputs = _tensors(result)
        written = [memory_of(t) for t in outputs]
        if _writes_first(name):
            written += [memory_of(t) for t in _tensors(args[:1])]
        # Nothing written: a value for Python, or memory for NumPy. What happens there is not seen.
        stays = drew or not written or any(frame in self._chose for frame in frames)
        stays |= any(t.device.type != "cpu" for t in outputs)
        where = tuple((frame.f_code, frame.f_lineno) for frame in frames), name
        key = *where, self._seen[where]
        self._seen[where] += 1
        self._producers.update(dict.fromkeys(written, key))
        self._recording.kept += [args, kwargs, result]
        floats = any(t.dtype.is_floating_point for t in outputs) and any(t.dtype is torch.uint8 for t in inputs)
        place = self._places.of(frames)
        self._recording.operations.append(Operation(key, name, seconds, inputs, settings, floats, drew, stays, place))
        self._watching += time.perf_counter() - begun - seconds
        return result

    # -- random choices --------------------------------------------------------------------------------------

    def _note_choices_since(self, frames: list[FrameType]) -> None:
        """Python or NumPy drew since the last operation: nobody knows for which of the calls under way."""
        if self._random.moved() is not None:
            self._random = self._random.reread()
            self._chose.update(frame for frame in frames if not _passes_data_on(frame))

    def _note_choice(self, frames: list[FrameType]) -> bool:
        """The operation drew: for the function that called it and its callers, up to a whole transform's call."""
        if self._random.moved() is None:
            return False
        self._random = self._random.reread()
        transform: Any = None
        for frame in frames:
            owner = transform_of(frame)
            if transform is not None and owner is not transform:
                break  # behind the call of a torchvision transform: what it gives back is data, no choice
            if package_of(owner) == "torchvision":
                transform = owner
            self._chose.add(frame)
        return True

    # -- arguments -------------------------------------------------------------------------------------------

    def _arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Input, ...], Hashable]:
        inputs: list[Input] = []

        def frozen(value: Any) -> Hashable:
            if isinstance(value, Tensor):
                inputs.append(self._input(value))
                return Tensor
            if isinstance(value, _PLAIN):
                return type(value), repr(value)
            if isinstance(value, _TORCH_PLAIN):
                return value
            if isinstance(value, slice):
                return slice, frozen(value.start), frozen(value.stop), frozen(value.step)
            if isinstance(value, (list, tuple)):
                return type(value), tuple(map(frozen, value))
            if isinstance(value, dict):
                return dict, tuple((key, frozen(item)) for key, item in value.items())
            if isinstance(value, (np.ndarray, np.generic)) and value.nbytes <= _SMALL and value.dtype != object:
                return value.dtype.str, value.shape, value.tobytes()
            return id(value)

        settings = frozen(args), frozen(kwargs)
        return tuple(inputs), settings

    def _input(self, tensor: Tensor) -> Input:
        memory = memory_of(tensor)
        producer = self._producers.get(memory)
        value = _value(tensor) if producer is None else None
        return Input(memory, producer, tensor.dtype, tuple(tensor.shape), value)


def memory_of(tensor: Tensor) -> int:
    """Names the storage of a tensor for as long as it lives; views share it."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, and others without a storage
        return id(tensor)


def _value(tensor: Tensor) -> Hashable:
    """Equal for tensors of equal values; large ones are compared by identity."""
    plain = tensor.detach().as_subclass(Tensor)
    try:
        if plain.numel() * plain.element_size() <= _SMALL:
            return plain.dtype, plain.shape, plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    except (NotImplementedError, RuntimeError, TypeError):
        pass  # not dense, or not in this machine's memory
    return id(tensor)


def _tensors(value: Any) -> list[Tensor]:
    """Tensors of a result or of arguments, which are nested in tuples and lists at most."""
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []


def _writes_first(name: str) -> bool:
    """Whether an operation of this name changes its first argument."""
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames between an operation and ``Recorder.record``, innermost first."""
    while frame is not None and frame.f_code is not Recorder.record.__code__:
        yield frame
        frame = frame.f_back


def _passes_data_on(frame: FrameType) -> bool:
    """Whether the function hands data from one transform to the next and decides nothing itself."""
    if is_own(frame):
        return False
    if frame.f_code.co_name in _FETCHING or str(frame.f_globals.get("__name__")).startswith("flatout.data."):
        return True
    owner = transform_of(frame)
    return package_of(owner) in ("torch", "torchvision") and type(owner).__name__ in _CONTAINERS
