"""51 trainings, and the hash of the final model and optimizer of each."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import flatout
import flatout.optim
from tests.helpers import bits
from tests.jobs import make_job

EPOCHS = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr, amsgrad=True),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.1),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr, momentum=0.5),
    "Lion": lambda params, lr: flatout.optim.Lion(params, lr / 10, weight_decay=0.1),
}
"""Three optimizers that ``optimize`` fuses, one that ``optimize`` does not fuse, and one of flatout."""


def _by_steps(run: flatout.Run) -> None:
    for _ in range(EPOCHS):
        for batch in run.loader:
            run.step(batch)


def _by_fit(run: flatout.Run) -> None:
    run.fit(EPOCHS)


def _resumed(run: flatout.Run) -> None:
    """Save in the middle of the second epoch, finish this epoch, load the checkpoint and train to the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        for batch in run.loader:
            run.step(batch)
        for i, batch in enumerate(run.loader):
            run.step(batch)
            if i == 1:
                run.save(path)
        run.load(path)
        for _ in range(1, EPOCHS):
            for batch in run.loader:
                run.step(batch)


FUSED = {"fused_optimizer": True}
IN_MEMORY = {"in_memory": True}
WAYS: dict[str, tuple[Callable[[flatout.Run], None], dict[str, Any]]] = {
    "steps": (_by_steps, {}),
    "fused": (_by_steps, {"techniques": FUSED}),
    "fused, accumulated, clipped": (_by_steps, {"techniques": FUSED, "accumulate": 4, "max_grad_norm": 0.3}),
    "clipped": (_by_steps, {"max_grad_norm": 0.3}),
    "accumulated": (_by_steps, {"accumulate": 2}),
    "accumulated, clipped": (_by_steps, {"accumulate": 4, "max_grad_norm": 0.3}),
    "bf16": (_by_steps, {"precision": "bf16"}),
    "fp16": (_by_steps, {"precision": "fp16"}),
    "in memory": (_by_fit, {"techniques": IN_MEMORY}),
    "deterministic": (_by_fit, {"deterministic": True, "seed": 5}),
    "resumed": (_resumed, {"techniques": IN_MEMORY}),
}
FUSABLE = {"SGD", "Adam", "AdamW"}


def trainings() -> list[tuple[str, str]]:
    """Return the pairs of optimizer and way. Fused ways take only the fusable optimizers."""
    return [
        (optimizer, way)
        for optimizer in OPTIMIZERS
        for way in WAYS
        if optimizer in FUSABLE or not way.startswith("fused")
    ]


def result(optimizer: str, way: str) -> str:
    """Train, and return the SHA-256 of the model's and the optimizer's state in hexadecimal."""
    model, loader, made = make_job(OPTIMIZERS[optimizer])
    train, arguments = WAYS[way]
    run = flatout.optimize(model, loader, made, functional.cross_entropy, budget=0, **arguments)
    train(run)
    run.undo()
    digest = hashlib.sha256()
    for name, value in _leaves({"model": model.state_dict(), "optimizer": made.state_dict()}):
        digest.update(f"{name}={bits(value) if isinstance(value, torch.Tensor) else value!r};".encode())
    return digest.hexdigest()


def _leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{name}.{key}")]
    if isinstance(tree, list | tuple):
        return [leaf for i, value in enumerate(tree) for leaf in _leaves(value, f"{name}.{i}")]
    return [(name, tree)]
