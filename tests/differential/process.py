"""State of the process: flags, generators, threads, hooks, environment."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.core.snapshot import Snapshot
from tests.helpers import bits, native_threads
from tests.process_state import attention

FLAGS: dict[str, Callable[[], object]] = {
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "products": lambda: torch.set_float32_matmul_precision("high"),
    "no flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "unfilled": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "no collector": gc.disable,
}
"""Settings that a user may have made for the whole process."""

THEIR_THREADS = ("ThreadPoolExecutor", "tqdm")


@contextlib.contextmanager
def as_user_sets_it(flags: tuple[str, ...]) -> Iterator[None]:
    """Set some of ``FLAGS`` inside the block."""
    state, collects = Snapshot.capture([]), gc.isenabled()
    torch.set_num_threads(1)  # two threads would wait for each other on a busy machine
    for name in flags:
        FLAGS[name]()
    try:
        yield
    finally:
        state.restore()
        if collects:
            gc.enable()


def generators() -> dict[str, bytes | str]:
    """Return the states of the global generators."""
    return {"torch": bits(torch.get_rng_state()), "numpy": str(np.random.get_state()), "python": str(random.getstate())}


def flags() -> dict[str, Any]:
    """Return backend flags, which enabled techniques may change."""
    return {
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "products": (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        ),
        "attention": attention(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
    }


def surroundings() -> dict[str, Any]:
    """Return the state that no technique may change. Threads of TorchInductor and tqdm are left out."""
    module = torch.nn.modules.module
    optimizer = sys.modules[torch.optim.Optimizer.__module__]
    return {
        "threads": sorted(
            t.name for t in threading.enumerate() if not t.name.startswith(("ThreadPoolExecutor", "tqdm"))
        ),
        "native threads": len(native_threads()),
        "children": _children(),
        "collector": (gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold(), list(gc.callbacks)),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "autograd": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.autograd.is_multithreading_enabled(),
            torch._C._autograd._saved_tensors_hooks_is_enabled(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled),
        "module hooks": {
            k: dict(v) for k, v in vars(module).items() if k.startswith("_global_") and hasattr(v, "items")
        },
        "optimizer hooks": [dict(getattr(optimizer, f"_global_optimizer_{when}_hooks")) for when in ("pre", "post")],
        "warnings": list(warnings.filters),
        "interrupt": signal.getsignal(signal.SIGINT),
        "directory": os.getcwd(),
    }


def _children() -> set[str]:
    multiprocessing.active_children()  # joins processes that have ended
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
