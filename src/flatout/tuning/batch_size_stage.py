"""Stage that decides the batch size before all other techniques, because they depend on the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from flatout.core import formatting
from flatout.data.loaders import length_of
from flatout.guards import MeanOverSamples
from flatout.techniques import REGISTRY, StepTechnique
from flatout.techniques.batch_size import BatchCandidate, largest_batch, size_of
from flatout.training.batch_size_change import BatchSizeChange
from flatout.training.learning_rate import ScaledSchedule
from flatout.tuning.bench import Bench
from flatout.tuning.choices import BATCH_SIZE, Choices
from flatout.tuning.size_trials import memory_limit, parts_that_fit
from flatout.tuning.tuner import Tuner

PARTS_ARE_EQUAL = MeanOverSamples()


def apply_batch_size(
    tuner: Tuner, bench: Bench, choices: Choices, batch_size: str | int, *, checks_memory: bool
) -> None:
    """Apply the requested batch size, and split batches that do not fit in memory.

    Args:
        tuner: tuner on ``bench``.
        bench: the training.
        choices: techniques that are forbidden or forced.
        batch_size: argument of ``optimize``, in samples per update if it is a number.
        checks_memory: True to test with steps whether whole batches fit in memory.

    Raises:
        ValueError: the batch size cannot be applied.
        torch.OutOfMemoryError: a single sample does not fit in memory, or batches cannot be computed in parts.
    """
    job = bench.job
    memory_techniques = [t for t in REGISTRY if isinstance(t, StepTechnique) and t.goal == "memory"]
    for technique in memory_techniques:
        if choices.of(technique):
            tuner.decide(technique)
    if choices.of(BATCH_SIZE):
        tuner.decide(BATCH_SIZE)
        return
    if job.spec.optimizer is None or choices.plan is not None or choices.of(BATCH_SIZE) is False:
        return
    if isinstance(batch_size, int):
        asked = BATCH_SIZE.forced(job, {"samples": batch_size // job.spec.accumulate})
        tuner.impose(BATCH_SIZE, asked, "batch_size= asks for it")
    bench.rewind()
    if not checks_memory:
        return
    failure: torch.OutOfMemoryError | None = None
    try:
        with bench.ranks.attempt():
            parts = parts_that_fit(job)
    except torch.OutOfMemoryError as error:
        failure = error
    bench.rewind()
    if failure is None and parts is not None and (reason := tuner.contradiction(PARTS_ARE_EQUAL)):
        whole = formatting.size_of(int(memory_limit(job)))
        failure = torch.OutOfMemoryError(
            f"batches of {largest_batch(job)} do not fit into {whole}, and cannot be computed in parts: {reason}"
        )
    if failure is None:
        _impose_parts(parts, tuner, bench)
        return
    free = [technique for technique in memory_techniques if choices.of(technique) is None]
    if not any(_fits_with(technique, tuner, bench) for technique in free):
        raise failure


def _impose_parts(parts: BatchCandidate | None, tuner: Tuner, bench: Bench) -> None:
    """Split batches that do not fit in memory."""
    if parts is not None:
        result = bench.job.stepper.micro_batches.result()
        why = f"whole batches do not fit into memory: they are computed in parts, {result}"
        tuner.impose(BATCH_SIZE, parts, why)


def _fits_with(technique: StepTechnique, tuner: Tuner, bench: Bench) -> bool:
    """Keep a technique if batches, or parts of batches, fit in memory with it. Return True if it is kept."""
    try:
        with bench.ranks.attempt():
            technique.check(bench.job)
            candidate = technique.candidates(bench.job)[0]
            with candidate:
                parts = parts_that_fit(bench.job)
    except Exception:  # the model may not allow the change, or not even one sample may fit in memory
        return False
    finally:
        bench.rewind()
    if parts is not None and tuner.contradiction(PARTS_ARE_EQUAL):
        return False
    tuner.impose(technique, candidate, f"batches do not fit into memory otherwise: {technique.rationale}")
    _impose_parts(parts, tuner, bench)
    return True


def scaled_schedule(bench: Bench, scheduler: Any, *, own_size: int, own_loader: Iterable[Any]) -> ScaledSchedule | None:
    """Return the schedule of learning rates for another batch size; None if the size is the user's own.

    Args:
        bench: the training, whose ledger records the changes.
        scheduler: the user's scheduler; None without one.
        own_size: samples per batch of the user's loader.
        own_loader: the user's loader.
    """
    job = bench.job
    optimizer, accumulate, size = job.spec.optimizer, job.spec.accumulate, size_of(job)
    if optimizer is None or size == own_size:
        return None
    change = BatchSizeChange(
        rule=job.spec.lr_rule,
        samples=(own_size * accumulate, size * accumulate),
        updates=(math.ceil(length_of(own_loader) / accumulate), math.ceil(length_of(job.data.loader) / accumulate)),
        training=math.ceil(job.data.expected_steps / accumulate),
    )
    row = bench.ledger.row(BATCH_SIZE.name)
    bench.ledger.amend(replace(row, why="; ".join([row.why, *change.told(optimizer)])))
    return change.schedule(optimizer, scheduler)
