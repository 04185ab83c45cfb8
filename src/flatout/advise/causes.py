"""Causes that slow a script down: one rule for each, and the four boxes of the checklist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from flatout.advise.batch_trial import TIMES
from flatout.advise.observe import CallSite, LoaderSite
from flatout.advise.session import Observations
from flatout.core import formatting
from flatout.core.machine import usable_cores
from flatout.profile.shown_profile import Profile
from flatout.report.model import Row

Code = Literal["starved_loader", "sync_in_loop", "fp32_matmuls", "tiny_batches", "evaluation_with_gradients", "on_cpu"]

# Figures in this section: two cores of an AMD EPYC, two runs each beside 0, 2 and 4 busy loops. "Planted" scripts are
# those of tests/advise/scripts. "Clean" scripts have well-chosen loaders, precision and batches.

LEAST_GAIN_OF_WORKERS = 1.1
"""Gain of workers above which a loader is called starved. Planted: 1.66 to 2.0, clean: up to 1.0."""

SURE_GAIN_OF_WORKERS = 1.3
"""Gain of workers above which a diff adds workers.

The value lies between planted and clean scripts, because a diff must not slow a script down.
"""

HANDOVER_SECONDS = 1e-3
"""Assumed time in which the training process receives a batch from a worker: between those for 8 KiB and for 1 MiB."""

MOST_WAIT = 0.5
"""Share of a step that waits for data, above which a loader is called starved although workers would not help.

Planted: 0.73 to 0.94. Clean, with a worker for each core: 0.08 to 0.47.
"""

LEAST_PRODUCTS = 0.2
"""Share of a step in products of matrices and convolutions, above which the precision of the products matters.

A precision with twice the speed gains 1.11 at this share. Planted: 0.91 to 0.95. Layers of 64 units: up to 0.04.
"""

LEAST_BATCH_GAIN = 2.5
"""Gain in samples per second from ``TIMES`` times the samples in a batch, above which batches are called tiny.

Planted: 3.4 to 3.6. Batches of 64 and 256: 1.0 to 2.0.
"""

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "attention", "lstm", "gru")
"""Parts of the names of operators that multiply matrices."""


@dataclass(frozen=True)
class Cause:
    """Cause that slows a script down.

    Attributes:
        code: name of the rule.
        where: ``file:line`` of the user's code; empty if unknown.
        gain: speed of training without the cause, relative to now; None if it was not measured.
        is_estimate: True for a gain that is computed from measured times, and not from a trial.
        is_sure: True if the remedy needs no further trial, so that the diff may contain it.
        values: figures of the explanation, by name.
    """

    code: Code
    where: str
    gain: float | None = None
    is_estimate: bool = False
    is_sure: bool = True
    values: Mapping[str, str] = field(default_factory=dict)


BoxName = Literal["device", "loading", "precision", "evaluation"]


@dataclass(frozen=True)
class Box:
    """Box of the checklist.

    Attributes:
        name: name of the box.
        is_ticked: True if the script fulfills the box, False if not, None if the box does not apply.
        where: ``file:line`` of the code in question; empty if unknown.
    """

    name: BoxName
    is_ticked: bool | None
    where: str = ""


def causes_of(seen: Observations) -> tuple[Cause, ...]:
    """Return all causes, the largest gain first. Causes without a gain are last."""
    found = [cause for rule in RULES for cause in rule(seen)]
    return tuple(sorted(found, key=lambda cause: -(cause.gain or 0.0)))


def _on_cpu(seen: Observations) -> Iterator[Cause]:
    """Find a model that trains on the CPU although there is a GPU."""
    site = training_site(seen)
    if torch.cuda.is_available() and site is not None and site.device == "cpu":
        yield Cause("on_cpu", site.where)


def _starved_loader(seen: Observations) -> Iterator[Cause]:
    """Find a loader whose batches the training waits for."""
    loader, profile = seen.observer.training, seen.profile
    if loader is None or profile is None:
        return
    share = profile.phases["loader_wait"] / profile.seconds
    measured = _gain(seen, "workers")
    gain = _gain_of_workers(profile, loader) if measured is None else measured
    values = {"share": formatting.share(share), "workers": str(loader.num_workers)}
    if gain >= LEAST_GAIN_OF_WORKERS:
        is_sure = gain >= SURE_GAIN_OF_WORKERS and not loader.is_stream  # each worker would repeat a stream
        yield Cause(
            "starved_loader", loader.where, gain, measured is None, is_sure, values | {"remedy": "more_workers"}
        )
    elif share >= MOST_WAIT:
        yield Cause("starved_loader", loader.where, is_sure=False, values=values | {"remedy": "cheaper_samples"})


def _gain_of_workers(profile: Profile, loader: LoaderSite) -> float:
    """Return the estimated gain of one worker per core. The cores and the training itself do not get faster."""
    seconds, wait, cores = profile.seconds, profile.phases["loader_wait"], usable_cores()
    if loader.num_workers:  # workers are always busy if the training waits for them
        return seconds / max(seconds - wait, seconds * min(1.0, loader.num_workers / cores))
    return seconds / max(seconds - wait + HANDOVER_SECONDS, seconds / cores)


def _sync_in_loop(seen: Observations) -> Iterator[Cause]:
    """Find lines that wait for the GPU in every step, or would wait with a GPU."""
    places: dict[str, str] = {}
    for sync in () if seen.profile is None else seen.profile.syncs:
        is_frequent = sync.per_step >= 1 and sync.is_in_every_step
        if sync.where and is_frequent and sync.phase not in ("loader_wait", "update"):
            places.setdefault(sync.where, sync.what)
    for where, what in places.items():
        yield Cause("sync_in_loop", where, values={"call": what})


def _fp32_matmuls(seen: Observations) -> Iterator[Cause]:
    """Find a model whose products of matrices are in fp32 and take much of a step."""
    site, share = training_site(seen), _share_of_products(seen)
    if site is not None and _is_in_fp32(site) and share >= LEAST_PRODUCTS:
        gain, is_worth = _gain(seen, "precision"), _is_worth_bf16(seen, site)
        values = {"share": formatting.share(share), "remedy": "autocast" if is_worth else "no_bf16"}
        is_sure = is_worth and site.gives_tensor
        yield Cause("fp32_matmuls", site.where, gain if is_worth else None, is_sure=is_sure, values=values)


def _tiny_batches(seen: Observations) -> Iterator[Cause]:
    """Find batches that take almost as long as larger batches."""
    profile, site, loader = seen.profile, training_site(seen), seen.observer.training
    if profile is None or seen.sizes is None or site is None:
        return
    small, large = seen.sizes
    step = min(profile.steps, key=lambda step: step.seconds)  # other processes only slow steps down
    more_data = (TIMES - 1) * step.phases["loader_wait"]
    gain = TIMES * step.seconds / (step.seconds + max(0.0, large - small) + more_data)
    if gain >= LEAST_BATCH_GAIN:
        size = None if loader is None else loader.batch_size
        where = site.where if loader is None or size is None else loader.where
        values = {"batch": "" if size is None else f"of {size}", "times": f"{TIMES / gain:.1f}"}
        yield Cause("tiny_batches", where, gain, is_estimate=True, values=values)


def _evaluation_with_gradients(seen: Observations) -> Iterator[Cause]:
    """Find calls that record a graph without a later backward."""
    trained = seen.observer.trained
    wasted: dict[str, str] = {}
    for site in seen.observer.calls:
        if site.is_wasted:  # if a function also trains, its caller is at fault
            where = next((place for place in site.places if place not in trained), site.where)
            wasted.setdefault(where, site.module)
    for where, module in wasted.items():
        yield Cause("evaluation_with_gradients", where, values={"module": module})


RULES: tuple[Callable[[Observations], Iterator[Cause]], ...] = (
    _on_cpu,
    _starved_loader,
    _sync_in_loop,
    _fp32_matmuls,
    _tiny_batches,
    _evaluation_with_gradients,
)
"""All rules."""


def boxes_of(seen: Observations, causes: tuple[Cause, ...]) -> tuple[Box, ...]:
    """Return the checklist's four questions with their answers: device, loading, mixed precision and evaluation."""
    crossed: dict[Code, Cause] = {cause.code: cause for cause in reversed(causes)}
    site, loader = training_site(seen), seen.observer.training
    place = "" if site is None else site.where
    is_on_gpu = site is not None and site.device != "cpu"

    device = Box("device", "on_cpu" not in crossed if torch.cuda.is_available() and site else None, place)
    if loader is None or seen.profile is None:
        loading = Box("loading", None)
    else:
        is_fed = "starved_loader" not in crossed and (loader.pin_memory or not is_on_gpu)
        loading = Box("loading", is_fed, loader.where)
    if site is None or (_is_in_fp32(site) and not _is_worth_bf16(seen, site)):
        precision = Box("precision", None, place)
    else:
        precision = Box("precision", not _is_in_fp32(site), place)
    evaluated = [call.where for call in seen.observer.calls if call.without_gradients]
    if (wasted := crossed.get("evaluation_with_gradients")) is not None:
        evaluation = Box("evaluation", False, wasted.where)
    else:
        evaluation = Box("evaluation", True if evaluated else None, *evaluated[:1])
    return device, loading, precision, evaluation


def training_site(seen: Observations) -> CallSite | None:
    """Return the site of the first call that a backward reached; None if there is no such call."""
    return next((call for call in seen.observer.calls if call.is_reached), None)


def workers_to_use() -> int:
    """Return a first choice for the number of loader workers."""
    return min(4, usable_cores())


def rows_of(seen: Observations) -> list[tuple[str, Row]]:
    """Return the module and row of each timed technique, the largest shown gain first."""
    rows = [(each.module, row) for each in seen.report.modules for row in each.report.rows if row.gain is not None]
    return sorted(rows, key=lambda each: -(shown_gain(each[1]) or 0.0))


def shown_gain(row: Row) -> float | None:
    """Return the gain of a technique that trials kept, if its whole interval is above 1; None for any other row."""
    return row.gain.ratio if row.status == "kept" and row.gain is not None and row.gain.low > 1 else None


def has_bf16_units(device: str) -> bool:
    """Return True if a device has units for products in bf16."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device == "cpu" and any(test() for test in tests if test is not None)


def _is_worth_bf16(seen: Observations, site: CallSite) -> bool:
    """Return True if a trial of bf16 was faster or, without a trial, if the device has units for bf16."""
    gain = _gain(seen, "precision")
    return has_bf16_units(site.device) if gain is None else gain > 1


def _is_in_fp32(site: CallSite) -> bool:
    in_tf32 = site.device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return site.dtypes == {torch.float32} and not site.autocast and not in_tf32


def _share_of_products(seen: Observations) -> float:
    operators = () if seen.profile is None else seen.profile.operators
    return sum(op.share for op in operators if any(part in op.name for part in _PRODUCTS))


def _gain(seen: Observations, technique: str) -> float | None:
    """Return the best shown gain of a technique over all modules.

    The gain of a technique that trials rejected is at most 1. None means that no trial has decided.
    """
    rows = [row for _, row in rows_of(seen) if row.technique == technique]
    shown = [gain for gain in map(shown_gain, rows) if gain is not None]
    rejected = [min(1.0, row.gain.ratio) for row in rows if row.status == "rejected" and row.gain is not None]
    return max(shown or rejected, default=None)
