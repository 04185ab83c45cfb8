"""Observations of a script while it runs: calls of its modules, and its loaders.

Replacements of ``Module.__call__``, ``DataLoader.__init__`` and ``DataLoader.__iter__`` record the place of a call, and
then run the original function. Calls by flatout's own trials are left out.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from flatout.autotune.recorder import RecordedCall
from flatout.core.batches import tensors_of
from flatout.core.replaced import is_replacement, replaced
from flatout.profile.syncs import is_users, outwards


@dataclass(eq=False)
class CallSite:
    """Calls of a module with parameters, by the same lines of the user's code and in the same mode.

    Attributes:
        places: ``file:line`` of the call, of the call of the surrounding function, and so on outwards.
        module: class of the module.
        device: device type of the module's parameters.
        dtypes: dtypes of the module's floating-point parameters.
        autocast: True if a call ran under autocast.
        is_training: True if the last call was in train mode with gradients on.
        without_gradients: True if a call recorded no graph because gradients were off.
        with_graph: number of calls that recorded a graph.
        is_reached: True if a backward reached the graph of a call.
        is_past: True if an update followed a call.
        gives_tensor: True if the last call returned one tensor.
    """

    places: tuple[str, ...]
    module: str
    device: str
    dtypes: frozenset[torch.dtype]
    autocast: bool = False
    is_training: bool = False
    without_gradients: bool = False
    with_graph: int = 0
    is_reached: bool = False
    is_past: bool = False
    gives_tensor: bool = False

    @property
    def where(self) -> str:
        """``file:line`` of the call."""
        return self.places[0]

    @property
    def is_wasted(self) -> bool:
        """True if calls recorded graphs, and no backward followed."""
        return self.with_graph > 0 and not self.is_reached and (self.is_past or not self.is_training)

    def note(self, module: nn.Module, output: Any) -> None:
        """Record a call that has returned."""
        ends = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        self.is_training = module.training and torch.is_grad_enabled()
        self.without_gradients |= not torch.is_grad_enabled()
        self.with_graph += bool(ends)
        self.gives_tensor = isinstance(output, Tensor)
        if not self.is_reached:
            for node in ends:
                node.register_prehook(self.reach)

    def reach(self, *_: object) -> None:
        """Record that a backward reached a call."""
        self.is_reached = True


@dataclass(eq=False)
class LoaderSite:
    """Line of the user's code that makes a ``DataLoader``.

    Attributes:
        where: ``file:line``.
        num_workers: ``num_workers`` of the loader.
        pin_memory: ``pin_memory`` of the loader.
        batch_size: ``batch_size`` of the loader; None if the loader makes no batches or has a batch sampler.
        is_stream: True for an ``IterableDataset``, whose samples each worker would repeat.
        epochs: number of iterations that have begun.
    """

    where: str
    num_workers: int
    pin_memory: bool
    batch_size: int | None
    is_stream: bool
    epochs: int = 0


class Observer:
    """Observer of a script, active until ``close``.

    Attributes:
        calls: call sites, in the order of their first calls.
        training: loader that was in use at the first update with a known loader; None if there is none.
        sample: recorded training call with a weak reference to its module; None without a recorded call.
        wants_sample: True to record the next training calls in ``sample``.
    """

    def __init__(self) -> None:
        self.calls: list[CallSite] = []
        self.training: LoaderSite | None = None
        self.sample: tuple[weakref.ref[nn.Module], RecordedCall] | None = None
        self.wants_sample = False
        self._known: dict[Hashable, CallSite | None] = {}
        self._sites: weakref.WeakKeyDictionary[DataLoader[Any], LoaderSite] = weakref.WeakKeyDictionary()
        self._latest: LoaderSite | None = None
        self._thread = threading.local()
        self._stack = ExitStack()
        self._stack.enter_context(replaced(nn.Module, "__call__", self._noting_calls))
        self._stack.enter_context(replaced(DataLoader, "__init__", self._noting_loaders))
        self._stack.enter_context(replaced(DataLoader, "__iter__", self._noting_epochs))

    def close(self) -> None:
        """Restore torch's functions."""
        self.sample = None
        self._stack.close()

    def end_update(self) -> None:
        """Record that the optimizer has stepped."""
        self.training = self._latest if self.training is None else self.training
        for site in self.calls:
            site.is_past = True

    @property
    def training_loader(self) -> DataLoader[Any] | None:
        """The ``DataLoader`` of ``training``; None if the script has dropped it."""
        return next((loader for loader, site in self._sites.items() if site is self.training), None)

    @property
    def trained(self) -> frozenset[str]:
        """``file:line`` of every line that leads to a call that a backward reached."""
        return frozenset(place for site in self.calls if site.is_reached for place in site.places)

    def _noting_calls(self, call: Any) -> Any:
        observer, thread = self, self._thread

        @wraps(call)
        def noting(
            self: nn.Module, *args: Any, **kwargs: Any
        ) -> Any:  # torch's profiler reads the module from ``self``
            is_outermost = not (torch.compiler.is_compiling() or getattr(thread, "is_called", False))
            if not is_outermost or next(self.parameters(), None) is None:
                return call(self, *args, **kwargs)
            site = observer._site_of(self, sys._getframe(1))
            if observer.wants_sample and site is not None and site.is_reached and site.is_training:
                observer.sample = weakref.ref(self), RecordedCall.of(args, kwargs)
            thread.is_called = True  # inner modules do not count, even if flatout's trials make the outer call
            try:
                output = call(self, *args, **kwargs)
            finally:
                thread.is_called = False
            if site is not None:
                site.note(self, output)
            return output

        return noting

    def _site_of(self, module: nn.Module, frame: FrameType) -> CallSite | None:
        """Return the site of a call of a module with parameters; None for a call that is not the user's."""
        parameter = next(module.parameters())
        key = type(module), module.training, *_stack_of(frame)
        if key not in self._known:
            places = places_of(frame)
            dtypes = frozenset(p.dtype for p in module.parameters() if p.is_floating_point())
            site = CallSite(places, type(module).__name__, parameter.device.type, dtypes) if places else None
            self._known[key] = site
            self.calls += [] if site is None else [site]
        site = self._known[key]
        if site is not None:
            site.autocast |= torch.is_autocast_enabled(parameter.device.type)
        return site

    def _noting_loaders(self, make: Any) -> Any:
        @wraps(make)
        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            make(loader, *args, **kwargs)
            if places := places_of(sys._getframe(1)):
                is_stream = isinstance(loader.dataset, IterableDataset)
                self._sites[loader] = LoaderSite(
                    places[0], loader.num_workers, loader.pin_memory, loader.batch_size, is_stream
                )

        return __init__

    def _noting_epochs(self, iterate: Any) -> Any:
        @wraps(iterate)
        def __iter__(loader: DataLoader[Any]) -> Any:
            site = self._sites.get(loader)
            if site is not None and places_of(sys._getframe(1)):
                site.epochs += 1
                self._latest = site
            return iterate(loader)

        return __iter__


def places_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return ``file:line`` of the user's code that leads to a call, from the innermost line outwards.

    The result is empty for calls by other code, such as flatout's trials.
    """
    frames = [
        (at, file) for at, file in outwards(frame) if not (file.startswith("torch/") or is_replacement(at.f_code))
    ]
    if not frames or not is_users(frames[0][1]):
        return ()
    return tuple(f"{file}:{at.f_lineno}" for at, file in frames if is_users(file))


def _stack_of(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of each frame, which takes less time than ``places_of``."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
