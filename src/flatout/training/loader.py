"""``run.loader``, which yields the user's batches on the device, prefetched."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, Prefetcher
from flatout.data.forwarding import CopiedAsWrapped
from flatout.data.loaders import SEEDED_FROM, original_of, set_attribute, unsliced
from flatout.data.order import BatchShare
from flatout.data.replay_buffer import ReplayBuffer
from flatout.data.slices import SamplerEpoch
from flatout.mfu import MfuCounter
from flatout.training.job import Job


class TrainingLoader(CopiedAsWrapped):
    """Loader of the user's batches on the device, prefetched.

    Reading, setting or deleting a public attribute reaches the user's loader.
    """

    def __init__(
        self,
        job: Job,
        counter: MfuCounter,
        end_of_epoch: Callable[[], None],
        observers: Sequence[Callable[[Any], object]] = (),
    ) -> None:
        self._job = job
        self._observers = observers
        self._counter = counter
        self._end_of_epoch = end_of_epoch
        self._goes_on = False
        self._source: Iterable[Any] | None = None
        self._sampler_epoch = SamplerEpoch(original_of(job.data.loader), job.spec.ranks)

    @property
    def _prefetcher(self) -> Prefetcher:
        """Prefetcher over the job's current source. ``undo`` replaces the source by the user's loader."""
        if self._source is not self._job.data.source:
            self._source = self._job.data.source
            self._made = Prefetcher(self._source, self._job.spec.device, copying=self._counter.copying)
        return self._made

    @property
    def original(self) -> Iterable[Any]:
        """The user's loader, or a ``ReplayBuffer`` that first yields the batches that trials took from the loader."""
        source, loader = self._job.data.source, self._job.data.loader
        return source if isinstance(source, ReplayBuffer) else original_of(loader)

    @property
    def share(self) -> BatchShare | None:
        """Share of this rank in the batch that was yielded last, or None if the loader is not sliced."""
        return self._prefetcher.share

    def __iter__(self) -> Iterator[Any]:
        begun = time.perf_counter()
        self._sampler_epoch.begin()
        # Made here, not at the first batch, because `iter(DataLoader)` draws random numbers.
        batches = iter(self._prefetcher)
        return self._epoch(batches, time.perf_counter() - begun)

    def _epoch(self, opened: Iterator[Any], seconds: float) -> Iterator[Any]:
        """Yield the batches of one epoch.

        Args:
            opened: yields the batches.
            seconds: time that opening the epoch took.
        """
        if not self._goes_on:
            self._end_of_epoch()  # the loop may have left the previous epoch by a break
        is_empty, self._goes_on = not self._goes_on, False  # a resumed epoch may have no batches left
        batches = self._clocked(self._counter.batches(opened))
        with LongLived() as objects:
            for batch in map(self._show, batches) if self._observers else batches:
                if seconds:
                    self._counter.waited(seconds)
                is_empty, seconds = False, 0.0
                yield batch
                objects.between_steps()
        self._sampler_epoch.end()
        if is_empty:
            raise ValueError(
                f"loader must yield batches in every epoch, got a {type(self._job.data.loader).__name__} that is "
                "exhausted. Let its __iter__ start over: def __iter__(self): yield from make_batches()"
            )
        self._end_of_epoch()

    def _clocked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches. In a data-parallel training, the time that this rank waits for batches is measured."""
        sync = self._job.stepper.sync
        return batches if sync is None else sync.clock.loading(batches)

    def __len__(self) -> int:
        return len(self._prefetcher)

    def _show(self, batch: Any) -> Any:
        for observer in self._observers:
            observer(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch. See :meth:`flatout.data.Prefetcher.state_dict`."""
        state, epoch = self._prefetcher.state_dict(), self._sampler_epoch.to_resume
        return state if epoch is None else state | {"sampler_epoch": epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where ``state`` was saved. See :meth:`flatout.data.Prefetcher.load_state_dict`."""
        if "sampler_epoch" in state:
            state = dict(state)
            self._sampler_epoch.resume(state.pop("sampler_epoch"))
        self._prefetcher.load_state_dict(state)
        self._goes_on = True

    @property
    def _wrapped(self) -> Any:
        return unsliced(getattr(self._job.data.loader, SEEDED_FROM, self._job.data.loader))

    @property
    def _made_from_it(self) -> list[Any]:
        """Loaders made from the user's loader. The first is the loader that yields the batches."""
        loader = self._job.data.loader
        loaders = [self._job.data.source, loader, unsliced(loader), self._wrapped]
        made = [each for each in loaders if isinstance(each, (DataLoader, InMemoryLoader))]
        return [each for each in made if each is not original_of(loader)]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            set_attribute(original_of(self._job.data.loader), self._made_from_it, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
            return
        delattr(original_of(self._job.data.loader), name)
        for loader in self._made_from_it:
            vars(loader).pop(name, None)


WORTH_SECONDS = 0.01
"""Shortest duration of a full collection that causes a freeze, in seconds."""


class LongLived:
    """Context manager that hides long-lived objects from Python's garbage collector after a long full collection.

    A full collection visits every object of the process. With torch and a tokenizer loaded, it takes half a second, in
    which the host queues no GPU work. Right after a full collection every remaining object is in use. ``between_steps``
    then excludes these objects with ``gc.freeze``, which takes no time and keeps no garbage. Later collections visit
    only newer objects. The end of the block reverts the exclusion.

    If other code has already frozen objects, nothing is frozen. Objects that other code freezes later stay frozen.
    """

    def __init__(self) -> None:
        self._begun = 0.0
        self._seconds = 0.0
        self._made_since: list[object] | None = None
        self._others_froze = False

    def __enter__(self) -> LongLived:
        gc.callbacks.append(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._heard)
        if self._made_since is not None and any(each is self._made_since for each in gc.get_objects()):
            gc.unfreeze()  # no other code has frozen objects since, because newer objects are still listed

    def between_steps(self) -> None:
        """Freeze all live objects if a full collection since the last call took long."""
        if self._seconds < WORTH_SECONDS:
            return
        self._seconds = 0.0
        if self._made_since is None and not self._others_froze:
            self._others_froze = gc.get_freeze_count() > 0  # counting takes time in proportion to the count
            if not self._others_froze:
                gc.freeze()
                self._made_since = []

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self._seconds = time.perf_counter() - self._begun
