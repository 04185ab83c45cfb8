"""Torch calls of a function: duration of each, and its place in the user's code or in a pipeline of transforms."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatout.core.batches import map_tensors, tensors_of
from flatout.core.random_state import RandomState

MOST_CALLS = 2000
"""Limit of the calls in one recording."""

_MOST_OBJECTS, _MOST_ELEMENTS = 10_000, 64  # reachable from the roots, and of one container
_LIBRARIES = {"torch", "flatout", *sys.stdlib_module_names}
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_METADATA = re.compile(
    "__get__|__len__|__hash__|dim|ndimension|size|numel|nelement|stride|storage_offset|element_size|get_device"
    "|is_(contiguous|floating_point|complex|signed|pinned|same_size)"
)


class Place(NamedTuple):
    """Code that calls torch: a line of the user's, or else a library's transform."""

    file: str | None
    line: int
    way: str  # expression that reaches the transform, such as "dataset.transform.transforms[2]"
    what: str  # class of the transform, or the user's function


class TorchCall(NamedTuple):
    """One call of a torch function."""

    key: Hashable  # name, lines, arguments and shapes: equal for the same call in another sample
    name: str
    seconds: float
    reads: frozenset[int]  # storages of the arguments
    writes: frozenset[int]  # storages of the results
    stays: bool  # joins tensors, returns none, uses a device, or may depend on a random number
    to_float: bool  # converts bytes to floats
    place: Place | None


class Recording(NamedTuple):
    """Result of a function, its torch calls in order, and its duration without the recorder's."""

    result: Any
    calls: list[TorchCall]
    seconds: float


class CallRecorder(TorchFunctionMode):
    """Records the torch calls that a function makes on this thread.

    Args:
        roots: objects by name, such as the dataset, that hold the transforms and random generators.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        super().__init__()
        self._ways = _ways(roots)
        self._random = RandomState.capture(list(roots.values()))

    def record(self, function: Callable[..., Any], *arguments: Any) -> Recording:
        """Call a function and record its torch calls."""
        self._calls: list[TorchCall] = []
        self._alive: list[Any] = []  # a new tensor must not reuse a storage
        self._random_callers: dict[int, Any] = {}
        self._random = self._random.reread()
        self._overhead = 0.0
        begun = time.perf_counter()
        with self:
            result = function(*arguments)
        return Recording(result, self._calls, time.perf_counter() - begun - self._overhead)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter()
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if _METADATA.fullmatch(name) or len(self._calls) >= MOST_CALLS:
            return func(*args, **kwargs)
        frames = list(_frames(sys._getframe(1)))
        callers = [_caller(frame) for frame in frames]
        started = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - started
        self._note_draw(callers)
        depends = any(id(caller) in self._random_callers for caller in callers)
        joins = any(isinstance(each, (list, tuple)) and len(tensors_of(each)) > 1 for each in args)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(args[0] if name == "__setitem__" else result)
        shapes = repr(map_tensors(lambda tensor: (tensor.dtype, tensor.shape), (args, kwargs, outputs)))
        call = TorchCall(
            key=(name, shapes, *((frame.f_code, frame.f_lineno) for frame in frames)),
            name=name,
            seconds=seconds,
            reads=storages_of(inputs),
            writes=storages_of(outputs),
            stays=depends or joins or not outputs or any(t.device.type != "cpu" for t in outputs),
            to_float=any(t.dtype.is_floating_point for t in outputs) and any(t.dtype is torch.uint8 for t in inputs),
            place=self._place(frames, callers),
        )
        self._calls.append(call)
        self._alive += [args, kwargs, result]
        self._overhead += time.perf_counter() - begun - seconds
        return result

    def _note_draw(self, callers: list[Any]) -> None:
        """Note the callers if a generator has moved since the last call. Their calls may depend on the draw."""
        if self._random.moved() is None:
            return
        self._random = self._random.reread()
        for caller in callers:
            self._random_callers[id(caller)] = caller
            if not isinstance(caller, FrameType):
                break  # a transform returns data to its caller, not a choice

    def _place(self, frames: list[FrameType], callers: list[Any]) -> Place | None:
        own = next((i for i, frame in enumerate(frames) if _is_own(frame)), None)
        transform = next((caller for caller in callers[:own] if not isinstance(caller, FrameType)), None)
        what = type(transform).__name__
        if own is None:
            way = self._ways.get(id(transform))
            return None if transform is None or way is None else Place(None, 0, way, what)
        code = frames[own].f_code
        if transform is None:
            what = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]  # Python 3.11
        return Place(_shown(code.co_filename), frames[own].f_lineno, "", what)


def storages_of(batch: Any) -> frozenset[int]:
    """Return the addresses of the tensors' storages. Views share a storage."""
    return frozenset(map(_storage, tensors_of(batch)))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # such as sparse tensors
        return id(tensor)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from a torch call to ``CallRecorder.record``, innermost first."""
    while frame is not None and frame.f_code is not CallRecorder.record.__code__:
        yield frame
        frame = frame.f_back


def _caller(frame: FrameType) -> Any:
    """Return the transform, a callable object, whose method runs in a frame; else the frame."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_transform = callable(owner) and hasattr(type(owner), code.co_name) and not isinstance(owner, (type, Tensor))
    return owner if is_transform else frame


def _is_own(frame: FrameType) -> bool:
    """Return True if a frame runs the user's code: in a notebook or prompt, or in a file that is not installed."""
    package = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]  # torch.fx gives no name
    return package not in _LIBRARIES and not _INSTALLED.search(frame.f_code.co_filename)


def _shown(filename: str) -> str:
    """Return the name of the notebook's cell whose temporary file this is, else the file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    return filename if known is None else " ".join(known)


def _ways(roots: Mapping[str, Any]) -> dict[int, str]:
    """Return the shortest expression that reaches each object, by id: ``dataset.transform.transforms[2]``."""
    ways: dict[int, str] = {}
    left = deque(roots.items())
    while left and len(ways) < _MOST_OBJECTS:
        way, node = left.popleft()
        if id(node) not in ways:
            ways[id(node)] = way
            left.extend((way + step, child) for step, child in _children(node))
    return ways


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        return ((f"[{key!r}]", child) for key, child in islice(node.items(), _MOST_ELEMENTS))
    if isinstance(node, (list, tuple)):
        return ((f"[{i}]", child) for i, child in enumerate(node[:_MOST_ELEMENTS]))
    return ((f".{name}", child) for name, child in getattr(node, "__dict__", {}).items())
