"""``tune``: number and settings of a ``DataLoader``'s worker processes, found by measurement."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from flatout.core import formatting
from flatout.core.described import Described
from flatout.core.machine import available_memory, free_shared_memory, own_cores
from flatout.core.random_state import RandomState
from flatout.data.loader_class import is_plain
from flatout.data.loaders import is_rewindable, length_of, loader_position
from flatout.data.rate_trials import LOOK, PREFETCH, STROLL, Trials, Try
from flatout.data.seeding import with_workers

SECONDS = 3.0
"""Default time limit of a search."""
_MOST_WORKERS = 64
_BEYOND = 10_000
"""Limit of estimates, above any possible number of workers."""
_ENOUGH = 0.95
"""Share of the best rate at which fewer workers suffice. The rest is the noise of a short trial."""
_HEAD_ROOM = 1.1
"""Factor of an estimated rate over the rate of steps, because a queue that fills just in time runs empty."""
_DEEPEST = 8
"""Largest number of batches ahead per worker in trials, unless the loader has more."""
_STALL = 0.05
"""Share of the time that steps may wait."""
_WORKER_BYTES = 256 * 2**20
"""Assumed memory of a worker process before a measurement: that of an import of torch. A fork takes less."""
_MIB = 2**20


@dataclass(frozen=True, repr=False)
class Tuned(Described):
    """Result of :func:`tune`."""

    loader: DataLoader
    """Loader of the user, or a clone with other settings."""
    workers: int
    prefetch_factor: int | None
    """Batches ahead per worker; None without workers, as in ``DataLoader``."""
    persistent: bool
    """True if workers stay alive from epoch to epoch."""
    start_method: str | None
    """Start method of workers, if that of the loader failed and this one worked. None: that of the loader."""
    start_seconds: float
    """Seconds from ``iter`` to the first batch, in every epoch unless workers are persistent."""
    step_time: float
    """Seconds of the training step without loading."""
    stall: float | None
    """Share of the time that steps wait for their batch; None if it was not measured.

    Without workers, the share follows from the times of a batch and a step.
    """
    busy: float
    """Share of a core that loading keeps busy in one process."""
    tries: tuple[Try, ...]
    reason: str
    """Reason for the choice, in one sentence."""

    def _facts(self) -> dict[str, str]:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return {"settings": shown, "reason": self.reason}

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of ``DataLoader`` that turn the user's loader into ``loader``, as values for JSON."""
        settings: dict[str, Any] = {"num_workers": self.workers}
        if self.workers:
            settings |= {"prefetch_factor": self.prefetch_factor, "persistent_workers": self.persistent}
        if self.start_method:
            settings["multiprocessing_context"] = self.start_method
        return settings

    @property
    def stall_without_workers(self) -> float:
        """Share of the time that steps would wait if this process loaded their batches itself."""
        seconds = 1 / self.tries[0].batches_per_second
        return seconds / (seconds + self.step_time)


def tune(loader: DataLoader, step_time: float, *, budget: float = SECONDS, is_warm: bool = False) -> Tuned:
    """Find the fewest workers, and the fewest batches ahead of each, with which no step waits for its batch.

    Trials load batches of indices from the user's sampler. All trials share one stream of indices, so that no trial
    finds files in memory that an earlier one has read. Samplers and generators are restored. With ``num_workers=0``,
    loading and steps take turns. Workers load while the step runs. They are chosen only if this was measured to be
    faster.

    Two limits apply to the number of workers. The first is the number of available physical cores, divided by the share
    of a core that loading keeps busy. Affinity and the quota of a container limit the available cores. A loader that
    waits for a disk or a network may have more workers than one that decodes. The second limit is half of the free
    memory, and half of the free space in /dev/shm.

    If there is time, the chosen workers run again at the pace of the step. If they are fast enough on average and steps
    still wait, batch times vary. Then ``prefetch_factor`` is doubled while this helps. Workers are persistent if those
    of ``loader`` are, or if their start would take more than a twentieth of an epoch. They do not become persistent for
    a dataset with ``set_epoch``, because living workers do not receive the call. With persistent workers, torch draws
    their seed from the loader's generator only in the first epoch. So a shuffled loader has other random orders in
    later epochs.

    The start method is that of the loader, else that of the platform. It affects the time of the start and safety, but
    not the rate. Fork is never replaced, because other methods import the user's main script again. If the default of
    the platform fails to pickle the dataset, workers are forked on Linux. If no worker can load, no workers are chosen.
    An example is a dataset that uses CUDA, in a forked process.

    Args:
        loader: a ``DataLoader`` over a map-style dataset, with torch's own samplers.
        step_time: seconds of one training step without loading. 0: find the highest rate.
        budget: seconds to spend. If one trial of a slow dataset takes longer, fewer batches are measured.
        is_warm: True if this process has loaded batches before. The first slow batch is then timed, too.

    Returns:
        The tuned loader and all measurements.

    Raises:
        ValueError: ``step_time`` or ``budget`` is negative. Or ``loader`` is empty, has workers with a
            ``worker_init_fn``, or would lose samples in trials.
    """
    if not step_time >= 0 or not budget >= 0:
        raise ValueError(f"step_time and budget must be >= 0, got {step_time} and {budget}")
    if not is_plain(loader) or not is_rewindable(loader):
        raise ValueError("loader must be a DataLoader that trials can iterate without using up its samples")
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        raise ValueError("loader must not have a worker_init_fn: what it loads may depend on its workers")
    if length_of(loader) == 0:
        raise ValueError("loader must have a batch, got an empty one")
    position = loader_position(loader)
    try:
        with RandomState.capture(loader).restored(), warnings.catch_warnings():
            # torch warns of more workers than cores, but trials find out how many workers are too many.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return _SettingsSearch(Trials(loader, is_warm=is_warm), loader, step_time, budget).run()
    finally:
        position.restore()


@dataclass(frozen=True)
class _Bound:
    workers: int
    why: str


class _SettingsSearch:
    """Search for the best settings by trials."""

    def __init__(self, trials: Trials, loader: DataLoader, step_time: float, budget: float) -> None:
        self._trials = trials
        self._loader = loader
        self._step_time = step_time
        self._deadline = time.perf_counter() + budget
        self._tries: dict[int, Try] = {}
        self._failure = ""

    def run(self) -> Tuned:
        self._tries[0] = self._trials.alone()
        stall, ahead = None, PREFETCH
        why_not = self._why_no_workers()
        if not why_not:
            while (workers := self._next()) and self._has_time_to_try(workers) and self._try(workers):
                pass
            self._look_twice()
        chosen = self._tries[self._fewest(self._tries)]
        if chosen.workers:
            ahead, stall = self._depth(chosen)
        if stall is not None and (1 - stall) * self._possible < self._pace(self._tries[0]):
            # A step waits while this process receives its batch, which can take longer than making the batch.
            chosen, stall = self._tries[0], None
        return self._tuned(chosen, ahead, stall, why_not)

    # -- number of workers -----------------------------------------------------------------------------------

    def _why_no_workers(self) -> str:
        """Return why no trial with workers is needed; empty if one is."""
        seconds, bound = self._batch, self._bound()
        if self._trials.device is not None:
            return f"batches are on {self._trials.device} already: another process could not make them there"
        if seconds <= (1 - _ENOUGH) * self._step_time:
            times = f"{1e3 * seconds:.2f} ms beside a step of {1e3 * self._step_time:.2f} ms"
            return f"loading a batch takes {times}: there is nothing to hide"
        if bound.workers == 0:
            return f"this machine cannot serve one worker: {bound.why}"
        return ""

    def _next(self) -> int | None:
        """Return the next number to try: more while the rate grows, then fewer while the rate holds. None: stop."""
        most, tried = self._bound().workers, sorted(n for n in self._tries if n)
        if not tried:
            return min(most, self._estimate(self._tries[0]) if self._step_time else own_cores())
        fewest = self._fewest(tried)
        keeps_up = self._keeps_up(self._tries[fewest])
        estimate = self._estimate(self._tries[fewest]) if self._step_time else self._affordable()
        if not keeps_up and fewest == tried[-1] and fewest < most:
            return min(most, max(estimate, fewest + 1))
        below = max((n for n in tried if n < fewest), default=0)
        fewer = max(below + 1, estimate) if keeps_up else fewest // 2
        return fewer if below < fewer < fewest else None

    def _estimate(self, tried: Try) -> int:
        """Estimate how many workers keep up with the step, if each loads as fast as those of a trial."""
        workers = _HEAD_ROOM * max(1, tried.workers) / (tried.batches_per_second * self._step_time)
        return math.ceil(min(workers, _BEYOND))

    def _affordable(self) -> int:
        """Return how many workers there is time to start and to try."""
        start, receive = self._costs()
        left = self._deadline - time.perf_counter() - LOOK - self._batch
        return int(min(left / (start + receive), _BEYOND))

    def _costs(self) -> tuple[float, float]:
        """Estimate the seconds per worker of a trial: to start and end the worker, and to receive its batches.

        The end is assumed to take as long as the start. More workers are assumed to be no faster than those of the last
        trial.
        """
        last = self._last
        start = max(1e-3, last.start_seconds - self._batch) / last.workers
        return 2 * start, (PREFETCH + 1) / last.batches_per_second

    @property
    def _batch(self) -> float:
        """Seconds that a batch takes in this process."""
        return 1 / self._tries[0].batches_per_second

    @property
    def _last(self) -> Try:
        return self._tries[next(reversed(self._tries))]

    def _fewest(self, numbers: Iterable[int]) -> int:
        """Return the fewest workers with which steps keep their pace, or lose little against the best trial."""
        paces = {n: self._pace(self._tries[n]) for n in sorted(numbers)}
        best, possible = max(paces.values()), self._possible
        enough = _ENOUGH * (possible if best >= _ENOUGH * possible else best)
        return next(n for n, pace in paces.items() if pace >= enough)

    def _pace(self, tried: Try) -> float:
        """Return the steps per second with a measured loader."""
        seconds = 1 / tried.batches_per_second
        return 1 / (seconds + self._step_time if tried.workers == 0 else max(seconds, self._step_time))

    def _keeps_up(self, tried: Try) -> bool:
        return self._pace(tried) >= _ENOUGH * self._possible

    @property
    def _possible(self) -> float:
        return 1 / self._step_time if self._step_time else math.inf

    def _bound(self) -> _Bound:
        """Return how many workers the machine can serve, and what sets the limit."""
        cores, busy, batch = own_cores(), self._trials.busy, self._trials.batch_bytes
        each = max((t.worker_bytes for t in self._tries.values()), default=0) or _WORKER_BYTES
        shared, memory = free_shared_memory(), available_memory()
        ahead, given = PREFETCH * batch, 2 * batch  # `given`: the batch of a step, and the one before it
        by_cores = max(cores, int(cores / max(busy, cores / _MOST_WORKERS)))
        by_shared = int((shared / 2 - given) / ahead) if ahead and shared < math.inf else by_cores
        by_memory = int((memory / 2 - given) / (each + ahead))
        bounds = (
            _Bound(by_cores, f"each keeps {formatting.share(busy)} of a core busy, and there are {cores}"),
            _Bound(
                max(0, by_shared),
                f"each has {ahead / _MIB:.1f} MiB of batches ahead, and {shared / _MIB:.1f} MiB of /dev/shm are free",
            ),
            _Bound(
                max(0, by_memory),
                f"each takes {(each + ahead) / _MIB:.1f} MiB, and {memory / _MIB:.1f} MiB of memory are free",
            ),
        )
        return min(bounds, key=lambda bound: bound.workers)

    def _has_time_to_try(self, workers: int) -> bool:
        """Return True if there is time for a trial. The first number of workers is always tried."""
        last = self._last
        if last.workers == 0:
            return True
        start, receive = self._costs()
        return self._has(workers * start + max(workers, last.workers) * receive + LOOK + self._batch)

    def _has(self, seconds: float) -> bool:
        return time.perf_counter() + seconds < self._deadline

    def _try(self, workers: int) -> bool:
        """Try a number of workers. Return False if they fail."""
        try:
            self._tries[workers] = self._trials.with_workers(workers)
        except Exception as error:
            self._failure = f"{_workers(workers)} failed with {formatting.first_line(error)}"
            return self._trials.start_otherwise(error) and self._try(workers)
        return True

    def _look_twice(self) -> None:
        """Measure loading without workers again, because files and code were cold in the first trial."""
        first = self._tries[0]
        if self._fewest(self._tries) and self._has(LOOK + 2 / first.batches_per_second):
            self._tries[0] = max(first, self._trials.alone(), key=lambda tried: tried.batches_per_second)

    # -- batches ahead ---------------------------------------------------------------------------------------

    def _depth(self, chosen: Try) -> tuple[int, float | None]:
        """Return the fewest batches ahead per worker with which steps do not wait, and the share of time they wait."""
        wanted = self._loader.prefetch_factor or PREFETCH
        deepest = min(max(wanted, _DEEPEST), self._deepest(chosen))
        depth = min(wanted, deepest)
        stall = self._stall(chosen, depth) if self._step_time else None
        while stall is not None and stall >= _STALL and 2 * depth <= deepest and self._keeps_up(chosen):
            deeper = self._stall(chosen, 2 * depth)
            if deeper is None or deeper > 0.8 * stall:
                break  # steps wait for another reason
            depth, stall = 2 * depth, deeper
        return depth, stall

    def _deepest(self, chosen: Try) -> int:
        batch, workers = self._trials.batch_bytes, chosen.workers
        room = min(free_shared_memory(), available_memory() - workers * chosen.worker_bytes) / 2
        return max(PREFETCH, int((room / batch - 2) / workers)) if batch else _DEEPEST

    def _stall(self, chosen: Try, depth: int) -> float | None:
        """Measure the share of time that steps wait. Return None if there is no time for the trial."""
        queue = chosen.workers * depth
        fill = queue / chosen.batches_per_second
        if not self._has(chosen.start_seconds + fill + max(STROLL, 2 * queue / self._pace(chosen))):
            return None
        return self._trials.paced(chosen.workers, depth, self._step_time, fill, at_least=2 * queue)

    # -- result ----------------------------------------------------------------------------------------------

    def _tuned(self, chosen: Try, ahead: int, stall: float | None, why_not: str) -> Tuned:
        loader, workers = self._loader, chosen.workers
        tuned = Tuned(
            loader=loader,
            workers=workers,
            prefetch_factor=ahead if workers else None,
            persistent=workers > 0 and self._is_to_persist(chosen),
            start_method=self._trials.start_method if workers else None,
            start_seconds=chosen.start_seconds,
            step_time=self._step_time,
            stall=stall,
            busy=self._trials.busy,
            tries=tuple(self._tries.values()),
            reason="",
        )
        if workers == 0 and self._step_time:
            stall = tuned.stall_without_workers
        if any(getattr(loader, name) != value for name, value in tuned.settings.items()):
            loader = with_workers(loader, tuned.settings)
        return replace(tuned, loader=loader, stall=stall, reason=self._reason(tuned, chosen, why_not))

    def _is_to_persist(self, chosen: Try) -> bool:
        """Return True if workers should stay alive between epochs.

        This saves their start, but not the first batch of an epoch. Living workers keep an old copy of the dataset.
        """
        epoch = length_of(self._loader) / self._pace(chosen)
        start = chosen.start_seconds - self._batch
        changes = hasattr(self._loader.dataset, "set_epoch")
        return self._loader.persistent_workers or (not changes and start > (1 - _ENOUGH) * epoch)

    def _reason(self, tuned: Tuned, chosen: Try, why_not: str) -> str:
        load, step = f"{1e3 * self._batch:.2f} ms", f"{1e3 * self._step_time:.2f} ms"
        parts = []
        if why_not:
            parts.append(why_not)
        elif chosen.workers == 0:
            beaten = ", and no number of workers tried does better" if len(self._tries) > 1 else ""
            parts.append(f"loading a batch takes {load} beside a step of {step}{beaten}")
        else:
            parts.append(self._rate(chosen, load, step))
            if self._step_time:
                stalled = formatting.share(tuned.stall_without_workers)
                waiting = f"without workers a batch takes {load} and steps wait {stalled} of the time"
                parts.append(waiting + ("" if tuned.stall is None else f", with them {formatting.share(tuned.stall)}"))
            if tuned.prefetch_factor != (self._loader.prefetch_factor or PREFETCH):
                parts.append(f"each is {tuned.prefetch_factor} batches ahead, because batch times vary")
        if self._failure:
            parts.append(
                self._failure + (f", so workers are started by {tuned.start_method}" * bool(tuned.start_method))
            )
        bound, asked = self._bound(), self._loader.num_workers
        if asked > bound.workers:
            parts.append(f"{asked} workers are more than this machine can serve: {bound.why}")
        elif asked > chosen.workers:
            parts.append(f"{asked} workers are more than that takes")
        return "; ".join(parts)

    def _rate(self, chosen: Try, load: str, step: str) -> str:
        verb = "load" if chosen.workers > 1 else "loads"
        rate = f"{_workers(chosen.workers)} {verb} {chosen.batches_per_second:.1f} batches/s"
        if not self._step_time:
            return f"{rate}, {chosen.batches_per_second / self._tries[0].batches_per_second:.1f} times as many as none"
        outcome = "as a step needs" if self._keeps_up(chosen) else "the most that was reached, where a step needs more"
        return f"{rate}, {outcome} ({1 / self._step_time:.1f}/s at {step})"


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number > 1)}"
