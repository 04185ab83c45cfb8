"""``flatout.optimize``: the road of a user's call, from checked arguments to a tuned ``Run``."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from flatout import mfu, words
from flatout._memory import ran_out_of_memory
from flatout.batch_size.change import Change
from flatout.batch_size.learning_rate import lr_factor
from flatout.data import is_rewindable, map_tensors, tensors_of, to_device
from flatout.data.loaders import TRIAL_BATCHES, first_batches
from flatout.data.replay import Replayed
from flatout.export import example_of
from flatout.job import Job
from flatout.measure.bench import Bench
from flatout.measure.budget import Budget
from flatout.measure.judge import judged
from flatout.measure.state import State
from flatout.measure.tuner import Tuner
from flatout.micro_batches import LossWeight
from flatout.plan import Plan, fingerprint
from flatout.report import Report
from flatout.report.environment import environment_of
from flatout.report.model import Pace, Row, Summary
from flatout.reproducible import check_seed, seed_all
from flatout.run import Run, TrainingLoader, attach, detach
from flatout.techniques import PLANNED, REGISTRY, Advice, BatchSize, Measured, NotApplicable, Rule, Switch
from flatout.techniques.batch_size import size_of
from flatout.techniques.determinism import seeded_where_random

BATCH_SIZE = next(technique for technique in REGISTRY if isinstance(technique, BatchSize))
"""The technique that all others depend on: as far as it can be, it is decided before them."""

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

    Trials leave no trace: weights, buffers, gradients, optimizer state, random-number generators, modes and
    backend flags are bit-equal before and after, and ``state_dict`` keys never change.

    Args:
        model: any ``nn.Module``; stays the same object.
        loader: any iterable of batches: ``(x, y)`` pairs, mappings, or what ``compute_loss`` understands.
        optimizer: updates the model; leave it out to keep a loop of your own:
            ``model, loader = flatout.optimize(model, loader)``.
        loss_fn: ``(model(x), y) -> scalar``; not needed where the model's output carries ``.loss``.
        compute_loss: ``(model, batch) -> scalar``, where ``loss_fn`` does not fit.
        loss_weight: ``(batch) -> weight``, a number or a 0-dim tensor: what the loss of a batch is a mean over, where
            that is not its samples: ``lambda batch: (batch["labels"] != -100).sum()``. It is asked where a batch is
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
        deterministic: bit-reproducible training, as :func:`flatout.reproducible` has it; then only bit-identical
            techniques are chosen by timing, and the report says what determinism costs in speed.
        seed: seed python, numpy and torch with this when everything is set up; with ``deterministic`` also each
            sample of random augmentation (:func:`flatout.data.seed_samples`).
        techniques: ``{"compile": False}`` forbids, ``{"workers": 4}`` forces one by name.
        expected_steps: batches of ``loader`` that the training will take, for break-even decisions and the length of
            a warm-up; default: 10 epochs.
        budget: seconds to spend on measuring; 0 means rules only (a ``memory_limit`` takes a few steps). Advice takes a
            twentieth of it on top at most.
        plan: a ``Plan`` or the path of a saved one: applied, and nothing is measured. ``techniques`` and ``precision``
            may be given, too, as when it was made: they have to come to what it has decided.

    Returns:
        A ``Run``, which also unpacks into ``model, loader``.

    Raises:
        TypeError: an argument or a batch is not of a kind that is understood.
        ValueError: an argument has a value that cannot work, or one that is not the plan's, or the loader is empty, the
            model has nothing to train, the optimizer holds none of its parameters, or the loss is not a scalar. Nothing
            has changed then.
        RuntimeError: too late for ``deterministic``: cuBLAS has started already. Nothing has changed either.
    """
    choices = asked = _choices(techniques, precision)
    _check_arguments(model, loader, optimizer, loss_fn, compute_loss, loss_weight)
    _check_schedule(optimizer, scheduler, accumulate, max_grad_norm, loss_weight, batch_size, memory_limit)
    _check_numbers(accumulate, max_grad_norm, expected_steps, budget, memory_limit)
    _check_batch_size(batch_size, lr_rule, accumulate, choices)
    if seed is not None:
        check_seed(seed)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        plan.check_techniques([t.name for t in REGISTRY])
        choices = {t.name: plan.decisions.get(t.name, False) for t in REGISTRY if isinstance(t, Measured)} | asked
        choices |= _planned_batch_size(choices[BATCH_SIZE.name], batch_size, accumulate)

    if isinstance(loader, TrainingLoader):
        loader = loader.original
    if deterministic and seed is not None:
        loader = seeded_where_random(loader)
    job = Job(
        model=model,
        loader=loader,
        source=loader,
        optimizer=optimizer,
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        device=_device(model, device),
        loss_weight=loss_weight,
        inference=optimizer is None and not model.training,
        accumulate=accumulate,
        resizes=batch_size == "auto" and plan is None,
        memory_limit=memory_limit,
        max_grad_norm=max_grad_norm,
        deterministic=deterministic,
        expected_steps=expected_steps or DEFAULT_EPOCHS * _length(loader),
    )
    own_size = size_of(job)
    earlier = detach(model)
    switches: dict[str, Switch] = {}
    bench: Bench | None = None
    try:
        if plan is not None:
            plan.check(fingerprint(model, optimizer, job.device))
        for technique in REGISTRY:
            if isinstance(technique, Measured) and choices.get(technique.name, False) is not False:
                with contextlib.suppress(NotApplicable):
                    technique.check(job)
                    technique.forced(job, choices[technique.name])
        rows = {row.technique: row for row in _apply_rules(job, switches)}
        state = State.capture(job.modules, optimizer, loader)
        bench = Bench(job, state, Budget(budget), rewindable=is_rewindable(loader))
        taken = _take(job, bench.rewindable)
        if not bench.rewindable:
            # Their order was drawn for good: going back would draw the same order for the next epoch again.
            bench.state = State.capture(job.modules, optimizer, loader)
        job.batches = [to_device(map_tensors(torch.clone, batch), job.device) for batch in taken]
        here = fingerprint(model, optimizer, job.device, job.batches[0])
        if plan is not None:
            plan.check(here)
        measures = budget > 0 and plan is None
        fits = _check_step(job, job.batches[0])
        with _saying("counting FLOPs"):
            job.work(job.batches[0])
        tuner = Tuner(bench, choices, "techniques=" if plan is None else "the plan")
        if choices.get(BATCH_SIZE.name):
            rows[BATCH_SIZE.name] = tuner.decide(BATCH_SIZE)
        elif optimizer is not None and plan is None and choices.get(BATCH_SIZE.name) is None:
            looks = not fits or memory_limit is not None or (measures and job.device.type == "cuda")
            rows |= _impose_batch_size(tuner, bench, batch_size, looks=looks)
        peak_before, _ = job.peak_flops(measure=budget > 0)
        costs_before = bench.costs() if measures else {}
        if job.resizes:
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
                # What cannot serve is not there, whoever asks for it.
                if plan is not None and technique.name in asked and row.status != "not applicable":
                    plan.check_choice(technique.name, tuner.decisions.get(technique.name, False))
        with _saying("racing the tuned loop against the original"):
            tuner.race(rows)
        peak, _ = job.peak_flops(measure=budget > 0)
        before = _completed(tuner.before, job, peak_before, costs_before)
        after = _completed(tuner.after, job, peak, bench.costs() if measures else {})
        verdict = "" if after is None else str(judged(job, after.mfu, stall_fraction=after.load_fraction))
        for technique in REGISTRY:
            if isinstance(technique, Advice):
                with _saying(f"looking at {technique.title}"):
                    rows[technique.name] = _advise(technique, job, choices, budget if measures else 0)
        job.batches = ()
        for switch in bench.kept:
            switch.trials_over()
        bench.rewind(to_train=False)
    except BaseException:
        if bench is not None:
            job.reset()
            for switch in reversed(bench.kept):
                switch.disable()
            bench.state.restore()
        for switch in reversed(switches.values()):
            switch.disable()
        attach(model, earlier)
        raise
    if seed is not None:
        seed_all(seed)
    kept = [*switches.values(), *bench.kept]
    if optimizer is not None and size_of(job) != own_size:
        change = Change(
            rule=lr_rule,
            samples=(own_size * accumulate, size_of(job) * accumulate),
            updates=(math.ceil(_length(loader) / accumulate), math.ceil(_length(job.loader) / accumulate)),
            training=math.ceil(job.expected_steps / accumulate),
        )
        row = rows[BATCH_SIZE.name]
        rows[BATCH_SIZE.name] = replace(row, why="; ".join([row.why, *change.told(optimizer)]))
        scheduler = change.schedule(optimizer, scheduler)
        kept.append(scheduler)

    summary = Summary(
        rows=_in_order(rows),
        environment=environment_of(job.device),
        before=before,
        after=after,
        verdict=verdict,
        tuning_seconds=bench.budget.spent,
        notes=_notes(job, own_size, measures and not bench.rewindable),
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
    with mfu.range(f"flatout: {what}"), said:
        yield


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """The device asked for; else the GPU that the model is on, or any GPU, or the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the model is spread over {names}: flatout trains on one device")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _length(loader: Iterable[Any]) -> int:
    """Batches of an epoch; a thousand where the loader cannot tell (an IterableDataset has no length)."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return 1000


def _choices(techniques: Mapping[str, Any] | None, precision: str) -> dict[str, Any]:
    """What the user forbids or forces, by technique name."""
    choices = dict(techniques or {})
    names = [t.name for t in REGISTRY if isinstance(t, (Measured, Advice))]
    advice = [t.name for t in REGISTRY if isinstance(t, Advice)]
    for name, value in choices.items():
        if name in advice and value is not False:
            raise ValueError(f"techniques[{name!r}] must be False, or be left out: it is advice; got {value!r}")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"unknown technique {name!r} in techniques: {hint}")
    if precision not in ("auto", "fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {precision!r}")
    if precision != "auto":
        choices["precision"] = False if precision in ("fp32", "tf32") else precision
    if precision in ("fp32", "tf32"):
        choices["tf32"] = precision == "tf32"
    if choices.get("torchscript", False) is not False:
        choices.setdefault("compile", False)  # one of the two runs the model
    if choices.get("cuda_graph", False) is not False:
        choices.setdefault("fused_optimizer", True)  # its update is the one that can be captured
    return choices


def _check_arguments(
    model: Any, loader: Any, optimizer: Any, loss_fn: Any, compute_loss: Any, loss_weight: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable and (optimizer is not None or model.training):
        raise ValueError("the model has no parameter that requires gradients: there is nothing to train")
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held & trainable:
            raise ValueError("the optimizer holds none of the model's trainable parameters: was it made for another?")
    for name, function in (("loss_fn", loss_fn), ("compute_loss", compute_loss), ("loss_weight", loss_weight)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    if loss_fn is not None and compute_loss is not None:
        raise ValueError("give loss_fn or compute_loss, not both")


def _check_schedule(
    optimizer: Any,
    scheduler: Any,
    accumulate: int,
    max_grad_norm: float | None,
    loss_weight: Any,
    batch_size: str | int,
    memory_limit: int | None,
) -> None:
    """What only an update uses needs an optimizer, of a kind that one backward pass suffices for."""
    asked = {
        "scheduler": scheduler,
        "max_grad_norm": max_grad_norm,
        "accumulate": accumulate if accumulate > 1 else None,
        "loss_weight": loss_weight,
        "batch_size": None if batch_size == "keep" else batch_size,
        "memory_limit": memory_limit,
    }
    for name, value in asked.items():
        if optimizer is None and value is not None:
            raise ValueError(f"{name} is used by run.step, which needs an optimizer: give one to optimize()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times in a step: run.step cannot drive it")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau is stepped with a metric: call its step(metric) yourself, after run.evaluate"
        )


def _check_numbers(
    accumulate: int, max_grad_norm: float | None, expected_steps: int | None, budget: float, memory_limit: int | None
) -> None:
    if accumulate < 1:
        raise ValueError(f"accumulate must be >= 1, got {accumulate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}")
    if expected_steps is not None and expected_steps < 1:
        raise ValueError(f"expected_steps must be >= 1, got {expected_steps}")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be >= 1 byte, got {memory_limit}")
    if not budget >= 0:
        raise ValueError(f"budget must be >= 0 seconds, got {budget}")


def _check_batch_size(batch_size: Any, lr_rule: str, accumulate: int, choices: Mapping[str, Any]) -> None:
    lr_factor(lr_rule, 1, 1)
    if batch_size == "keep":
        return
    if batch_size != "auto" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be 'keep', 'auto' or a number of samples, got {batch_size!r}")
    if batch_size != "auto" and batch_size % accumulate:
        raise ValueError(f"batch_size must be a multiple of accumulate={accumulate}, got {batch_size}")
    if BATCH_SIZE.name in choices:
        raise ValueError(
            f"techniques[{BATCH_SIZE.name!r}] and batch_size={batch_size!r} decide about the same: give one"
        )


def _planned_batch_size(planned: Any, batch_size: str | int, accumulate: int) -> dict[str, Any]:
    """The batch size of a plan as a choice; that which was asked for, where the plan has none."""
    if not isinstance(batch_size, int):
        return {}
    samples, there = batch_size // accumulate, (planned or {}).get("samples")
    if there not in (None, samples):
        raise ValueError(f"this plan was made for batch_size={there * accumulate}, got {batch_size}")
    return {BATCH_SIZE.name: {"micro_batch": None} | (planned or {}) | {"samples": samples}}


def _take(job: Job, rewindable: bool) -> list[Any]:
    """The first few batches, for trials; those of a loader that cannot be rewound are put back in front of it."""
    loader = job.loader
    if rewindable:
        taken = first_batches(loader, TRIAL_BATCHES)
    else:
        job.source = Replayed(loader, TRIAL_BATCHES)
        taken = job.source.read
    if not taken:
        raise ValueError("the loader is empty: it yielded no batch")
    if not tensors_of(taken[0]):
        raise ValueError(f"the loader's batches hold no tensor: got {type(taken[0]).__name__}")
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
        asked = BATCH_SIZE.forced(job, {"samples": batch_size // job.accumulate})
        rows[BATCH_SIZE.name] = tuner.impose(BATCH_SIZE, asked, "batch_size= asks for it")
    bench.rewind()
    parts = BATCH_SIZE.fit(job) if looks else None
    bench.rewind()
    if parts is not None:
        why = f"whole batches do not fit into memory: they are computed in parts, {job.micro_batches.result()}"
        rows[BATCH_SIZE.name] = tuner.impose(BATCH_SIZE, parts, why)
    return rows


def _apply_rules(job: Job, switches: dict[str, Switch]) -> Iterator[Row]:
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
        yield technique.row("kept", technique.kept_because)


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
        return replace(row, status="not applicable", why=f"looking failed with {words.first_line(error)}")


def _check_step(job: Job, batch: Any) -> bool:
    """Run a forward once and see that there is something to minimise; in inference, to compare.

    Returns:
        Whether there was memory for it.
    """
    if job.inference:
        if not tensors_of(job.infer(batch)):
            raise TypeError("the model's output holds no tensor: nothing shows whether a technique changes it")
        return True
    try:
        loss = job.loss(batch)
    except RuntimeError as error:
        if job.optimizer is None or not ran_out_of_memory(error):
            raise
        return False
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise ValueError(
            f"the loss must be a scalar (0-dim) tensor, got shape {tuple(loss.shape)}: reduce it, e.g. .mean()"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter: backward would do nothing")
    return True


def _completed(pace: Pace | None, job: Job, peak: float | None, costs: Mapping[str, Any]) -> Pace | None:
    """The pace with the MFU that it comes to, and what else a step costs."""
    samples, _, flops = job.work(job.batches[0])
    if pace is None:
        return None
    mfu = None if flops is None or peak is None else pace.samples_per_second * flops.total / samples / peak
    return replace(pace, mfu=mfu, **costs)


def _notes(job: Job, own_size: int, waits_unseen: bool) -> tuple[str, ...]:
    """What was tuned, where that is not the training of ``run.step``, and what the figures leave out."""
    notes = []
    if job.inference:
        notes.append(
            "the model came in eval mode and without an optimizer: what was tuned is its forward, for inference"
        )
    elif job.optimizer is None:
        notes.append("no optimizer was given: what was tuned is loader, forward and backward, for a loop of your own")
    if job.resizes and size_of(job) != own_size:
        notes.append(
            f"batches have {size_of(job):,} samples instead of {own_size:,}: all times are those of {size_of(job):,}"
        )
    if waits_unseen:
        notes.append("the loader cannot be rewound: steps were timed on a few of its batches, and no waiting for it")
    return tuple(notes)


def _in_order(rows: Mapping[str, Row]) -> tuple[Row, ...]:
    """The checklist by number, then its neighbours; rows without a technique yet say so."""
    planned = [Row(name, number, title, "not built yet", purpose) for number, name, title, purpose in PLANNED]
    return tuple(sorted([*rows.values(), *planned], key=lambda row: row.number or 1000))
