"""Where the host waits for the GPU, by file and line; on a machine without one: where it would."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.profile.places import of_frame, short
from flatout.profile.summary import Phase, Sync
from flatout.profile.trace import Trace

_WARNING = "called a synchronizing CUDA operation"
_WAITING_OPERATORS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique",
    "equal": "equal",
    "repeat_interleave": "repeat_interleave",
    "bincount": "bincount",
}
"""Operators whose result, or its size, the host needs: name to what people call it."""
_METHODS = {
    "cpu": "cpu",
    "to": "to",
    "tolist": "tolist",
    "numpy": "numpy",
    "__array__": "numpy",
    "__repr__": "print",
}
"""Methods of tensors that copy to the host without any dispatcher's seeing it, where the tensor is there already."""

_UPDATES = {"torch/optim/optimizer.py", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py"}


class SyncFinder:
    """Counts synchronising calls of the code that runs between ``begin`` and ``end``; never raises into it.

    Args:
        cuda: listen to torch's sync debug mode; else watch operators, on whatever device.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._seen: Counter[tuple[str, str, str, Phase]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Finds within the ``with`` block. Modes, filters and methods are put back at its end."""
        with ExitStack() as stack:
            if self._cuda:
                stack.enter_context(_debug_mode(self._note))
            else:
                stack.enter_context(_methods_watched(self._note))
                stack.enter_context(_Watch(self._note))
            yield

    def syncs(self, steps: int) -> tuple[Sync, ...]:
        """What was found in ``steps`` steps, most frequent first."""
        return tuple(
            Sync(what, where, code, phase, count / steps)
            for (what, where, code, phase), count in self._seen.most_common()
        )

    def _note(self, what: str, frame: FrameType | None) -> None:
        phase = _phase_of(frame)
        if not self._cuda and (phase == "loader_wait" or _through(frame, "torch/optim/")):
            return  # samples, and the counts of optimizers, are on the host wherever the model is
        found = of_frame(frame)
        if found is None:
            self._seen[what, "", "", phase] += 1
            return
        where, path = found
        code = _line(where, path)
        if what == "to" and "cpu" not in code:  # .to(device), where the device happens to be this one
            return
        self._seen[what, where, code, phase] += 1


def silent(trace: Trace) -> tuple[Sync, ...]:
    """Waits of the user's code that torch's sync debug mode does not tell of: for the whole device, and for events."""
    seen = Counter(
        (event.name, trace.where(event), trace.phase_of(event))
        for event in trace.within(trace.host)
        if event.name in ("cudaDeviceSynchronize", "cudaEventSynchronize") and event.thread in trace.training_threads
    )
    return tuple(
        Sync(what, where, _line(where.partition(" ")[0], where.rpartition(":")[0]), phase, count / trace.steps)
        for (what, where, phase), count in seen.most_common()
        if where
    )


def _line(where: str, path: str) -> str:
    return linecache.getline(path, int(where.rpartition(":")[2])).strip()


Note = Callable[[str, "FrameType | None"], None]


class _Watch(TorchDispatchMode):
    """Tells of operators that would wait for a GPU."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, operator = func._schema.name.partition("::")
        call = _waiting(operator, args, kwargs or {}) if library == "aten" else ""
        if call:
            self._note(call, sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _waiting(operator: str, args: Any, kwargs: Any) -> str:
    """What people call an operator that would wait for a GPU; empty for the others."""
    if operator in ("index", "index_put", "index_put_"):  # a mask has to be counted, unless one value fills it
        by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return "mask" if by_mask and (operator == "index" or args[2].numel() != 1) else ""
    if operator == "repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    return _WAITING_OPERATORS.get(operator, "")


@contextmanager
def _methods_watched(note: Note) -> Iterator[None]:
    """Tells of calls of ``_METHODS``."""

    def watched(name: str, method: Any) -> Any:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            own = _is_torchs(frame) and name != "__repr__"  # __array__ calls numpy; __format__ calls __repr__
            if not own and (name != "to" or _to_host(args, kwargs)):
                note(_METHODS[name], frame)
            return method(self, *args, **kwargs)

        return call

    originals = {name: getattr(Tensor, name) for name in _METHODS}
    own = {name for name in _METHODS if name in vars(Tensor)}
    for name, method in originals.items():
        setattr(Tensor, name, watched(name, method))
    try:
        yield
    finally:
        for name, method in originals.items():
            if name in own:
                setattr(Tensor, name, method)
            else:
                delattr(Tensor, name)


def _to_host(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of ``Tensor.to`` name the CPU."""
    target = kwargs.get("device", args[0] if args else None)
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


@contextmanager
def _debug_mode(note: Note) -> Iterator[None]:
    """Tells of what torch's own sync debug mode warns of; warnings of others go their way."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def listen(message: Any, category: Any, *rest: Any, **kwargs: Any) -> None:
            if _WARNING in str(message):
                note("synchronize", sys._getframe(1))
            else:
                show(message, category, *rest, **kwargs)

        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=f".*{_WARNING}")
        warnings.showwarning = listen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _phase_of(frame: FrameType | None) -> Phase:
    """The part of a step that a stack is in, from the functions of torch and flatout that lead to it."""
    inside_module = False
    while frame is not None:
        file, name = short(frame.f_code.co_filename), frame.f_code.co_name
        if name == "_engine_run_backward":
            return "backward"
        if file in _UPDATES or (file == "flatout/job.py" and name == "flush"):
            return "update"
        if file == "torch/utils/data/dataloader.py" or file.startswith("flatout/data/"):
            return "loader_wait"
        inside_module |= file == "torch/nn/modules/module.py" or (file == "flatout/job.py" and name == "loss")
        frame = frame.f_back
    return "forward" if inside_module else "host_idle"


def _through(frame: FrameType | None, part: str) -> bool:
    """Whether one of torch's own frames, from the innermost out to the user's code, is of that part of torch."""
    while frame is not None and _is_torchs(frame):
        if short(frame.f_code.co_filename).startswith(part):
            return True
        frame = frame.f_back
    return False


def _is_torchs(frame: FrameType | None) -> bool:
    return frame is not None and short(frame.f_code.co_filename).startswith("torch/")
