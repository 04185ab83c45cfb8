"""Random numbers that a sampler draws from the global generators, in one process or equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flatout.core.random_state import RandomState
from flatout.distributed.agreement import Agreement


class Draws:
    """Draws of a sampler in one process."""

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context for the sampler's draws."""
        return nullcontext()

    def drawing_again(self) -> AbstractContextManager[None]:
        """Return a context in which a resumed sampler repeats draws from saved states of the generators."""
        return RandomState.capture().restored()


class SharedDraws(Draws):
    """Draws of a sampler in one epoch, equal on all ranks.

    The epoch begins with the states of rank 0's generators. During the epoch, the sampler draws from separate states of
    the global generators. So the models of the ranks may draw any number of random numbers. After each draw, the global
    generators get back the states that the training left. On rank 0, a generator that only the sampler uses keeps the
    state after the draw, as in one process.

    Construction is a collective. A draw takes a broadcast longer than in one process.

    Args:
        ranks: all ranks.
        held: generators of the sampler and the loader. They are set to rank 0's states.
    """

    def __init__(self, ranks: Agreement, held: RandomState) -> None:
        own = RandomState.of_host()
        states, of_held = ranks.first((own.states(), held.states()))
        held.write(of_held)
        self._states = own.given(states)
        self._is_first_rank = ranks.rank == 0
        self._is_drawing = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context for the sampler's draws. The context may be entered again inside the block."""
        if self._is_drawing:
            yield
            return
        own = self._states.reread()
        self._states.restore()
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            before, self._states = self._states, self._states.reread()
            own.restore()
            if self._is_first_rank:
                before.advance(self._states)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Return a context for repeated draws. Later draws continue from their states."""
        yield
        self._states = self._states.reread()
