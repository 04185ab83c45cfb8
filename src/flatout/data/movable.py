"""``movable_transforms``: torch work per sample that the device could do on whole batches."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, default_collate, default_convert

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


WORTH_NAMING = 0.03
"""Smallest share of a sample's time that is reported."""

FEWEST = 4
"""Smallest number of samples that shows which work every sample needs."""

_GROUP = 4  # samples in each batch for the collate_fn
_NORMALIZING = re.compile(
    "view|reshape|permute|contiguous|clone|unsqueeze|requires_grad_|to|type|float|half|bfloat16|(div|mul|sub|add)_?"
    "|tensor|as_tensor"
)


class NotExamined(ValueError):
    """Samples that cannot be examined. The message says why."""


@dataclass(frozen=True)
class MovableWork:
    """Torch work on the CPU, done for each sample, that the device could do for a whole batch.

    Attributes:
        place: ``file:line``, or the expression that reaches a library's transform: ``dataset.transform.transforms[2]``.
        file: file of the user's code, ``"Cell In[3]"`` in a notebook; None if all the code is a library's.
        line: line in ``file``.
        what: class of the transform, or the user's function.
        operators: names of the torch functions, each once, in order.
        seconds: duration per sample on the calling thread.
        share: share of a sample's time, between 0 and 1.
        normalizes: True if the work is part of a conversion of bytes to normalized floats, as in
            ``flatout.data.Normalize``.
    """

    place: str
    file: str | None
    line: int | None
    what: str
    operators: tuple[str, ...]
    seconds: float
    share: float
    normalizes: bool

    @property
    def advice(self) -> str:
        """Change of the user's code that moves the work."""
        if self.normalizes:
            return (
                "keep the samples uint8, and give flatout.data.Normalize to flatout.data.Prefetcher(transform=...): "
                "it makes normalized floats of whole batches on the device"
            )
        return "give it to flatout.data.Prefetcher(transform=...), to be done for whole batches on the device"

    def __str__(self) -> str:
        operators = ", ".join(name.strip("_") if name.startswith("__") else name for name in self.operators)
        cost = f"{self.seconds * 1e3:.2f} ms, {100 * self.share:.0f} % of a sample's time"
        return f"{self.place}: {self.what} ({operators}) takes {cost}"


def movable_transforms(
    source: DataLoader | Dataset, samples: int = 8, seconds: float = math.inf
) -> tuple[MovableWork, ...]:
    """Find the torch work in a dataset's samples, and in a ``collate_fn``, that could run on whole batches.

    A few samples are evaluated on the calling thread, each twice. The torch calls of the second evaluation are
    recorded. Work is reported if all samples make the same calls with the same arguments and shapes. Only the tensors
    of the sample may depend on the results. Work that precedes a random choice, NumPy or a value read by Python is not
    reported. Random generators are restored.

    Work of NumPy and Python is not recorded, nor is a choice between tensors without a torch call. The files of the
    samples have just been read, so times exclude the disk.

    Args:
        source: a DataLoader over a map-style dataset, or the dataset.
        samples: number of samples to evaluate, spread over the dataset.
        seconds: time limit. At least ``FEWEST`` samples are needed.

    Returns:
        Work that takes at least ``WORTH_NAMING`` of a sample's time, the costliest first.

    Raises:
        ValueError: ``samples`` is less than ``FEWEST``.
        NotExamined: the dataset is not map-style, a sample raises, or samples take too long.
    """
    if samples < FEWEST:
        raise ValueError(f"samples must be >= {FEWEST}, got {samples}")
    dataset, collate = _parts(source)
    roots = {"dataset": dataset} | ({} if collate is None else {"collate_fn": collate})
    with RandomState.capture(list(roots.values())).restored(), _threads_of(source):
        recorder = CallRecorder(roots)
        made, recorded = _record_samples(recorder, dataset, samples, seconds)
        sample_seconds = median(each.seconds for each in recorded)
        work = _movable(recorded)
        if collate is not None:
            groups = [made[start : start + _GROUP] for start in range(0, len(made) - _GROUP + 1, _GROUP)]
            with _errors_in("collate_fn"):
                batches = [recorder.record(collate, group) for group in groups]
            sample_seconds += median(each.seconds for each in batches) / _GROUP
            given = storages_of(made)
            if any(call.name != "stack" for call in batches[0].calls if call.reads & given):
                work = []  # the collate_fn changes samples, for example by padding
            work += [(call, took / _GROUP) for call, took in _movable(batches)]
    return _findings(work, sample_seconds)


def _parts(source: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the map-style dataset, and the collate_fn if it is not torch's own."""
    dataset, collate = source, None
    if isinstance(source, DataLoader):
        dataset = source.dataset
        collate = None if source.collate_fn in (default_collate, default_convert) else source.collate_fn
    if isinstance(dataset, (IterableDataset, MapDataPipe)) or not hasattr(dataset, "__getitem__"):
        raise NotExamined(f"the dataset is a {type(dataset).__name__}, not map-style")
    if not hasattr(dataset, "__len__"):
        raise NotExamined(f"the dataset, a {type(dataset).__name__}, has no length")
    if len(dataset) == 0:
        raise NotExamined("the dataset is empty")
    return dataset, collate


@contextmanager
def _threads_of(source: Any) -> Iterator[None]:
    """Use as many threads as the process that makes the samples: one in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if getattr(source, "num_workers", 0) else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _errors_in(code: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the user's own code: it raises again in the training
        raise NotExamined(f"{code} raised {type(error).__name__}: {error}") from error


def _record_samples(
    recorder: CallRecorder, dataset: Any, samples: int, seconds: float
) -> tuple[list[Any], list[Recording]]:
    """Return all evaluated samples, and a recording of the second evaluation of each."""

    def fetch(index: int) -> Any:
        return dataset.__getitems__([index])[0] if hasattr(dataset, "__getitems__") else dataset[index]

    made: list[Any] = []
    recorded: list[Recording] = []
    begun = time.perf_counter()
    for index in (i * len(dataset) // samples for i in range(samples)):
        with _errors_in(f"dataset[{index}]"):
            made.append(fetch(index))  # imports modules, reads the file and fills caches
            if time.perf_counter() - begun > seconds:
                break
            recorded.append(recorder.record(fetch, index))
    if len(recorded) < FEWEST:
        raise NotExamined(f"there are {seconds:.2g} s for this, in which {len(made)} samples were made")
    return made + [each.result for each in recorded], recorded


def _movable(recordings: Sequence[Recording]) -> list[tuple[TorchCall, float]]:
    """Return the calls that only the results depend on, in order, each with its median seconds.

    The recordings are compared call by call from their ends. A call stays if it differs between recordings or if a
    call that stays needs its results.
    """
    if any(len(each.calls) >= MOST_CALLS for each in recordings):
        raise NotExamined(f"a sample or a batch takes {MOST_CALLS:,} torch operations or more")
    results, staying = storages_of(recordings[0].result), frozenset[int]()
    moving: list[tuple[TorchCall, float]] = []
    for call, *others in zip(*(reversed(each.calls) for each in recordings), strict=False):
        twins = [call, *others]
        if any(twin.stays or twin.key != call.key for twin in twins) or call.writes & staying:
            staying |= call.reads
        elif call.writes & results:
            results |= call.reads
            moving.append((call, median(twin.seconds for twin in twins)))
    return moving[::-1]


def _findings(work: Sequence[tuple[TorchCall, float]], sample_seconds: float) -> tuple[MovableWork, ...]:
    """Return a finding for each function and transform, at its costliest line."""
    groups: dict[Place, list[tuple[float, int, str]]] = {}
    for call, took in work:
        if call.place is not None:
            groups.setdefault(call.place._replace(line=0), []).append((took, call.place.line, call.name))
    from_bytes = any(call.to_float for call, _ in work)
    found = []
    for (file, _, way, what), group in groups.items():
        seconds, line = sum(took for took, _, _ in group), max(group)[1] or None
        place = way or f"{str(file).removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
        names = tuple(dict.fromkeys(name for _, _, name in group))
        normalizes = from_bytes and all(map(_NORMALIZING.fullmatch, names))
        share = min(1.0, seconds / sample_seconds)
        found.append(MovableWork(place, file, line, what, names, seconds, share, normalizes))
    return tuple(sorted((each for each in found if each.share >= WORTH_NAMING), key=lambda each: -each.seconds))
