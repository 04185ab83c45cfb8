"""``flatout.optimize``, which validates arguments, decides about techniques, and makes the ``Run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.effects import Unrepeatable
from flatout.core.machine import environment_of
from flatout.core.reproducible import seed_all
from flatout.distributed.agreement import OwnError
from flatout.plan import Plan
from flatout.report import Report
from flatout.report.model import Row, Summary
from flatout.run import Run
from flatout.techniques import REGISTRY
from flatout.techniques.batch_size import size_of
from flatout.training.export import example_of
from flatout.training.spec import CACHED, LossWeight, Spec
from flatout.tuning.agenda import decide
from flatout.tuning.arguments import budget_of, check, explains_keywords, resolved
from flatout.tuning.batch_sizes import scaled_schedule
from flatout.tuning.plan_cache import code_of, training_of
from flatout.tuning.race import Outcome
from flatout.tuning.ranks import parallel_of
from flatout.tuning.session import Session


@explains_keywords
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
    precision: str | torch.dtype = "auto",
    batch_size: str | int = "keep",
    lr_rule: str = "auto",
    memory_limit: int | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    deterministic: bool = False,
    seed: int | None = None,
    techniques: Mapping[str, Any] | None = None,
    expected_steps: int | None = None,
    budget: float | None = None,
    plan: Plan | str | Path | None = CACHED,
    parallel: str = "auto",
) -> Run:
    """Make a training loop run flat out. Try each technique on the user's own step, and keep the ones that help.

    A model in eval mode without an optimizer is tuned for inference. Its forward then runs under ``inference_mode``.

    Trials have no side effects. Weights, buffers, gradients, optimizer state, random generators, modes and backend
    flags are bit-equal before and after, and ``state_dict`` keys never change. The same holds for everything that
    model, loss, hooks and dataset can reach by attributes, containers, closures and globals. What they print and log in
    trials is dropped. A step that writes files, reaches other processes or consumes an iterator is not tried, and the
    rows of the report give the reason.

    During the trials, a terminal or a notebook shows one live line. Each decision is a record of level INFO of the
    logger ``flatout.tuning``. ``logging.basicConfig(level=logging.INFO)`` prints all records.

    Args:
        model: any ``nn.Module``. The returned model is the same object.
        loader: any iterable of batches. A batch is an ``(x, y)`` pair, a mapping, or any object that ``compute_loss``
            accepts.
        optimizer: the optimizer of the model. With ``model, loader = flatout.optimize(model, loader, optimizer)``, the
            optimizer is tuned for your own loop, which computes the loss. Without an optimizer, only model and loader
            are tuned.
        loss_fn: ``(model(x), y) -> scalar``. Not needed if the model's output has ``.loss``, or for your own loop.
        compute_loss: ``(model, batch) -> scalar``, for batches that ``loss_fn`` does not fit. The function may remove
            entries from its batch and write to the tensors, because it receives a copy.
        loss_weight: ``(batch) -> weight`` of the loss, as a number or a 0-dim tensor. Needed if the loss is not a mean
            over samples. For a mean over tokens, for example, pass ``lambda batch: (batch["labels"] != -100).sum()``.
            The weight counts for parts of a batch, for the batches of an update (``accumulate``), for several ranks,
            and in ``run.evaluate``. A batch of weight 0 does not count.
        scheduler: a learning-rate scheduler, stepped once per update.
        device: device of the training. The default is the rank's GPU under ``torchrun``, else the model's GPU, else the
            current GPU, else the CPU.
        precision: ``"auto"`` (measured), ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``. Other libraries' names are
            accepted, such as ``torch.bfloat16`` and ``"bf16-mixed"``.
        batch_size: samples per update, as a number. ``"keep"`` keeps the loader's, and ``"auto"`` finds the fastest
            that fits in memory. ``"auto"`` and a number rebuild the loader with another batch size and the same
            sampler, and scale the learning rate by ``lr_rule``. A batch that is faster in parts, or too large for
            memory, is computed in parts of ``run.micro_batch`` samples. The plan has the result of ``"auto"``. To
            resume such a training, pass ``plan=Plan.from_checkpoints(folder)``.
        lr_rule: scaling of every group's learning rate for another number of samples per update. ``"linear"`` scales in
            proportion to the samples, ``"sqrt"`` with their square root, and ``"none"`` not at all. ``"auto"`` is the
            plan's rule, else linear for SGD and sqrt for Adam and all others. A larger rate is warmed up over five
            epochs, or a tenth of the training if this is shorter. The scheduler still steps once per original number of
            samples.
        memory_limit: limit in bytes of parameters, gradients, optimizer state and the peak memory of a step. The
            default is nine tenths of the device's memory.
        accumulate: batches per update, which uses the mean of their gradients, weighted by ``loss_weight`` if given.
        max_grad_norm: limit to which the global gradient norm is clipped. The default is no clipping.
        deterministic: True for bit-reproducible training, as with :func:`flatout.reproducible`. Then only bit-identical
            techniques are chosen by timing, and the report shows the cost in speed. While ``flatout.reproducible`` is
            in force, techniques are chosen as with True.
        seed: seed of Python, NumPy and torch, set after tuning. With ``deterministic``, it also seeds the random
            augmentation of each sample (:func:`flatout.data.seed_samples`).
        techniques: ``{"compile": False}`` forbids a technique, ``{"workers": 4}`` forces one. A forced technique is
            applied, or an error gives the reason why this is impossible.
        expected_steps: number of batches of ``loader`` in the whole training, for break-even decisions, the default
            budget and the length of a warm-up. The default is 10 epochs, or 10,000 batches if an epoch has no known
            length or more than 10 million batches.
        budget: seconds to spend on measurements. 0 means rules only, but a ``memory_limit`` takes a few steps. The
            default is the environment variable ``FLATOUT_BUDGET``, else the smaller of 60 seconds and a tenth of the
            training's time. If the training is too short for any comparison, the default means rules only. Then a note
            names the ``expected_steps`` to pass. Advice takes at most another twentieth of the budget.
        plan: ``"cached"`` repeats the decisions of an earlier start with the same model, data, arguments and machine.
            Numerics are compared again, and the decisions must not lose a race of two seconds or three pairs. With
            ``deterministic`` there is no race. Setup, such as a compilation, is not limited by ``budget``. Without such
            decisions, or if they fail, trials decide. The result is cached in the folder ``FLATOUT_CACHE``. The default
            folder is ``~/.cache/flatout``, and ``off`` turns the cache off. None always runs the trials, and replaces
            the cached decisions. A ``Plan``, or the path of a saved plan, is applied without measurements. Decisions
            that do not apply here are skipped, and their rows give the reason. ``techniques`` and ``precision`` must
            agree with the plan.
        parallel: behavior of several ranks. ``"auto"`` trains data-parallel under ``torchrun`` if the script makes no
            process group. The model then becomes data-parallel in place, each rank trains on its slice of every batch
            of ``loader``, and all ranks make the same decisions. With ``"auto"``, a script with its own process group
            does not change. ``"ddp"`` trains data-parallel in such a script, too. With ``"none"``, each rank trains
            alone. A failure on one rank ends ``optimize`` on all ranks. The other ranks raise a ``RuntimeError`` that
            names the failed rank and its error.

    Returns:
        A ``Run``, which also unpacks into ``model, loader``.

    Raises:
        TypeError: an argument or a batch has an unsupported type, or an argument is unknown.
        ValueError: an argument has a wrong value or disagrees with the plan. Other reasons are an empty loader, a model
            without trainable parameters, an optimizer of other parameters, and a loss that is not a scalar. Nothing has
            changed.
        RuntimeError: ``deterministic`` comes too late, because cuBLAS has already started. Or trials cannot restore the
            changes of the loss. The loss then steps an optimizer that was not found, or writes to another module only
            after its first call. Nothing has changed except by such a late write.
    """
    spec = Spec(**{**locals(), "budget": budget_of(budget)})
    choices = check(spec)
    ranks, of_rank = parallel_of(parallel, spec.modules, trains=optimizer is not None or model.training)
    with OwnError(), ranks.attempt("flatout.optimize"):
        session = Session(resolved(spec, choices, ranks, of_rank), choices)
        while True:
            try:
                return _tuned(session)
            except Unrepeatable as reason:
                why = str(reason)
            session = session.after(why)


def _tuned(session: Session) -> Run:
    try:
        session.prepare()
        outcome = decide(session)
    except BaseException as error:
        session.restore(error)
        raise
    finally:
        session.close()
    return assemble(session, outcome)


def assemble(session: Session, outcome: Outcome) -> Run:
    """Make the ``Run`` of a confirmed session."""
    job, bench, ledger = session.job, session.bench, session.ledger
    spec = job.spec
    if spec.seed is not None:
        seed_all(spec.seed)
    toggles = [*ledger.rules.values(), *ledger.candidates]
    schedule = scaled_schedule(bench, spec.scheduler, own_size=session.own_size, own_loader=session.loader)
    return Run(
        job,
        scheduler=spec.scheduler if schedule is None else schedule,
        plan=session.plan(),
        report=Report(summary_of(session, outcome, bench.budget.spent)),
        toggles=toggles if schedule is None else [*toggles, schedule],
        example=example_of(session.taken[0]),
        peak_flops=outcome.peak_flops,
    )


def summary_of(session: Session, outcome: Outcome, seconds: float) -> Summary:
    """Return the content of a report.

    Args:
        session: the session, with its decisions.
        outcome: the result of the last race.
        seconds: duration of the tuning.
    """
    return Summary(
        rows=_in_order(session.rows),
        environment=environment_of(session.job.spec.device),
        before=outcome.before,
        after=outcome.after,
        gain=outcome.gain,
        gain_statistic=outcome.gain_statistic,
        verdict=outcome.verdict,
        tuning_seconds=seconds,
        notes=_notes(session),
        won=tuple(dict.fromkeys(decision.technique for decision in session.ledger.won)),
        epoch_samples=session.epoch_samples,
        training=training_of(session),
        code=code_of(session),
        load_average=session.load_average,
    )


def _notes(session: Session) -> tuple[str, ...]:
    """Return notes for the report.

    The notes name the tuned loop, if it is not the training of ``run.step``, and the conditions of the measurements.
    """
    spec, size = session.job.spec, size_of(session.job)
    notes = [*session.notes]
    if spec.inference:
        notes.append(
            "the model came in eval mode and without an optimizer: what was tuned is its forward, for inference"
        )
    elif spec.optimizer is None and not spec.is_recorded:
        notes.append("no optimizer was given: what was tuned is loader, forward and backward, for a loop of your own")
    elif not session.job.objective.has_loss:
        notes.append(
            "no loss was given: what was tuned is a loop of your own, without the cost of its loss. run.step needs "
            "loss_fn or compute_loss"
        )
    if spec.resizes and size != session.own_size:
        notes.append(f"batches have {size:,} samples instead of {session.own_size:,}: all times are those of {size:,}")
    if spec.reproducible:
        notes.append("flatout.reproducible is in force: techniques were chosen as with deterministic=True")
    if session.measures and not session.bench.rewindable:
        notes.append("the loader cannot be rewound: steps were timed on a few of its batches, and no waiting for it")
    if isinstance(spec.model, nn.DataParallel):
        notes.append(
            "the model is a DataParallel, which copies its weights to each GPU in every step: wrap the plain model in "
            "DistributedDataParallel, and start one process per GPU with torchrun --nproc-per-node=gpu train.py"
        )
    return tuple(notes)


def _in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the checklist by number, followed by rows without a number."""
    position = {technique.name: i for i, technique in enumerate(REGISTRY)}
    return tuple(sorted(rows, key=lambda row: (row.number or 1000, position.get(row.technique, 1000))))
