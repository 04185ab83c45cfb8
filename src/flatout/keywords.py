"""Errors about keywords that a function does not have. Each error shows the argument to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flatout.techniques import REGISTRY

P = ParamSpec("P")
R = TypeVar("R")

OTHER_NAMES = {
    "accumulate=4": (
        "gradient_accumulation_steps",
        "gradient_accumulation",
        "accumulate_grad_batches",
        "accumulation_steps",
        "grad_accum",
    ),
    "batch_size=256": ("batch", "bs", "train_batch_size", "per_device_train_batch_size", "global_batch_size"),
    "budget=60": ("timeout", "time_limit", "time_budget", "max_seconds"),
    "device='cuda'": ("gpu", "gpus", "cuda", "accelerator"),
    "expected_steps=10 * len(loader)": ("epochs", "num_epochs", "max_epochs", "max_steps", "total_steps", "num_steps"),
    "loader=loader": ("dataset", "data", "dataloader", "data_loader", "train_loader", "train_dataloader"),
    "loss_fn=torch.nn.functional.cross_entropy": ("loss", "criterion", "loss_function", "loss_func"),
    "max_grad_norm=1.0": ("gradient_clip_val", "gradient_clipping", "clip_grad_norm", "clip_grad", "grad_clip"),
    "memory_limit=8 * 2**30": ("memory", "max_memory"),
    "optimizer=optimizer": ("opt", "optim", "optimizers"),
    "precision='bf16'": ("amp", "mixed_precision", "autocast", "amp_dtype", "dtype", "fp16", "bf16"),
    "scheduler=scheduler": ("lr_scheduler", "schedulers"),
    "seed=0": ("random_seed", "manual_seed"),
    "techniques={'workers': 4}": ("num_workers", "dataloader_num_workers"),
    "techniques={'compile': True}": ("torch_compile",),
}
"""Names of the same arguments in other libraries, by the code to write instead."""


def explains_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, with an error for unknown keywords that shows the argument to write instead."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{function.__name__}() has no argument {name!r}. {_instead(name, value, known)}")
        return function(*args, **kwargs)

    return checked


def _instead(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return a sentence with the code to write in place of an unknown keyword and its value."""
    for code, names in OTHER_NAMES.items():
        if name in names and code.partition("=")[0] in known:
            return f"Write {code}"
    if any(name == technique.name for technique in REGISTRY):
        return f"Write techniques={{{name!r}: {value!r}}}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}=?" if close else f"Choose from {', '.join(known)}"
