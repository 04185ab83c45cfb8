"""Order of a sampler that is not torch's own: its batches as drawn, and how to resume at one of them."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from torch.utils.data import BatchSampler

from flatout.core.random_state import RandomState
from flatout.data.draws import Draws
from flatout.data.order import IndexSpan, OpaqueBatch, Position, as_indices, is_int


class Asked:
    """Order of any sampler. A batch is drawn when the user requests the batch, never ahead of time.

    A sampler, or its iterator, that has ``state_dict`` and ``load_state_dict`` saves its own position. To resume, any
    other sampler draws the epoch again. Its generators and the global ones then have their states from the beginning
    of the epoch.

    Args:
        batch_sampler: yields batches of indices.
        samples: number of samples in the dataset. With ``None`` all batches are :class:`OpaqueBatch`.
        start: position to resume from; ``None``: the beginning of a new epoch.
        held: generators that the sampler holds.
        reads_ahead: True if a batch may be drawn before earlier ones are yielded.
        draws: random numbers that the sampler draws.

    Raises:
        ValueError: the sampler now draws other batches before ``start``, or another kind of order has saved ``start``.
    """

    def __init__(
        self,
        batch_sampler: Any,
        samples: int | None,
        start: Position | None,
        held: list[Any],
        *,
        reads_ahead: bool,
        draws: Draws,
    ) -> None:
        self._batch_sampler = batch_sampler
        self._samples = samples
        self._held = held
        self._reads_ahead = reads_ahead
        self._draws = draws
        self._taken = 0
        self._last: Any = None
        self._was_last = False
        self._is_exhausted = False
        self._loaded: Position | None = None  # position that was loaded; None after the next batch
        self._again: deque[Any] = deque()  # batches that were drawn, but not yielded, before saving
        # States of the generators at the beginning of the epoch and before its first batch, to draw the epoch again.
        self._states: list[Any] = []
        self._batches: Any = None
        if start is None:
            self._states.append(RandomState.of(held))
            self._batches = iter(batch_sampler)
        elif "generators" in start:
            self._draw_again(start)
        elif "sampler" in start:
            self._load(start)
        else:
            raise ValueError("the state was saved where torch's own sampler was replayed")

    def next_span(self, *, asked: bool) -> IndexSpan | OpaqueBatch | None:
        if not asked:
            return None
        if self._again:
            batch = self._again.popleft()
        else:
            try:
                with self._draws.drawing():
                    if len(self._states) == 1:
                        self._states.append(RandomState.of(self._held))
                    batch = next(self._batches)
            except StopIteration:
                self._is_exhausted = True
                return None
        self._taken += 1
        self._loaded = None
        self._last = list(batch) if isinstance(batch, list) else batch  # some samplers reuse a list
        self._was_last = self._is_short(batch)
        found = None
        if self._samples is not None and type(batch) in (list, tuple) and batch:
            found = as_indices(batch, self._samples)
        end = self.position() if self._reads_ahead else None
        return OpaqueBatch(batch, end) if found is None else IndexSpan(found, 0, len(found), 1, end)

    def position(self) -> Position:
        if self._loaded is not None:
            return self._loaded
        position: Position = {"taken": self._taken}
        if self._taken and (stateful := self._stateful()) is not None:
            return position | {"sampler": copy.deepcopy(stateful.state_dict()), "was_last": self._was_last}
        return position | {"generators": self._states, "last": self._last}

    def has_drawn_since(self, position: Position) -> bool:
        return self._taken > position["taken"] or self._is_exhausted

    def completed(self, position: Position) -> Position:
        if "generators" not in position or "drawn" in position:
            return position
        states = [state.states() if isinstance(state, RandomState) else state for state in position["generators"]]
        return position | {
            "generators": states,
            "last": _plain(position["last"]),
            "drawn": self._taken + len(self._again),
            "last_drawn": _plain(self._last_drawn),
        }

    @property
    def _last_drawn(self) -> Any:
        return self._again[-1] if self._again else self._last

    def _is_short(self, batch: Any) -> bool:
        """Return True if a batch is shorter than the others, so that the sampler has no more indices."""
        return type(self._batch_sampler) is BatchSampler and len(batch) < self._batch_sampler.batch_size

    def _stateful(self) -> Any:
        """Return the part of the sampler that can save and restore its position; None if no part can."""
        parts = (self._batch_sampler, getattr(self._batch_sampler, "sampler", None), self._batches)
        return next((part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")), None)

    def _load(self, start: Position) -> None:
        self._taken, self._was_last, self._loaded = start["taken"], start["was_last"], start
        with RandomState.capture().restored():
            if (stateful := self._stateful()) is not None:
                stateful.load_state_dict(copy.deepcopy(start["sampler"]))
                self._batches = iter(self._batch_sampler)
            else:
                self._batches = iter(self._batch_sampler)
                self._batches.load_state_dict(copy.deepcopy(start["sampler"]))
        if self._was_last:
            self._batches = iter(())

    def _draw_again(self, start: Position) -> None:
        self._taken, self._states = start["taken"], list(start["generators"])
        with self._draws.drawing_again():
            RandomState.of(self._held).write(self._states[0])
            self._batches = iter(self._batch_sampler)
            # A stateful sampler saves generators only before its first batch. So it starts at the beginning.
            drawn = 0 if self._stateful() is not None else start["drawn"]
            if drawn:
                RandomState.of(self._held).write(self._states[1])
            for number in range(1, drawn + 1):
                batch = next(self._batches, None)
                batch = list(batch) if isinstance(batch, list) else batch
                if number == start["taken"]:
                    self._last = batch
                if number > start["taken"]:
                    self._again.append(batch)
        if drawn and (_plain(self._last) != start["last"] or _plain(self._last_drawn) != start["last_drawn"]):
            raise ValueError(
                f"{type(self._batch_sampler).__name__} drew other batches than before: to go on in mid-epoch it needs "
                "state_dict() and load_state_dict(), or to draw from generators that it holds"
            )


def _plain(batch: Any) -> list[int] | None:
    """Return the indices of a batch if all are ints, else None."""
    if isinstance(batch, (list, tuple)) and all(map(is_int, batch)):
        return [int(index) for index in batch]
    return None
