"""2: loader workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from flatout.data import InMemoryLoader, clone_loader
from flatout.data.generators import RandomState
from flatout.data.machine import usable_cores
from flatout.techniques.base import LoaderTechnique, NotApplicable, Source

if TYPE_CHECKING:
    from flatout.job import Job


class WorkerSource:
    """The user's DataLoader with another number of worker processes."""

    def __init__(self, loader: DataLoader[Any], workers: int) -> None:
        self.label = f"{workers} worker{'' if workers == 1 else 's'}"
        self.value = workers
        self._loader = loader

    def make(self) -> DataLoader[Any]:
        """Build the loader. Workers live through an epoch, or through all of them where the user's did."""
        keep = self._loader.persistent_workers and self.value > 0
        return clone_loader(self._loader, num_workers=self.value, persistent_workers=keep)


class Workers(LoaderTechnique):
    """Makes batches in worker processes, as many as the step can use.

    When it helps: decoding or transforming a batch takes longer than a sliver of the step and there are cores to
    spare. When it hurts: small samples (sending a batch between processes costs more than making it), cores that
    the step itself needs, and more workers than cores. Random augmentation would draw other numbers, so a dataset
    that is seen to draw any stays where the user has it.
    """

    name = "workers"
    number = 2
    title = "loader workers"
    kept_because = "batches are made in worker processes while the step runs"

    def check(self, job: Job) -> None:
        """A DataLoader that has not been replaced by data in memory."""
        if isinstance(job.source, InMemoryLoader):
            raise NotApplicable("batches are gathered from memory: there is nothing left for workers to do")
        if not isinstance(job.loader, DataLoader):
            raise NotApplicable(f"the loader is a {type(job.loader).__name__}, not a DataLoader")
        if isinstance(job.loader.dataset, IterableDataset):
            raise NotApplicable("an IterableDataset decides itself what each worker yields")
        state = RandomState.capture(job.loader.dataset)
        with state.restored():
            job.loader.dataset[0]
            moved = state.moved()
        if moved is not None:
            raise NotApplicable(f"a sample draws from {moved}: in other processes it would draw other numbers")

    def candidates(self, job: Job) -> Sequence[Source]:
        """1, 2, 4 ... up to the cores of this machine, and none at all."""
        assert isinstance(job.loader, DataLoader)
        loader, cores = job.loader, usable_cores()
        counts = [n for n in (2, 4, 8, 16, 32) if n < cores] + [cores, 1, 0]
        return [WorkerSource(loader, n) for n in dict.fromkeys(counts) if n != loader.num_workers]

    def forced(self, job: Job, value: Any) -> Source:
        """A number of workers."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"techniques['workers'] must be a number of workers or False, got {value!r}")
        assert isinstance(job.loader, DataLoader)
        return WorkerSource(job.loader, value)
