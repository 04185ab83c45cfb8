"""Plans and checkpoints of a version, and the final weights of trainings that resume from these files.

A plan holds a fingerprint of the model, so ``tests.jobs.Net`` must stay as it was when the files were written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import flatout
from flatout import Plan
from tests.golden.trainings import EPOCHS, OPTIMIZERS
from tests.jobs import make_job

ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"techniques": {"fused_optimizer": True, "in_memory": True}},
    "AdamW": {"techniques": {"fused_optimizer": True}, "precision": "fp16", "max_grad_norm": 1.0},
    "Adam": {"accumulate": 2},
    "RMSprop": {},
}
"""Arguments of ``optimize``, by the optimizer whose state the checkpoint holds."""

SAVED_AFTER = 9
"""Batches before the checkpoint: one epoch of six and half of the next epoch."""


def _run(name: str, **changes: Any) -> flatout.Run:
    model, loader, optimizer = make_job(OPTIMIZERS[name])
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0, **changes)


def _finish(run: flatout.Run, batches: int) -> dict[str, Tensor]:
    """Train until the last epoch ends and return the state of the model."""
    left = EPOCHS * 6 - batches
    while left > 0:
        for batch in run.loader:
            run.step(batch)
            left -= 1
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.undo()
    return state


def write(folder: Path) -> None:
    """Write a plan, a checkpoint and the final weights for each optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in ARGUMENTS.items():
        run = _run(name, **arguments)
        run.plan.save(folder / f"{name}.plan.json")
        batches = 0
        while batches < SAVED_AFTER:
            for batch in run.loader:
                run.step(batch)
                batches += 1
                if batches == SAVED_AFTER:
                    run.save(folder / f"{name}.ckpt")
        torch.save(_finish(run, batches), folder / f"{name}.end.pt")


def resume(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Resume from the plan and the checkpoint of ``name``.

    Returns:
        The model's state at the end, and the recorded one.
    """
    here = _run(name, **ARGUMENTS[name])
    plan = Plan.load(folder / f"{name}.plan.json")
    of_this_machine = {key: here.plan.fingerprint[key] for key in ("device", "torch")}
    here.undo()
    rest = {key: value for key, value in ARGUMENTS[name].items() if key not in ("techniques", "precision")}
    run = _run(name, plan=replace(plan, fingerprint={**plan.fingerprint, **of_this_machine}), **rest)
    run.load(folder / f"{name}.ckpt")
    return _finish(run, SAVED_AFTER), torch.load(folder / f"{name}.end.pt")
