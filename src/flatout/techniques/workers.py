"""Technique 2 of the checklist: loader workers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from flatout.core.breaks import Breaks
from flatout.core.effects import Unrepeatable
from flatout.core.machine import own_cores
from flatout.data import InMemoryLoader, clone_loader, tune
from flatout.data.loader_class import base_of, is_plain, why_not_plain
from flatout.data.prefix import for_trial
from flatout.data.seeding import is_seeded, with_workers
from flatout.data.tuning import SECONDS
from flatout.data.workers_watch import watch_workers
from flatout.guards import ORDER_FIXED, SAMPLES_PORTABLE, SAMPLES_STEADY, differs_in_workers
from flatout.techniques.base import Effect, LoaderTechnique, NotApplicable, NothingBetter
from flatout.techniques.candidate import LoaderCandidate

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
_SHOWS = 0.1
"""Share of a core per worker from which workers slow down a step on the same cores."""


class WorkerSource:
    """User's loader with other settings of its worker processes.

    ``value`` holds all settings, by the names of ``DataLoader``'s arguments, so that a plan makes the same loader.

    Args:
        loader: loader with a base (``base_of``).
        settings: arguments of ``DataLoader``.
        breaks: receives a change of the dataset that ends the workers.
        reason: sentence of ``tune`` about the settings.
    """

    def __init__(self, loader: Any, settings: Mapping[str, Any], breaks: Breaks, reason: str = "") -> None:
        self.value = {**_settings(_base(clone_loader(loader, **settings))), **settings}
        self.reason = reason
        self._loader = loader
        self._breaks = breaks
        self.label = _label(self.value)

    def make(self) -> Any:
        """Build the loader."""
        made = with_workers(self._loader, self.value)
        if not self.value["num_workers"]:
            return made
        return watch_workers(made, functools.partial(SAMPLES_STEADY.broken, self._breaks, Workers.name))


class Workers(LoaderTechnique):
    """Makes batches in worker processes, with ``num_workers`` and ``prefetch_factor`` chosen by measurement.

    When it helps: decoding or transforming a batch takes a considerable part of the step, and cores are free. When it
    hurts: small samples cost more to send between processes than to make. Workers may also take cores that the step
    needs, or outnumber the cores.

    A loader with more workers than usable cores is tried with fewer workers, even if no step waits. In this case fewer
    workers need not be faster, only not slower.

    A dataset that draws random numbers draws other numbers of the same distribution in other processes. Each sample
    comes once per epoch, and the first epoch keeps its order. Later epochs keep their order if the sampler has its own
    generator. Otherwise the order is another permutation, because augmentation no longer advances the generator that
    seeds the order. With ``deterministic=True`` such a dataset keeps the user's workers, unless ``seed`` gives a seed
    to each sample.
    """

    name = "workers"
    number = 2
    title = "loader workers"
    expected = "20–50 %"
    assumes = (ORDER_FIXED, SAMPLES_PORTABLE, SAMPLES_STEADY)
    values = f"a number of workers, a dict of num_workers and others of {', '.join(_SETTINGS)}"
    rationale = "batches are made while the step runs, by as many worker processes as pay"
    reseeds = (
        "random samples draw other numbers of the same distribution, each comes once per epoch, and the first epoch "
        "keeps its order"
    )

    def effect_on(self, job: Job) -> Effect:
        """Return "reseeded" if samples draw random numbers, which depend on the process that makes them."""
        return "exact" if job.data.randomness is None else "reseeded"

    def check(self, job: Job) -> None:
        """Require the batches of a DataLoader that is not replaced by data in memory.

        Its samples must not depend on earlier samples. With ``deterministic`` they must not depend on the process.
        """
        if isinstance(job.data.source, InMemoryLoader):
            raise NotApplicable("batches are gathered from memory: there is nothing left for workers to do")
        base = base_of(job.data.loader)
        if base is None:
            raise NotApplicable(why_not_plain(job.data.loader))
        if isinstance(base.dataset, IterableDataset):
            raise NotApplicable("an IterableDataset decides itself what each worker yields")
        if base.num_workers > 0 and base.worker_init_fn is not None:
            raise NotApplicable("what the loader's worker_init_fn does may depend on the number of workers")
        try:
            random = job.data.randomness
        except Unrepeatable as reason:
            raise NotApplicable(str(reason)) from reason
        except Exception as error:
            raise NotApplicable(f"this process cannot load a sample itself: {type(error).__name__}") from error
        if random is not None and not random.is_drawn:
            raise NotApplicable(f"{random.reason}: it may depend on samples that another process makes")
        if random is not None and job.spec.deterministic:
            raise NotApplicable(f"{random.reason}: in other processes it would draw other numbers")

    def most_saved(self, job: Job, pace: Pace) -> float:
        """Return the waiting time for batches.

        Workers beyond the cores slow the step down, so the step's time is added for them.
        """
        return pace.load_ms + (pace.step_ms if self.spares(job) else 0.0)

    def spares(self, job: Job) -> bool:
        """Return True if there are more workers than cores, because candidates have fewer."""
        base = base_of(job.data.loader)
        return base is not None and base.num_workers > job.spec.ranks.first(own_cores())

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds of ``tune``, which takes some rounds of all workers if batches are slow."""
        return max(SECONDS, 8 * pace.load_ms / 1e3)

    def candidates(self, job: Job, pace: Pace) -> Sequence[LoaderCandidate]:
        """Return the tuned number of workers, fewer if they share the step's cores, and 0 if the user has some."""
        loader = _loader_of(job)
        base = _base(loader)
        tuned = tune(_base(for_trial(base)), pace.step_ms / 1e3, is_warm=base.num_workers == 0)
        # All ranks measure at the same time, as they load in training. The result of rank 0 counts.
        workers, busy, settings, reason = job.spec.ranks.first(
            (tuned.workers, tuned.busy, tuned.settings, tuned.reason)
        )
        if not is_plain(loader) and not base.persistent_workers:
            settings |= {"persistent_workers": False}  # each epoch draws a seed, as with the user's loader
        numbers = [workers]
        if job.spec.device.type == "cpu" and busy > _SHOWS:
            numbers += [n for n in (workers // 2, 1) if 0 < n < workers]
        if base.num_workers:
            numbers.append(0)
        sources = [
            WorkerSource(loader, {**settings, "num_workers": n} if n else {"num_workers": 0}, job.breaks, reason)
            for n in dict.fromkeys(numbers)
        ]
        others = [source for source in sources if source.value != _settings(base)]
        if not others:
            raise NothingBetter(reason)
        if any(source.value["num_workers"] for source in others):
            _compare_workers(job)
        return others

    def found(self, candidate: WorkerSource) -> str:
        """Return the sentence of ``tune``."""
        return candidate.reason

    def accepts(self, value: Any) -> bool:
        """Accept a number of workers, or a dict of ``num_workers`` and other arguments of ``DataLoader``."""
        settings = value if isinstance(value, Mapping) else {"num_workers": value}
        prefetch_factor = settings.get("prefetch_factor")
        return (
            not settings.keys() - set(_SETTINGS)
            and _is_count(settings.get("num_workers"), least=0)
            and (prefetch_factor is None or _is_count(prefetch_factor, least=1))
            and isinstance(settings.get("persistent_workers", False), bool)
        )

    def check_value(self, job: Job, value: Any) -> None:
        """Reject arguments that ``DataLoader`` rejects, and settings of workers without workers."""
        super().check_value(job, value)
        if isinstance(value, Mapping) and value["num_workers"] == 0 and len(value) > 1:
            others = ", ".join(name for name in value if name != "num_workers")
            raise ValueError(f"techniques['workers'] must leave out {others} where num_workers is 0, got {value!r}")
        try:
            self.candidate_of(job, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"techniques['workers'] cannot be {value!r}: {error}") from error

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the candidate for a number of workers, or for a dict of ``DataLoader``'s arguments about workers."""
        settings = value if isinstance(value, Mapping) else {"num_workers": value}
        return WorkerSource(_loader_of(job), settings if settings["num_workers"] else {"num_workers": 0}, job.breaks)

    def forced(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the candidate for a value, if two workers make the same samples as this process."""
        candidate = super().forced(job, value)
        _compare_workers(job)
        return candidate

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the loader already has these settings. Gathering from memory counts as 0 workers."""
        settings = value if isinstance(value, Mapping) else {"num_workers": value}
        if isinstance(job.data.source, InMemoryLoader):
            return settings == {"num_workers": 0}
        base = base_of(job.data.loader)
        loader = job.data.loader if base is None else base
        return settings == {name: getattr(loader, name, 0) for name in settings}


def _compare_workers(job: Job) -> None:
    """Raise ``NotApplicable`` if two workers do not make the same samples as this process."""
    base = base_of(job.data.loader)
    if base is None or base.num_workers or job.data.randomness is not None or is_seeded(base):
        return
    if seen := differs_in_workers(base):
        raise NotApplicable(SAMPLES_PORTABLE.reason(seen))


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a loader's workers, without their start method."""
    if loader.num_workers == 0:
        return {"num_workers": 0}
    return {name: getattr(loader, name) for name in _SETTINGS[:3]}


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _label(settings: Mapping[str, Any]) -> str:
    workers = settings["num_workers"]
    label = f"{workers} worker{'' if workers == 1 else 's'}"
    if workers:
        label += f", {settings['prefetch_factor']} ahead" + ", persistent" * settings["persistent_workers"]
    return label


def _loader_of(job: Job) -> Any:
    """Return the loader of the batches: the user's, or one over samples in memory."""
    return job.data.loader if base_of(job.data.source) is None else job.data.source


def _base(loader: Any) -> DataLoader[Any]:
    base = base_of(loader)
    assert base is not None
    return base
