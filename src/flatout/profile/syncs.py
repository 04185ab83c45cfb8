"""Search for calls that make the host wait for the GPU, by file and line.

On a machine without a GPU, the search finds the calls that would wait.
"""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.replaced import replaced
from flatout.core.torch_state import sync_debug_mode
from flatout.profile.profile_data import Phase

_WARNING = "called a synchronizing CUDA operation"
_WAITING_OPERATORS = {
    "_local_scalar_dense": "item",
    "item": "item",  # inference_mode does not decompose item
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique",
    "equal": "equal",
    "repeat_interleave": "repeat_interleave",
    "bincount": "bincount",
}
"""Operators whose result or result size the host needs, each with the name that a profile shows."""
_METHODS = {
    "cpu": "cpu",
    "to": "to",
    "tolist": "tolist",
    "numpy": "numpy",
    "__array__": "numpy",
    "__repr__": "print",
}
"""Tensor methods that copy to the host, with the name in a profile.

Without a GPU the methods copy nothing, so a dispatch mode does not see the calls.
"""
Note = Callable[[str, "FrameType | None"], None]
"""Function that records a call, given the name that a profile shows and the frame that makes the call."""
_LOADERS = ("torch/utils/data/dataloader.py", "flatout/data/")
"""Files that call code of datasets."""
_READERS = ("torch/optim/", "flatout/training/logged_metrics.py", "flatout/training/non_finite.py")
"""Files that read values which are on the host, or which they read at once only on a CPU."""


@contextmanager
def watching(
    cuda: bool, phase: Callable[[], Phase] = lambda: "host_idle"
) -> Iterator[Counter[tuple[str, str, str, Phase]]]:
    """Count the synchronizing calls of the code within the ``with`` block.

    The count raises no error in the block. The end of the block restores modes, filters and methods.

    Args:
        cuda: True: listen to torch's sync debug mode. False: watch operators on any device.
        phase: returns the present phase of the step.

    Yields:
        The number of calls by call, place, line of code and phase.
    """
    seen: Counter[tuple[str, str, str, Phase]] = Counter()

    def note(what: str, frame: FrameType | None) -> None:
        if not cuda and _is_on_host(frame):
            return
        where, code = of_frame(frame)
        if what == "to" and "cpu" not in code:  # .to(device), which copies nothing to the host on a GPU
            return
        seen[what, where, code, phase()] += 1

    with ExitStack() as stack:
        if cuda:
            stack.enter_context(_debug_mode(note))
            for owner in (torch.cuda, torch.cuda.Event):  # the debug mode does not report these waits
                stack.enter_context(replaced(owner, "synchronize", partial(_watched, "synchronize", note)))
        else:
            for name, what in _METHODS.items():
                stack.enter_context(replaced(Tensor, name, partial(_watched, what, note)))
            stack.enter_context(_SyncWatch(note))
        yield seen


class _SyncWatch(TorchDispatchMode):
    """Dispatch mode that reports operators that would wait for a GPU."""

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
    """Return the name that a profile shows for an operator that would wait for a GPU; empty for other operators."""
    if operator in ("index", "index_put", "index_put_"):  # a mask needs its count on the host, except to fill one value
        by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return "mask" if by_mask and (operator == "index" or args[2].numel() != 1) else ""
    if operator == "repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    return _WAITING_OPERATORS.get(operator, "")


def _watched(what: str, note: Note, function: Any) -> Any:
    """Return a function or a tensor method that reports its calls to ``note``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        own = _is_torchs(short(frame.f_code.co_filename)) and what != "print"  # torch's __format__ calls __repr__
        if not own and (what != "to" or _to_host(args[1:], kwargs)):
            note(what, frame)
        return function(*args, **kwargs)

    return call


def _to_host(args: Any, kwargs: Any) -> bool:
    """Return True if the arguments of ``Tensor.to`` name the CPU."""
    target = kwargs.get("device", args[0] if args else None)
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


@contextmanager
def _debug_mode(note: Note) -> Iterator[None]:
    """Report the warnings of torch's sync debug mode to ``note``. Other warnings are shown as usual."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def listen(message: Any, category: Any, *rest: Any, **kwargs: Any) -> None:
            if _WARNING in str(message):
                note("synchronize", sys._getframe(1))
            else:
                show(message, category, *rest, **kwargs)

        warnings.filterwarnings("always", message=f".*{_WARNING}")
        warnings.showwarning = listen
        with sync_debug_mode("warn"):
            yield


def _is_on_host(frame: FrameType | None) -> bool:
    """Return True if the value of a call is on the host even if the model is on a GPU."""
    files = [file for _, file in outwards(frame)]
    readers = takewhile(lambda file: not is_users(file), files)
    return any(file.startswith(_LOADERS) for file in files) or any(file.startswith(_READERS) for file in readers)


def _is_torchs(file: str) -> bool:
    return file.startswith("torch/")


_NOT_THE_USERS = {"torch", "functorch", "flatout", "numpy", "triton"}
_ROOTS = tuple(os.path.dirname(os.path.dirname(file)) for file in (torch.__file__, os.path.dirname(__file__)))
"""Folders that hold the packages torch and flatout. An editable install is not on ``sys.path``."""


LOOP = "flatout/profile/record.py", "profile_run"
"""File and name of the function that runs the steps of a profile. Its callers are no part of a step."""


def short(filename: str) -> str:
    """Return a file's path without its longest prefix from ``sys.path``, as torch's profiler does."""
    folders = (folder.rstrip(os.sep) + os.sep for folder in (*sys.path, *_ROOTS) if folder)
    return filename[max((len(folder) for folder in folders if filename.startswith(folder)), default=0) :]


def is_users(file: str) -> bool:
    """Return True if a shortened path counts as the user's code.

    Generated code does not count, nor does code of torch, functorch, flatout, numpy, triton or Python's library.
    """
    if file.startswith("<") or "torchinductor_" in file:  # <string>, <built-in ...>, or code that torch.compile wrote
        return False
    if file == short(_main_file()):  # a script may have the name of a module of Python's library
        return True
    top = short(file).split(os.sep)[0].removesuffix(".py")
    return top not in _NOT_THE_USERS and top not in sys.stdlib_module_names


def outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """Yield a frame and its callers, innermost first, each with its shortened file."""
    while frame is not None:
        yield frame, short(frame.f_code.co_filename)
        frame = frame.f_back


def of_frame(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost place of the user's code from ``frame`` outwards, and its line of code; empty if none.

    The search ends at the loop of a profile.
    """
    for at, file in outwards(frame):
        if (file, at.f_code.co_name) == LOOP:
            break
        if is_users(file):
            return f"{file}:{at.f_lineno}", linecache.getline(at.f_code.co_filename, at.f_lineno).strip()
    return "", ""


def _main_file() -> str:
    return getattr(sys.modules.get("__main__"), "__file__", None) or "<none>"
