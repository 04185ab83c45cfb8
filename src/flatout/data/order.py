"""The order and the random numbers of a plain ``DataLoader(num_workers=0)``, without its lists of indices.

torch draws random numbers at three moments, and a loader that is to leave every generator in the same state
has to draw at the same ones (torch/utils/data/dataloader.py, sampler.py):

1. ``iter(loader)``: one int64, the base seed, from ``loader.generator`` (default generator if ``None``);
2. first batch, when shuffled: one int64 from the default generator, which seeds a private one, or nothing if
   the sampler has its own; then ``randperm(n)``;
3. exhaustion, when shuffled: one more ``randperm(n)``, thrown away. A partial last batch exhausts the sampler
   as it is made; a full one only when the batch after it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler


@dataclass(frozen=True)
class Span:
    """Positions ``[first, first + count)`` of an epoch's order: one batch."""

    first: int
    count: int


def why_not_ordered(loader: DataLoader) -> str | None:
    """Why :class:`EpochOrder` cannot stand in for the samplers of ``loader``; ``None`` if it can."""
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        return f"batch_sampler is a {type(batch_sampler).__name__}, not torch's BatchSampler"
    sampler: Any = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        samples = len(sampler)
    elif type(sampler) is RandomSampler:
        if sampler.replacement:
            return "RandomSampler(replacement=True)"
        if sampler._num_samples is not None:
            return "RandomSampler with num_samples"
        if sampler.generator is not None and sampler.generator.device.type != "cpu":
            return f"the sampler's generator is on {sampler.generator.device}"
        samples = len(sampler)
    else:
        return f"sampler is a {type(sampler).__name__}, not torch's RandomSampler or SequentialSampler"
    dataset: Any = loader.dataset
    if samples > len(dataset):
        return f"the sampler draws from {samples} samples, the dataset has {len(dataset)}"
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        return "worker_init_fn runs in worker processes only"
    return None


class EpochOrder:
    """One pass over the samplers of ``loader``; making it is what ``iter(loader)`` is to the generators."""

    def __init__(self, loader: DataLoader) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
        batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = batch_sampler.sampler
        self._shuffled = type(self._sampler) is RandomSampler
        self._batch_size: int = batch_sampler.batch_size
        self._drop_last: bool = batch_sampler.drop_last
        self._samples = len(self._sampler)
        self._next = 0
        self._exhausted = False

    def draw(self) -> Tensor | None:
        """At the first batch: this epoch's permutation, int64 ``[samples]``; ``None`` for 0, 1, 2, ..."""
        if not self._shuffled:
            return None
        generator = self._sampler.generator
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            generator.manual_seed(seed)
        return torch.randperm(self._samples, generator=generator)

    def next_span(self) -> Span | None:
        """Where the next batch lies; ``None`` behind the last. Draws nothing, so it may run ahead."""
        count = min(self._batch_size, self._samples - self._next)
        if count <= 0 or (self._drop_last and count < self._batch_size):
            return None
        span = Span(self._next, count)
        self._next += count
        return span

    def delivered(self, span: Span | None) -> None:
        """Draw what the sampler draws as ``span`` (``None``: the end) is handed to the user."""
        partial = span is None or span.count < self._batch_size
        if not partial or self._exhausted:
            return
        self._exhausted = True
        # A private generator dies with the epoch: only a user's own is seen to move.
        if self._shuffled and self._sampler.generator is not None:
            torch.randperm(self._samples, generator=self._sampler.generator)
