"""``flatout.optimize``: the road of a user's call, from checked arguments to a tuned ``Run``."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from flatout import mfu
from flatout.arguments import (
    BATCH_SIZE,
    check_applicable,
    check_arguments,
    check_batch_size,
    check_forced,
    check_numbers,
    check_precision,
    check_schedule,
    choices_of,
    device_of,
    forced_by_name,
    planned_batch_size,
)
from flatout.core import formatting
from flatout.core.batches import batch_size_of, cloned, objects_of, tensors_of, to_device
from flatout.core.cleanup import add_note, run_all
from flatout.core.reproducible import check_seed, is_reproducible, seed_all
from flatout.core.snapshot import Snapshot
from flatout.data import is_rewindable
from flatout.data.loaders import TRIAL_BATCHES, LoaderPosition, first_batches
from flatout.data.replay_buffer import ReplayBuffer
from flatout.plan import Plan, fingerprint
from flatout.report import Report
from flatout.report.environment import environment_of
from flatout.report.model import Pace, Row, Summary
from flatout.run import Run, attach, detach
from flatout.techniques import PLANNED, REGISTRY, Advice, Candidate, Measured, NotApplicable, Rule
from flatout.techniques.batch_size import size_of
from flatout.techniques.determinism import seeded_where_random
from flatout.training.batch_size_change import BatchSizeChange
from flatout.training.device_verdict import judged
from flatout.training.export import example_of
from flatout.training.first_step import check_step
from flatout.training.job import Job, JobData
from flatout.training.loader import TrainingLoader
from flatout.training.spec import LossWeight, Spec
from flatout.training.step_flops import peak_of
from flatout.tuning.bench import Bench
from flatout.tuning.budget import Budget
from flatout.tuning.ranks import why_apart
from flatout.tuning.size_trials import parts_that_fit
from flatout.tuning.tuner import Tuner

ADVICE_SHARE = 0.05
"""Share of the budget that advice may take, whatever trials have left: it is cheap, and they take all there is."""

DEFAULT_EPOCHS = 10
"""Length of a training whose ``expected_steps`` is not given."""


def optimize(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    precision: str = "auto",
    batch_size: str | int = "keep",
    lr_rule: str = "linear",
    memory_limit: int | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    deterministic: bool = False,
    seed: int | None = None,
    techniques: Mapping[str, Any] | None = None,
    expected_steps: int | None = None,
    budget: float = 60.0,
    plan: Plan | str | Path | None = None,
) -> Run:
    """Make a training loop run flat out: try each technique on the user's own step, keep what pays.

    A model in eval mode that comes without an optimizer is tuned for inference: its forward under ``inference_mode``.

    Trials leave no trace. Weights, buffers, gradients, optimizer state, random-number generators, modes and backend
    flags are bit-equal before and after, and ``state_dict`` keys never change. The same holds for modules, optimizers,
    loss scalers and averages of weights that the loss can reach by closures, attributes and globals. Python attributes
    and hooks that ``forward``, loss or dataset set are not restored.

    Args:
        model: any ``nn.Module``; stays the same object.
        loader: any iterable of batches: ``(x, y)`` pairs, mappings, or what ``compute_loss`` understands.
        optimizer: updates the model; leave it out to keep a loop of your own:
            ``model, loader = flatout.optimize(model, loader)``.
        loss_fn: ``(model(x), y) -> scalar``; not needed where the model's output carries ``.loss``.
        compute_loss: ``(model, batch) -> scalar``, for batches that ``loss_fn`` does not fit. The function may remove
            entries from its batch and write to the tensors, because it receives a copy.
        loss_weight: ``(batch) -> weight``, a number or a 0-dim tensor. Needed if the loss is not a mean over samples,
            but for example over tokens: ``lambda batch: (batch["labels"] != -100).sum()``. Called when a batch is
            computed in parts.
        scheduler: a learning-rate scheduler, stepped once per update.
        device: where to train; default: cuda if there is one, else cpu.
        precision: ``"auto"`` (measured), ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``.
        batch_size: samples per update: ``"keep"`` leaves them as they are; ``"auto"`` is the fastest that memory holds;
            a number is that many. The last two make the loader anew with another batch size (its sampler stays), and
            scale the learning rate by ``lr_rule``. What is faster in parts, or too large for memory, is computed in
            parts in any case: ``run.micro_batch``. What ``"auto"`` has found is in the plan: a training that is to go
            on from its checkpoints takes ``plan=Plan.from_checkpoints(folder)``.
        lr_rule: ``"linear"`` (with the samples of an update; SGD), ``"sqrt"`` (with their square root; Adam and its
            kin) or ``"none"``, for every group. A larger rate is warmed up over five epochs, or a tenth of the
            training where that is less. The scheduler counts on in its own steps: those of as many samples.
        memory_limit: bytes that parameters, gradients, optimizer state and a step at its height may take; default: what
            the device has, less a tenth.
        accumulate: batches per update.
        max_grad_norm: clip the global gradient norm to this.
        deterministic: whether training is bit-reproducible, as with :func:`flatout.reproducible`. If True, only
            bit-identical techniques are chosen by timing, and the report shows the cost in speed. While
            ``flatout.reproducible`` is in force, techniques are chosen as with True.
        seed: seed python, numpy and torch with this when everything is set up; with ``deterministic`` also each
            sample of random augmentation (:func:`flatout.data.seed_samples`).
        techniques: ``{"compile": False}`` forbids a technique, ``{"workers": 4}`` forces one. A forced technique is
            applied, or an error says why this is impossible.
        expected_steps: batches of ``loader`` that the training will take, for break-even decisions and the length of
            a warm-up; default: 10 epochs.
        budget: seconds to spend on measuring; 0 means rules only (a ``memory_limit`` takes a few steps). Advice takes a
            twentieth of it on top at most.
        plan: a ``Plan`` or the path of a saved one, which is applied without measuring. Decisions that do not apply
            here are left out, and their rows say so. ``techniques`` and ``precision`` may be given, too, if they agree
            with the plan's decisions.

    Returns:
        A ``Run``, which also unpacks into ``model, loader``.

    Raises:
        TypeError: an argument or a batch has an unsupported type.
        ValueError: an argument has a wrong value or disagrees with the plan. Or the loader is empty, the model has
            nothing to train, the optimizer holds none of the model's parameters, or the loss is not a scalar. Nothing
            has changed.
        RuntimeError: ``deterministic`` comes too late, because cuBLAS has already started. Or trials cannot restore
            what the loss changes: it steps an optimizer that was not found, or first writes to another module after its
            first call. Nothing has changed except by such a late write.
    """
    choices = asked = choices_of(techniques, precision)
    forced = forced_by_name(techniques, precision)
    check_arguments(model, loader, optimizer, loss_fn, compute_loss, loss_weight)
    check_precision(model, precision)
    check_schedule(optimizer, scheduler, accumulate, max_grad_norm, loss_weight, batch_size, memory_limit)
    check_numbers(accumulate, max_grad_norm, expected_steps, budget, memory_limit)
    check_batch_size(batch_size, lr_rule, accumulate, choices)
    if seed is not None:
        check_seed(seed)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        plan.check_decisions()
        choices = {t.name: plan.decisions.get(t.name, False) for t in REGISTRY if isinstance(t, Measured)} | asked
        choices |= planned_batch_size(choices[BATCH_SIZE.name], batch_size, accumulate)

    if isinstance(loader, TrainingLoader):
        loader = loader.original
    if (deterministic or is_reproducible()) and seed is not None:
        loader = seeded_where_random(loader)
    spec = Spec(
        model=model,
        device=device_of(model, device),
        optimizer=optimizer,
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        loss_weight=loss_weight,
        inference=optimizer is None and not model.training,
        accumulate=accumulate,
        resizes=batch_size == "auto" and plan is None,
        memory_limit=memory_limit,
        max_grad_norm=max_grad_norm,
        deterministic=deterministic or is_reproducible(),
        reproducible=is_reproducible() and not deterministic,
    )
    job = Job(spec, JobData(loader, loader, expected_steps or DEFAULT_EPOCHS * _length(loader)))
    apart = why_apart(job.spec.modules, optimizer, loader)
    if apart:
        warnings.warn(apart, RuntimeWarning, stacklevel=2)
    own_size = size_of(job)
    earlier = detach(model)
    switches: dict[str, Candidate] = {}
    bench: Bench | None = None
    guard = contextlib.ExitStack()
    try:
        if plan is not None:
            plan.check(fingerprint(model, optimizer, job.spec.device))
        check_applicable(job, choices, forced)
        rows = {row.technique: row for row in _apply_rules(job, switches)}
        state = Snapshot.capture(spec.modules, optimizer, loader, spec.code, also=[LoaderPosition(loader)])
        guard.enter_context(state.guarded())
        bench = Bench(job, state, Budget(budget), rewindable=is_rewindable(loader))
        taken = _take(job, bench.rewindable)
        job.data.batches = [to_device(cloned(batch), job.spec.device) for batch in taken]
        here = fingerprint(model, optimizer, job.spec.device, job.data.batches[0])
        if plan is not None:
            plan.check(here)
        measures = budget > 0 and plan is None
        fits = check_step(job, state, job.data.batches[0])
        with _saying("counting FLOPs"):
            job.work(job.data.batches[0])
        tuner = Tuner(bench, choices, "techniques=" if plan is None else "the plan")
        if choices.get(BATCH_SIZE.name):
            rows[BATCH_SIZE.name] = row = tuner.decide(BATCH_SIZE)
            if row.status != "kept":
                check_forced(BATCH_SIZE, job, asked, forced, row.why)
        elif optimizer is not None and plan is None and choices.get(BATCH_SIZE.name) is None:
            looks = not fits or memory_limit is not None or (measures and job.spec.device.type == "cuda")
            rows |= _impose_batch_size(tuner, bench, batch_size, looks=looks)
        peak_before, _ = peak_of(spec, measure=budget > 0)
        costs_before = bench.costs() if measures else {}
        if job.spec.resizes:
            with _saying(f"trying {BATCH_SIZE.title}"):
                rows[BATCH_SIZE.name] = tuner.decide(BATCH_SIZE)  # all that follows is decided at its size

        for technique in REGISTRY:
            if isinstance(technique, Rule) and technique.costs_speed and technique.name in switches and measures:
                with _saying(f"timing {technique.title}"):
                    rows[technique.name] = tuner.price(switches[technique.name], rows[technique.name])
        for technique in REGISTRY:
            if isinstance(technique, Measured):
                with _saying(f"trying {technique.title}"):
                    rows[technique.name] = row = tuner.decide(technique)
                if row.status != "kept":
                    check_forced(technique, job, asked, forced, row.why)
                if plan is not None and technique.name in asked and row.status != "not applicable":
                    plan.check_choice(technique.name, tuner.decisions.get(technique.name, False))
        with _saying("racing the tuned loop against the original"):
            tuner.race(rows)
        peak, _ = peak_of(spec, measure=budget > 0)
        before = _completed(tuner.before, job, peak_before, costs_before)
        after = _completed(tuner.after, job, peak, bench.costs() if measures else {})
        verdict = "" if after is None else str(judged(job, after.mfu, stall_fraction=after.load_fraction))
        for technique in REGISTRY:
            if isinstance(technique, Advice):
                with _saying(f"looking at {technique.title}"):
                    rows[technique.name] = _advise(technique, job, choices, budget if measures else 0)
        job.data.batches = ()
        for switch in bench.kept:
            switch.on_tuning_end()
        bench.rewind(to_train=False)
    except BaseException as error:
        restore: list[Callable[[], object]] = []
        if bench is not None:
            restore += [job.stepper.reset, *(switch.disable for switch in reversed(bench.kept)), bench.state.restore]
        restore += [*(switch.disable for switch in reversed(switches.values())), lambda: attach(model, earlier)]
        try:
            run_all(restore)
        except BaseException as failure:
            add_note(error, f"Not everything could be restored: {formatting.first_line(failure)}")
        raise
    finally:
        guard.close()
    if seed is not None:
        seed_all(seed)
    kept = [*switches.values(), *bench.kept]
    if optimizer is not None and size_of(job) != own_size:
        change = BatchSizeChange(
            rule=lr_rule,
            samples=(own_size * accumulate, size_of(job) * accumulate),
            updates=(math.ceil(_length(loader) / accumulate), math.ceil(_length(job.data.loader) / accumulate)),
            training=math.ceil(job.data.expected_steps / accumulate),
        )
        row = rows[BATCH_SIZE.name]
        rows[BATCH_SIZE.name] = replace(row, why="; ".join([row.why, *change.told(optimizer)]))
        scheduler = change.schedule(optimizer, scheduler)
        kept.append(scheduler)

    summary = Summary(
        rows=_in_order(rows),
        environment=environment_of(job.spec.device),
        before=before,
        after=after,
        verdict=verdict,
        tuning_seconds=bench.budget.spent,
        notes=_notes(job, own_size, apart, measures and not bench.rewindable),
        won=tuner.won,
    )
    return Run(
        job,
        scheduler=scheduler,
        plan=Plan(decisions=tuner.decisions, fingerprint=here),
        report=Report(summary),
        switches=kept,
        example=example_of(taken[0]),
        peak_flops=peak,
    )


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """Tell profilers, and a person at a terminal, what takes so long; start no thread for anybody else."""
    console = Console(stderr=True)
    said = console.status(f"flatout: {what}") if console.is_terminal else contextlib.nullcontext()
    with mfu.nvtx_range(f"flatout: {what}"), said:
        yield


def _length(loader: Iterable[Any]) -> int:
    """Batches of an epoch; a thousand where the loader cannot tell (an IterableDataset has no length)."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 1000


def _take(job: Job, rewindable: bool) -> list[Any]:
    """The first few batches, for trials; those of a loader that cannot be rewound are put back in front of it."""
    loader = job.data.loader
    if rewindable:
        taken = first_batches(loader, TRIAL_BATCHES)
    else:
        job.data.source = ReplayBuffer(loader, TRIAL_BATCHES)
        taken = job.data.source.read
    if not taken:
        raise ValueError("the loader is empty: it yielded no batch")
    for i, batch in enumerate(taken):
        if not tensors_of(batch) and not objects_of(batch):
            raise ValueError(
                f"loader must yield tensors, or objects with a to(device) method, got no tensor in a "
                f"{type(batch).__name__}. Define to(device) in the class of your batches"
            )
        if batch_size_of(batch) == 0:
            raise ValueError(
                f"loader must yield batches of at least one sample, got none in batch {i}. "
                "Skip empty batches, or check how the sampler and collate_fn treat the last samples"
            )
    return taken


def _impose_batch_size(tuner: Tuner, bench: Bench, batch_size: str | int, *, looks: bool) -> dict[str, Row]:
    """What was asked for; and parts of batches that do not fit into memory.

    Args:
        tuner: of ``bench``.
        bench: is rewound.
        batch_size: of ``optimize``.
        looks: whether to look if they fit.

    Returns:
        The row, by the technique's name; none where there is nothing to say.
    """
    job, rows = bench.job, {}
    if isinstance(batch_size, int):
        asked = BATCH_SIZE.forced(job, {"samples": batch_size // job.spec.accumulate})
        rows[BATCH_SIZE.name] = tuner.impose(BATCH_SIZE, asked, "batch_size= asks for it")
    bench.rewind()
    parts = parts_that_fit(job) if looks else None
    bench.rewind()
    if parts is not None:
        why = f"whole batches do not fit into memory: they are computed in parts, {job.stepper.micro_batches.result()}"
        rows[BATCH_SIZE.name] = tuner.impose(BATCH_SIZE, parts, why)
    return rows


def _apply_rules(job: Job, switches: dict[str, Candidate]) -> Iterator[Row]:
    """Turn on every rule that serves this job; ``switches`` receives what was turned on, by technique."""
    for technique in REGISTRY:
        if not isinstance(technique, Rule):
            continue
        try:
            technique.check(job)
        except NotApplicable as reason:
            yield technique.row("not applicable", str(reason))
            continue
        switch = technique.switch(job)
        if switch is not None:
            switches[technique.name] = switch
            switch.enable()
        yield technique.row("kept", technique.rationale)


def _advise(technique: Advice, job: Job, choices: Mapping[str, Any], budget: float) -> Row:
    """What the technique has to say, in a part of the budget's time that no trial spends."""
    row = technique.row("not tried", "")
    if choices.get(technique.name) is False:
        return replace(row, why="techniques= does without it")
    try:
        technique.check(job)
        if budget == 0:
            return replace(row, why="nothing is evaluated with budget=0 or a plan")
        found = technique.findings(job, ADVICE_SHARE * budget)
        return replace(row, status="advice", why="\n".join(found))
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    except Exception as error:  # of the user's code, which training has not run into
        return replace(row, status="not applicable", why=f"looking failed with {formatting.first_line(error)}")


def _completed(pace: Pace | None, job: Job, peak: float | None, costs: Mapping[str, Any]) -> Pace | None:
    """The pace with the MFU that it comes to, and what else a step costs."""
    samples, _, flops = job.work(job.data.batches[0])
    if pace is None:
        return None
    mfu = None if flops is None or peak is None else pace.samples_per_second * flops.total / samples / peak
    return replace(pace, mfu=mfu, **costs)


def _notes(job: Job, own_size: int, apart: str, waits_unseen: bool) -> tuple[str, ...]:
    """What was tuned, where that is not the training of ``run.step``, and what the figures leave out."""
    notes = [apart] if apart else []
    if job.spec.inference:
        notes.append(
            "the model came in eval mode and without an optimizer: what was tuned is its forward, for inference"
        )
    elif job.spec.optimizer is None:
        notes.append("no optimizer was given: what was tuned is loader, forward and backward, for a loop of your own")
    if job.spec.resizes and size_of(job) != own_size:
        notes.append(
            f"batches have {size_of(job):,} samples instead of {own_size:,}: all times are those of {size_of(job):,}"
        )
    if job.spec.reproducible:
        notes.append("flatout.reproducible is in force: techniques were chosen as with deterministic=True")
    if waits_unseen:
        notes.append("the loader cannot be rewound: steps were timed on a few of its batches, and no waiting for it")
    return tuple(notes)


def _in_order(rows: Mapping[str, Row]) -> tuple[Row, ...]:
    """The checklist by number, then its neighbours; rows without a technique yet say so."""
    planned = [Row(name, number, title, "not built yet", purpose) for number, name, title, purpose in PLANNED]
    return tuple(sorted([*rows.values(), *planned], key=lambda row: row.number or 1000))
