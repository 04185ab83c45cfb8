"""Process state that a test may change: random states, and settings of torch and malloc."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
PRECISIONS: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}
PARENTS: dict[str, Any] = {"cuda": torch.backends.cudnn, "mkldnn": torch.backends.mkldnn}


def matmul_precision() -> tuple[str | None, dict[str, str]]:
    """Return torch's older setting and the newer one of each backend.

    torch does not return the older setting if the newer ones differ. "none" means a newer setting that equals the
    setting of its backend.
    """
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    newer = {
        name: "none" if module.fp32_precision == PARENTS[name].fp32_precision else module.fp32_precision
        for name, module in PRECISIONS.items()
    }
    return older, newer


def set_matmul_precision(precision: tuple[str | None, dict[str, str]]) -> None:
    if matmul_precision() == precision:
        return
    older, newer = precision
    if older is not None:
        torch.set_float32_matmul_precision(older)  # sets the newer ones too
    for name, module in PRECISIONS.items():
        if matmul_precision()[1][name] != newer[name]:
            module.fp32_precision = newer[name]


def attention() -> tuple[dict[str, bool], list[int]]:
    enabled = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION}
    return enabled, torch._C._get_sdp_priority_order()


def set_attention(setting: tuple[dict[str, bool], list[int]]) -> None:
    enabled, order = setting
    for name, on in enabled.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)
    torch._C._set_sdp_priority_order(order)


def determinism() -> tuple[int, bool]:
    return torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def set_determinism(setting: tuple[int, bool]) -> None:
    mode, torch.utils.deterministic.fill_uninitialized_memory = setting  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode(mode)


def cudnn() -> tuple[bool, bool, bool]:
    return torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def set_cudnn(setting: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = setting


def set_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def cuda_random() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_cuda_random(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)


def malloc() -> bool:
    """Return True if malloc keeps freed memory, as far as flatout has set it. malloc itself does not report this."""
    module = sys.modules.get("flatout.techniques.malloc")
    return module is not None and module.keeps()


def set_malloc(keeps: bool) -> None:
    if malloc() != keeps:
        sys.modules["flatout.techniques.malloc"].keep(keeps)


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Python's random": (random.getstate, random.setstate),
    "NumPy's random": (np.random.get_state, np.random.set_state),
    "torch's random": (torch.get_rng_state, torch.set_rng_state),
    "random of GPUs": (cuda_random, set_cuda_random),
    "threads": (torch.get_num_threads, set_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "determinism": (determinism, set_determinism),
    "cuDNN": (cudnn, set_cudnn),
    "matrix products": (matmul_precision, set_matmul_precision),
    "attention": (attention, set_attention),
    "malloc": (malloc, set_malloc),
}
"""Functions that read and write each state, by the name of the state."""


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Restore all states at the end of the block."""
    before = {name: read() for name, (read, _) in STATES.items()}
    try:
        yield
    finally:
        for name, (_, write) in STATES.items():
            write(before[name])
