"""Loaders as libraries define them: subclasses and wrappers of ``DataLoader``, reduced to their overrides."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler


class Collating(DataLoader):
    """DataLoader with another constructor and another length, as PyTorch Geometric's and MONAI's."""

    def __init__(self, samples, size, *, factor):
        super().__init__(samples, batch_size=size, shuffle=True, collate_fn=lambda parts: factor * torch.stack(parts))
        self.factor = factor

    def __len__(self):
        return super().__len__()


class _Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader):
    """DataLoader with one iterator over all epochs, as timm's ``MultiEpochsDataLoader``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = _Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class Normalizing:
    """Wrapper that changes each batch and is not a DataLoader, as timm's ``PrefetchLoader``."""

    def __init__(self, loader, mean):
        self.loader = loader
        self.mean = torch.tensor([mean])
        self.stream = None

    def __iter__(self):
        for batch in self.loader:
            yield batch - self.mean

    def __len__(self):
        return len(self.loader)


class EpochSampler(RandomSampler):
    """Sampler that counts epochs when they begin, and seeds each with its number."""

    def __init__(self, samples):
        super().__init__(samples)
        self.epoch = 0

    def __iter__(self):
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        self.set_epoch(self.epoch + 1)
        yield from super().__iter__()

    def set_epoch(self, epoch):
        self.epoch = epoch


class Shard:
    """Wrapper with ``DataLoader`` as ``__class__`` that reads one batch ahead, as accelerate's ``DataLoaderShard``."""

    def __init__(self, *args, **kwargs):
        self.base_dataloader = DataLoader(*args, **kwargs)
        self.rng_types = ["torch"]
        self.iteration = 0
        self.end_of_dataloader = False

    def __getattr__(self, name):
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self):
        return self.base_dataloader.__class__

    def __len__(self):
        return len(self.base_dataloader)

    def __reduce__(self):
        raise TypeError("copies are not made this way")

    def set_epoch(self, epoch):
        self.iteration = epoch
        if hasattr(self.batch_sampler.sampler, "set_epoch"):
            self.batch_sampler.sampler.set_epoch(epoch)

    def __iter__(self):
        self.end_of_dataloader = False
        self.set_epoch(self.iteration)
        batches = self.base_dataloader.__iter__()
        batch = next(batches)
        while True:
            try:
                following = next(batches)
                yield batch
                batch = following
            except StopIteration:
                self.end_of_dataloader = True
                yield batch
                break
        self.iteration += 1


WITH_BASE = {
    "another constructor": lambda samples: Collating(samples, 4, factor=3),
    "multi-epochs": lambda samples: MultiEpochs(samples, batch_size=4, shuffle=True),
    "wrapper": lambda samples: Normalizing(DataLoader(samples, batch_size=4, shuffle=True), 7),
    "wrapped subclass": lambda samples: Normalizing(MultiEpochs(samples, batch_size=4, shuffle=True), 7),
    "shard": lambda samples: Shard(samples, batch_size=4, shuffle=True),
    "shard with epochs": lambda samples: Shard(samples, batch_size=4, sampler=EpochSampler(samples)),
}
"""Loaders that have a base, with batches of 4 samples. Samples are 0-dim tensors."""


class OwnIterator(DataLoader):
    """DataLoader that replaces the iterator, as torchdata's ``StatefulDataLoader``."""

    def _get_iterator(self):
        return super()._get_iterator()


class OwnSampler(DataLoader):
    """DataLoader whose batch sampler is a property."""

    @property
    def batch_sampler(self):
        return [[0]]

    @batch_sampler.setter
    def batch_sampler(self, value):
        pass


class FromElsewhere(DataLoader):
    """DataLoader whose batches come from another source."""

    def __iter__(self):
        yield from SOMEWHERE


SOMEWHERE = iter([torch.zeros(4)])


class Begun:
    """Wrapper that holds a started iterator."""

    def __init__(self, loader):
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self):
        yield from (self.batches if self.loader else ())


class Terminal:
    """Output stream that is not a file."""

    def write(self, text):
        print(text)


class Printing:
    """Wrapper that writes its progress, as tqdm does."""

    def __init__(self, loader):
        self.iterable, self.fp = loader, Terminal()

    def __iter__(self):
        for batch in self.iterable:
            self.fp.write(".")
            yield batch


class TwoLoaders:
    """Wrapper of two loaders."""

    def __init__(self, loader):
        self.first, self.second = loader, DataLoader(loader.dataset)

    def __iter__(self):
        yield from self.first
        yield from self.second


WITHOUT_BASE = {
    "iterator": (lambda samples: OwnIterator(samples), "_get_iterator"),
    "property": (lambda samples: OwnSampler(samples), "batch_sampler"),
    "elsewhere": (lambda samples: FromElsewhere(samples), "__iter__"),
    "begun": (lambda samples: Begun(DataLoader(samples)), "Begun"),
    "printing": (lambda samples: Printing(DataLoader(samples)), "Printing"),
    "two": (lambda samples: TwoLoaders(DataLoader(samples)), "TwoLoaders"),
    "list": (lambda samples: [samples], "list"),
}
"""Loaders without a base, each with a word of the reason."""
