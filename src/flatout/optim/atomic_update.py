"""Whether an update that ran out of memory has changed anything: if not, it can be tried again."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from types import TracebackType
from typing import Any

import torch

from flatout.core.out_of_memory import parameters_of, ran_out_of_memory, versions

_grad = attrgetter("grad")
_HANDED = ("grad_scale", "found_inf")


class PartialUpdateError(RuntimeError):
    """An optimizer ran out of memory when it had updated some of the parameters, or of its state, and not the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        super().__init__(
            f"{name} ran out of memory in the middle of its step: some parameters, or some of its state, are those of "
            "the step and the rest are not. Go on from a checkpoint. What would help: an optimizer of flatout.optim, "
            "which takes its memory before it changes anything; foreach=False, which takes less"
        )


class AtomicUpdate:
    """Around an update by an optimizer of anybody's: what runs out of memory in it has changed nothing, or says so.

    State that was begun is dropped again: torch's optimizers take an entry that is there for a whole one. What tells
    writes is the version counters of parameters, gradients and state; reading them takes 0.1 us for each.

    Attributes:
        has_rewritten_gradients: whether the gradients are no longer those of the backward. They are scaled, averaged
            and clipped in place before the optimizer's step, by what needs no memory: all of them, or none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.has_rewritten_gradients = False
        self._optimizer = optimizer
        self._params = parameters_of(optimizer)
        self._versions = versions(self._params)
        self._grads = versions(list(map(_grad, self._params)))
        self._numbers = [dict(group) for group in optimizer.param_groups]
        self._entries = list(optimizer.state.values())
        self._sizes = list(map(_size, self._entries))
        self._values = _values(self._entries)
        self._value_versions = versions(self._values)
        self._handed = {name: vars(optimizer)[name] for name in _HANDED if name in vars(optimizer)}

    def __enter__(self) -> AtomicUpdate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or not ran_out_of_memory(error):
            return
        self._drop_what_was_begun()
        values = _values(self._entries)
        if (
            versions(self._params) != self._versions
            or len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or versions(values) != self._value_versions
        ):
            raise PartialUpdateError(self._optimizer) from error
        self.has_rewritten_gradients = versions(list(map(_grad, self._params))) != self._grads

    def _drop_what_was_begun(self) -> None:
        """Dicts keep the order of their keys: what is new comes last."""
        optimizer = self._optimizer
        for key in list(optimizer.state)[len(self._entries) :]:
            del optimizer.state[key]
        for entry, size in zip(self._entries, self._sizes, strict=True):
            if isinstance(entry, dict):
                for name in list(entry)[size:]:
                    del entry[name]
        for group, numbers in zip(optimizer.param_groups, self._numbers, strict=True):
            group.update(numbers)
        for name in _HANDED:  # as torch's GradScaler leaves them behind
            vars(optimizer).pop(name, None)
        vars(optimizer).update(self._handed)


def _size(entry: Any) -> int:
    return len(entry) if isinstance(entry, dict) else 0


def _values(entries: list[Any]) -> list[Any]:
    return list(chain.from_iterable(entry.values() if isinstance(entry, dict) else (entry,) for entry in entries))
