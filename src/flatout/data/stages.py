"""``sample_stages``: time of a batch by stage, with the lines and transforms that take it."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from flatout.core import formatting
from flatout.core.batches import to_device
from flatout.core.effects import Unrepeatable
from flatout.core.random_state import RandomState
from flatout.core.reachable import is_users
from flatout.data.cache import samples_of, why_not_map_style
from flatout.data.loaders import reading_again
from flatout.data.samples import NotCacheable

Name = Literal["read", "decode", "resize", "transform", "collate", "copy"]

FEWEST = 4
"""Smallest number of samples whose times are reported."""

WORTH_NAMING = 0.005
"""Smallest share of a batch that is reported."""

_MOST_OVERHEAD = 5e-6
"""Limit of the seconds that one event of the profiler adds. Larger differences are noise of the samples."""

_MOST_OBJECTS, _MOST_ELEMENTS = 10_000, 64  # reachable from the roots, and of one container
_CODE_OF_STAGES: Sequence[tuple[Name, re.Pattern[str]]] = (
    ("read", re.compile(r"(_?io|posix|nt|mmap|_?(socket|ssl|sqlite3)|zipfile|tarfile|fsspec|h5py|lmdb|pyarrow)\.")),
    ("read", re.compile(r".*\.(fromfile|read_file|memmap)")),
    ("decode", re.compile(r"PIL\.(ImageFile\.|\w+ImagePlugin\.|Image\.open$)|torch\.serialization\.")),
    ("decode", re.compile(r"(zlib|_?bz2|_?lzma|_?pickle|_?json|_?csv|gzip|torchcodec|simplejpeg|turbojpeg)\.")),
    ("decode", re.compile(r"(imageio|tifffile|soundfile|av|decord|pydicom|nibabel)\.")),
    ("decode", re.compile(r".*\.\w*(decode|imread|decompress|unpack|pil_loader)\w*$")),
    ("resize", re.compile(r".*\.\w*(resize|upsample|interpolate|thumbnail)\w*$")),
)
"""Patterns of library functions, by stage. Time in other code counts as "transform" or "collate"."""


class NotExamined(ValueError):
    """Samples that cannot be examined. The message says why."""


@dataclass(frozen=True)
class Stage:
    """Part of the time in which a batch is made.

    Attributes:
        name: ``"read"``, ``"decode"``, ``"resize"``, another ``"transform"``, ``"collate"`` or ``"copy"``.
        what: package that reads or decodes, class of a transform, or the user's function.
        place: ``file:line``, or the expression that reaches a library's object: ``dataset.transform.transforms[2]``.
        seconds: duration per sample on the calling thread. Files come from the page cache.
        share: share of a batch's time, between 0 and 1.
        cold_seconds: duration per sample of all reads, if most first evaluations read from a disk; else None.
    """

    name: Name
    what: str
    place: str
    seconds: float
    share: float
    cold_seconds: float | None = None

    def __str__(self) -> str:
        facts = [self.place, self.what] if self.name != "transform" else [self.place]
        if self.cold_seconds is not None:
            facts.append(f"{formatting.milliseconds(1e3 * self.cold_seconds)} with a cold page cache")
        name = self.what if self.name == "transform" else self.name
        return f"{name} {formatting.share(self.share, 0)} ({', '.join(filter(None, facts))})"


def in_words(stages: Sequence[Stage]) -> str:
    """Return a sentence on the stages of a batch."""
    seconds = stages[0].seconds / stages[0].share
    warm = " with a warm page cache" if any(stage.name == "read" for stage in stages) else ""
    return f"{formatting.milliseconds(1e3 * seconds)} a sample{warm}: {', '.join(map(str, stages))}"


def sample_stages(
    source: DataLoader | Dataset, samples: int = 8, seconds: float = math.inf, device: torch.device | str | None = None
) -> tuple[Stage, ...]:
    """Divide the time of a batch into stages: read, decode, resize, other transforms, collate, and copy to the device.

    A few samples are evaluated on the calling thread, each three times with the same random numbers. A profiler
    observes two of the evaluations. The times are those of the third evaluation, scaled to the time of the second one,
    which no profiler slows down. Random generators, attributes of the dataset, and other profilers are restored.

    Time goes to the innermost function that a stage is known for, and to the user's line that leads to this function.
    Times of worker processes do not include the transfer of batches between processes.

    Args:
        source: a DataLoader over a map-style dataset, or the dataset. A dataset has no ``"collate"``.
        samples: number of samples to evaluate, at least ``FEWEST``, spread over the dataset.
        seconds: time limit.
        device: device to which a batch is copied; None to leave out the ``"copy"``.

    Returns:
        Stages with at least ``WORTH_NAMING`` of a batch's time, the slowest first.

    Raises:
        NotExamined: the dataset is not map-style, needs a worker process, writes files, or raises, or samples take too
            long.
    """
    dataset = source.dataset if isinstance(source, DataLoader) else source
    if reason := why_not_map_style(dataset):
        raise NotExamined(reason)
    loader: DataLoader[Any] = source if isinstance(source, DataLoader) else DataLoader(source)
    if loader.num_workers and loader.worker_init_fn is not None:
        raise NotExamined("samples may depend on the loader's worker_init_fn, which runs in workers only")
    threads = torch.get_num_threads()
    try:
        with reading_again(loader):
            torch.set_num_threads(1 if loader.num_workers else threads)  # as in the process that makes the samples
            first, made, spent = _made(loader, max(samples, FEWEST), seconds)
            if source is loader:
                spent |= _collated(loader, made, device)
    except (NotCacheable, Unrepeatable) as error:
        raise NotExamined(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    whole = sum(spent.values()) or 1.0
    found = [Stage(*call[:3], taken, taken / whole) for call, taken in spent.items() if taken >= WORTH_NAMING * whole]
    found.sort(key=lambda stage: -stage.seconds)
    is_cold = first.from_disk > len(first.runs) / 2
    cold = sum(taken for call, taken in first.stages().items() if call.name == "read") if is_cold else None
    return tuple(replace(stage, cold_seconds=cold) if stage.name == "read" else stage for stage in found)


class _Call(NamedTuple):
    """Running call, and the stage that its time goes to."""

    name: Name
    what: str
    way: str = ""  # file:line, or the way to a library's object
    is_transform: bool = False
    own: list[Any] | None = None  # file and line of the user's innermost code
    frame: FrameType | None = None  # None for a function in C


def _made(loader: Any, samples: int, seconds: float) -> tuple[_Profile, list[Any], dict[_Call, float]]:
    """Return the profile of the first evaluations, three evaluations of each sample, and seconds by stage."""
    dataset = loader.dataset
    indices = ([i * len(dataset) // samples] * 3 for i in range(samples))
    root = _Call("transform", type(dataset).__name__, "dataset")
    first, made, spent = _evaluated(loader, lambda i: next(samples_of(dataset, [i])), indices, root, seconds)
    if len(made) < FEWEST:
        raise NotExamined(f"there are {seconds:.2g} s for this, in which {len(first.runs)} samples were made")
    if loader.num_workers and first.asks_for_worker:
        raise NotExamined("the dataset asks for its worker process (get_worker_info)")
    return first, made, spent


def _collated(loader: Any, made: Sequence[Any], device: Any) -> dict[_Call, float]:
    """Return the seconds per sample of the ``collate_fn`` by stage, and of a copy to the device."""
    collate, is_batched = loader.collate_fn, loader.batch_sampler is not None
    size = min(loader.batch_size or len(made), len(made)) if is_batched else 1
    given = [list(column[:size]) if is_batched else column[0] for column in zip(*made, strict=True)]
    root = _Call("collate", getattr(collate, "__name__", type(collate).__name__), "collate_fn")
    try:
        _, [(batch, *_)], spent = _evaluated(loader, collate, [given], root)
    except Exception as error:  # the user's own code, which raises again in the training
        raise NotExamined(f"collate_fn raised {type(error).__name__}: {error}") from error
    for _ in range(2 if device is not None else 0):  # the first copy allocates memory
        begun = time.perf_counter()
        to_device(batch, torch.device(device))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        spent[_Call("copy", str(device))] = time.perf_counter() - begun
    return {call: taken / size for call, taken in spent.items()}


def _evaluated(
    loader: Any, function: Callable[[Any], Any], given: Iterable[Any], root: _Call, seconds: float = math.inf
) -> tuple[_Profile, list[Any], dict[_Call, float]]:
    """Return a profile of first calls, three results with the same random numbers each, and seconds by stage."""
    ways = _ways({"dataset": loader.dataset, "collate_fn": loader.collate_fn})
    random = RandomState.capture([loader.dataset, loader.collate_fn])
    first, third, made, end = _Profile(ways, root), _Profile(ways, root), [], time.perf_counter() + seconds
    for one, two, three in given:
        random = random.reread()
        results = [first.run(function, one)]  # imports modules, and may read files from the disk
        if time.perf_counter() > end:
            break
        random.restore()
        begun = time.perf_counter()
        results.append(function(two))
        taken = time.perf_counter() - begun
        random.restore()
        made.append([*results, third.run(function, three, taken)])
    return first, made, third.stages()


class _Profile:
    """Profile of a function by stage: the self time of all Python and C functions that it calls on this thread.

    Attributes:
        runs: seconds by stage, file and line, of each call.
        from_disk: number of calls that read from a disk, if the system counts them.
        asks_for_worker: True if the function has called ``get_worker_info``.
    """

    def __init__(self, ways: Mapping[int, str], root: _Call) -> None:
        self.from_disk, self.asks_for_worker = 0, False
        self._ways, self._root, self._stack = ways, root, [root]
        self._run: dict[tuple[Any, ...], list[float]] = {}  # seconds and events by stage, file and line
        self.runs: list[dict[tuple[Any, ...], float]] = []  # scaled seconds of each run
        self._last = 0.0

    def run(self, function: Callable[[Any], Any], argument: Any, seconds: float = math.inf) -> Any:
        """Call a function and add its time, scaled to ``seconds`` without the profiler."""
        read, self._run, self._stack = _bytes_from_disk(), {}, [self._root]
        self._last = time.perf_counter()
        sys.settrace(lambda *_: None)  # so that frames with f_trace are traced
        sys.setprofile(self._on_event)
        try:
            return function(argument)
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            self._charge()
            self.from_disk += _bytes_from_disk() > read
            profiled, events = map(sum, zip(*self._run.values(), strict=True))
            over = min(max(0.0, (profiled - seconds) / events), _MOST_OVERHEAD)
            net = {key: max(0.0, spent - over * count) for key, (spent, count) in self._run.items()}
            scale = min(1.0, seconds / (sum(net.values()) or 1.0))
            self.runs.append({key: scale * spent for key, spent in net.items()})

    def stages(self) -> dict[_Call, float]:
        """Return the seconds of each stage, at its costliest line: means without the slowest quarter of the runs."""
        by_run: dict[tuple[Any, ...], list[float]] = {}
        by_line: dict[tuple[Any, ...], Counter[tuple[int, str]]] = {}
        for number, run in enumerate(self.runs):
            for (name, what, way, file, line), spent in run.items():
                key = name, what if name in ("resize", "transform") else "", way, file
                by_run.setdefault(key, [0.0] * len(self.runs))[number] += spent
                by_line.setdefault(key, Counter())[line, what] += spent  # type: ignore[assignment]
        counted = len(self.runs) - len(self.runs) // 4
        found: dict[_Call, float] = {}
        for key, seconds in by_run.items():
            (name, _, way, file), [((line, what), _)] = key, by_line[key].most_common(1)
            place = f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}" if file else way
            found[_Call(name, what, place)] = sum(sorted(seconds)[:counted]) / counted
        return found

    def _charge(self) -> None:
        call, now = self._stack[-1], time.perf_counter()
        key = (call.name, call.what, *(("", *call.own) if call.own else (call.way, "", 0)))
        entry = self._run.setdefault(key, [0.0, 0])
        entry[0] += now - self._last
        entry[1] += 1

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._charge()
        call = self._stack[-1]
        if call.frame is frame and call.own is not None:
            call.own[1] = frame.f_lineno
        self._last = time.perf_counter()
        return self._on_line

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        self._charge()
        stack = self._stack
        if event == "call":
            stack.append(self._of_frame(frame))
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            is_method = owner is not None and not isinstance(owner, ModuleType)
            module = getattr(type(owner) if is_method else argument, "__module__", None)
            stack.append(self._of_stage(str(module), argument.__name__, stack[-1])._replace(frame=None))
        elif event != "return":  # of a function in C
            if len(stack) > 1 and stack[-1].frame is None:
                stack.pop()
        elif any(call.frame is frame for call in stack):
            while stack.pop().frame is not frame:
                pass
        self._last = time.perf_counter()

    def _of_frame(self, frame: FrameType) -> _Call:
        code, call = frame.f_code, self._stack[-1]
        module = str(frame.f_globals.get("__name__"))
        if module in sys.modules and is_users(module):  # torch.fx and namedtuple give no name of a module
            frame.f_trace = self._on_line  # operators of arrays are no calls
            what = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]  # Python 3.11
            return _Call(self._root.name, what, own=[_shown(code.co_filename), frame.f_lineno], frame=frame)
        self.asks_for_worker |= code is get_worker_info.__code__
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if id(code) in self._ways:
            call = _Call(self._root.name, code.co_name, self._ways[id(code)], True, call.own)
        elif _has_method(owner, code.co_name):
            call = _Call(self._root.name, type(owner).__name__, self._ways.get(id(owner), call.way), True, call.own)
        return self._of_stage(module, code.co_name, call)._replace(frame=frame)

    def _of_stage(self, module: str, function: str, call: _Call) -> _Call:
        name = _stage_of(f"{module}.{function}")
        if name is None or (name == call.name and "builtins" in module):  # such as a decoder in C
            return call
        keeps_class = name == "resize" and call.is_transform
        return call._replace(name=name, what=call.what if keeps_class else module.partition(".")[0].lstrip("_"))


@functools.cache
def _stage_of(function: str) -> Name | None:
    return next((name for name, code in _CODE_OF_STAGES if code.match(function)), None)


def _has_method(owner: Any, method: str) -> bool:
    """Return True if a method of a dataset or of a transform runs, and not one of a tensor or of torch's operators."""
    is_object = (callable(owner) or isinstance(owner, Dataset)) and not isinstance(owner, (type, Tensor))
    return is_object and hasattr(type(owner), method) and not type(owner).__module__.startswith("torch._")


def _shown(filename: str) -> str:
    """Return the name of the notebook's cell whose temporary file this is, else the file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    return filename if known is None else " ".join(known)


def _ways(roots: Mapping[str, Any]) -> Mapping[int, str]:
    """Return the shortest expression that reaches each object: ``dataset.transform.transforms[2]``."""
    ways: dict[int, str] = {}
    left = deque(roots.items())
    while left and len(ways) < _MOST_OBJECTS:
        way, node = left.popleft()
        if id(node) not in ways:
            ways[id(node)] = ways[id(node.__code__ if isinstance(node, FunctionType) else node)] = way
            left.extend((way + step, child) for step, child in _children(node))
    return ways


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        return ((f"[{key!r}]", child) for key, child in islice(node.items(), _MOST_ELEMENTS))
    if isinstance(node, (list, tuple)):
        return ((f"[{i}]", child) for i, child in enumerate(node[:_MOST_ELEMENTS]))
    return ((f".{name}", child) for name, child in getattr(node, "__dict__", {}).items())


def _bytes_from_disk() -> int:
    """Return the bytes that this process has read from disks so far; 0 if the system does not count them."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return 0
