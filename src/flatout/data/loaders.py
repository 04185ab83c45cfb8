"""What can be known of a user's loader, and done with it, without iterating it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_REWINDABLE_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
_WORKERS_ONLY = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_BATCHING = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def is_rewindable(loader: Any) -> bool:
    """Whether iterating ``loader`` once more loses no sample.

    True for an exact ``DataLoader`` over a map-style dataset with torch's own samplers, for flatout's loaders
    over such a one, and for a list or tuple of batches. False for everything that cannot be known.
    """
    if type(loader) in (list, tuple):
        return True
    if type(loader) is not DataLoader:
        inner = getattr(loader, "loader", None) if type(loader).__module__.startswith("flatout.data.") else None
        return inner is not None and is_rewindable(inner)
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        return False
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler) in (list, tuple):
        return True
    if type(batch_sampler) is BatchSampler:
        return type(batch_sampler.sampler) in _REWINDABLE_SAMPLERS
    return batch_sampler is None and type(loader.sampler) in _REWINDABLE_SAMPLERS


def clone_loader(loader: DataLoader, **changes: Any) -> DataLoader:
    """A second ``DataLoader`` like ``loader``, with ``changes``.

    Shares dataset, samplers, generator, ``collate_fn`` and all other settings. Settings that only exist with
    worker processes are left out when there are none. Iterating the clone advances shared samplers and
    generators: capture them first.

    Args:
        loader: an exact ``DataLoader``.
        changes: any argument of ``DataLoader``, such as ``num_workers=4, persistent_workers=True``.

    Raises:
        ValueError: ``loader`` is a subclass or is made of data pipes, or a change contradicts its batch
        sampler.
    """
    if type(loader) is not DataLoader:
        raise ValueError(f"loader must be exactly a torch DataLoader, got {type(loader).__name__}")
    dataset = changes.get("dataset", loader.dataset)
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        raise ValueError("loader must not be made of data pipes: a clone would share their state")
    arguments: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "dataset",
            "num_workers",
            "collate_fn",
            "pin_memory",
            "worker_init_fn",
            "generator",
            "in_order",
            *_WORKERS_ONLY,
        )
    }
    if loader.pin_memory_device:
        arguments["pin_memory_device"] = loader.pin_memory_device
    arguments |= _batching(loader, changes)
    arguments |= changes
    if arguments["num_workers"] == 0:
        for name in _WORKERS_ONLY:
            if name not in changes:
                del arguments[name]
    clone = DataLoader(**arguments)
    if not changes.keys() & set(_BATCHING):
        # The very same object: DataLoader would wrap the sampler anew, losing what the user did to its
        # wrapper.
        vars(clone)["batch_sampler"] = loader.batch_sampler
    for name, value in vars(loader).items():  # what the user attached
        vars(clone).setdefault(name, value)
    return clone


def _batching(loader: DataLoader, changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make the clone draw the same batches, as far as ``changes`` leave them alone."""
    iterable = isinstance(loader.dataset, IterableDataset)
    changed = changes.keys() & set(_BATCHING)
    if loader.batch_size is None and loader.batch_sampler is not None:
        if "batch_sampler" in changes:
            return {}
        if changed - {"dataset"}:
            raise ValueError(f"{sorted(changed)} cannot be changed: the loader has a batch_sampler of its own")
        return {"batch_sampler": loader.batch_sampler}
    if "batch_sampler" in changes:
        return {}
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not iterable and not changed & {"sampler", "shuffle"}:
        batching["sampler"] = loader.sampler
    return batching


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell ``loader``, or failing that its samplers and dataset, which epoch begins.

    Calls ``loader.set_epoch`` if there is one; else that of the batch sampler, its sampler, the sampler and
    the dataset, each object once. Without any of them it does nothing.
    """
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    batch_sampler = getattr(loader, "batch_sampler", None)
    seen: list[Any] = []
    for part in (
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        tell = getattr(part, "set_epoch", None)
        if callable(tell) and not any(part is other for other in seen):
            seen.append(part)
            tell(epoch)
