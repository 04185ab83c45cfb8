"""Data loaders: prefetching, batches in memory, seeds of samples, and tuning of worker processes."""

from flatout.core.batches import (
    batch_size_of,
    map_tensors,
    objects_of,
    resized,
    split,
    tensors_of,
    tensors_within,
    to_device,
)
from flatout.data.cache import CachedDataset, cache_in_memory
from flatout.data.in_memory_loader import InMemoryLoader, why_not_in_memory
from flatout.data.loaders import clone_loader, is_rewindable
from flatout.data.normalize import Normalize
from flatout.data.prefetcher import Prefetcher
from flatout.data.prefix import PrefixCache
from flatout.data.remote import WorkerError
from flatout.data.samples import NotCacheable
from flatout.data.seeding import seed_samples
from flatout.data.stages import NotExamined, Stage, sample_stages
from flatout.data.tuning import Tuned, tune

__all__ = [
    "CachedDataset",
    "InMemoryLoader",
    "Normalize",
    "NotCacheable",
    "NotExamined",
    "Prefetcher",
    "PrefixCache",
    "Stage",
    "Tuned",
    "WorkerError",
    "batch_size_of",
    "cache_in_memory",
    "clone_loader",
    "is_rewindable",
    "map_tensors",
    "objects_of",
    "resized",
    "sample_stages",
    "seed_samples",
    "split",
    "tensors_of",
    "tensors_within",
    "to_device",
    "tune",
    "why_not_in_memory",
]
