"""Where the host waits for the GPU, by file and line; on a machine without one: where it would."""

from __future__ import annotations

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

from flatout.profile.places import of_frame, outwards, short
from flatout.profile.profile_data import Phase

_WARNING = "called a synchronizing CUDA operation"
_WAITING_OPERATORS = {
    "_local_scalar_dense": "item",
    "item": "item",  # whole under inference_mode
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
Note = Callable[[str, "FrameType | None"], None]
"""Told of a call, by what people call it, and of the frame that makes it."""
_UPDATES = {"torch/optim/optimizer.py", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py"}
_FLUSH = "flatout/training/stepper.py", "flush"
_LOSS = "flatout/training/objective.py", "loss"
"""File and function of flatout's update, and of its forward and loss."""


@contextmanager
def watching(cuda: bool) -> Iterator[Counter[tuple[str, str, str, Phase]]]:
    """Counts synchronising calls of the code within the ``with`` block; never raises into it.

    Modes, filters and methods are put back at its end.

    Args:
        cuda: listen to torch's sync debug mode; else watch operators, on whatever device.

    Yields:
        How often each was seen: its call, place, line of code and part of the step.
    """
    seen: Counter[tuple[str, str, str, Phase]] = Counter()

    def note(what: str, frame: FrameType | None) -> None:
        phase = _phase_of(frame)
        if not cuda and (phase == "loader_wait" or _in_optimizer(frame)):
            return  # samples, and the counts of optimizers, are on the host wherever the model is
        where, code = of_frame(frame)
        if what == "to" and where and "cpu" not in code:  # .to(device), where the device happens to be this one
            return
        seen[what, where, code, phase] += 1

    with ExitStack() as stack:
        if cuda:
            stack.enter_context(_debug_mode(note))
        else:
            for name, what in _METHODS.items():
                stack.enter_context(replaced(Tensor, name, partial(_watched, name, what, note)))
            stack.enter_context(_SyncWatch(note))
        yield seen


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of a class or module, inherited or its own, by ``wrap(function)`` within the block."""
    function, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrap(function))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, function)
        else:
            delattr(owner, name)


class _SyncWatch(TorchDispatchMode):
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


def _watched(name: str, what: str, note: Note, method: Any) -> Any:
    """A method of tensors that tells of its calls."""

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        own = _is_torchs(short(frame.f_code.co_filename)) and name != "__repr__"  # __format__ calls it
        if not own and (name != "to" or _to_host(args, kwargs)):
            note(what, frame)
        return method(self, *args, **kwargs)

    return call


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
    for at, file in outwards(frame):
        name = at.f_code.co_name
        if name == "_engine_run_backward":
            return "backward"
        if file in _UPDATES or (file, name) == _FLUSH:
            return "update"
        if file == "torch/utils/data/dataloader.py" or file.startswith("flatout/data/"):
            return "loader_wait"
        inside_module |= file == "torch/nn/modules/module.py" or (file, name) == _LOSS
    return "forward" if inside_module else "host_idle"


def _in_optimizer(frame: FrameType | None) -> bool:
    """Whether one of torch's own frames, from the innermost out to the user's code, is an optimizer's."""
    torchs = takewhile(_is_torchs, (file for _, file in outwards(frame)))
    return any(file.startswith("torch/optim/") for file in torchs)


def _is_torchs(file: str) -> bool:
    return file.startswith("torch/")
