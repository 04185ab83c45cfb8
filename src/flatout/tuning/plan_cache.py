"""Cached plans: the key, which is everything that changes decisions, and one JSON file for each key.

Many processes may use the files at once: a file is replaced as a whole. The folder and its files must belong to this
user, and only this user may write to the folder. All other files are ignored silently, because an unusable cache must
not stop a training. ``Plan.load`` reads the files, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.core.batches import objects_of, sizes_of, tensors_within
from flatout.core.cache_folder import cache_folder, make_folder, read_own, write_own
from flatout.core.machine import cpu_name, text_of, usable_cores
from flatout.core.source_code import hash_of_source, hashes_of_source
from flatout.core.version import __version__
from flatout.data.loaders import original_of
from flatout.distributed.process_group import group_size
from flatout.plan import SCHEMA_VERSION, Plan
from flatout.techniques.sdpa_backend import attention_kernels
from flatout.training.spec import Spec
from flatout.tuning.session import Session

ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "FLATOUT_",
    "GLIBC_TUNABLES",
    "GOMP_",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "MKL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
)
"""Beginnings of the names of environment variables that may change numerics, kernels or speed."""

IRRELEVANT = (
    "CUDA_CACHE_",
    "CUDA_HOME",
    "CUDA_PATH",
    "FLATOUT_BUDGET",
    "FLATOUT_CACHE",
    "FLATOUT_PROGRESS",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets this variable when it compiles
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TRITON_CACHE_DIR",
)
"""Beginnings of the names of variables that only set folders, logs, or the duration of measurements."""

_DRIVER = Path("/proc/driver/nvidia/version")


def key_of(session: Session) -> dict[str, str]:
    """Return the fields of the key by name, so that a person can compare the keys of two starts.

    No decision depends on the seed, the learning rate, the budget or the values of weights. The key contains the number
    of usable cores but not their numbers, because cluster schedulers assign other cores to each start.

    Args:
        session: a prepared session, before its search.
    """
    spec, loader = session.job.spec, original_of(session.loader)
    arguments = {name: getattr(spec, name) for name in ("batch_size", "lr_rule", "memory_limit")}
    return {
        "flatout": f"{__version__}, plans of version {SCHEMA_VERSION}",
        "python": platform.python_version(),
        **session.fingerprint,
        "batch": _shapes(session.job.data.batches),
        "hardware": _hardware(spec.device),
        "cores": f"{usable_cores()}, {torch.get_num_threads()} threads, {_processes(spec)}",
        "modes": _modes(spec.device),
        "environment": ", ".join(f"{name}={os.environ[name]}" for name in sorted(filter(_is_relevant, os.environ))),
        "code": hash_of_source(_code_of(spec, loader)),
        "loader": _loader(loader),
        "settings": _settings(spec.optimizer),
        "scheduler": _class_of(spec.scheduler),
        "update": f"accumulate={spec.accumulate}, clips={spec.max_grad_norm is not None}",
        "deterministic": str(spec.deterministic),
        "choices": json.dumps({"techniques": session.choices.asked, **arguments}, sort_keys=True, default=repr),
        "expected steps": f"10^{math.floor(math.log10(max(1, session.job.data.expected_steps)))}",
    }


def training_of(session: Session) -> dict[str, str]:
    """Return facts about the training, by name. The facts are the same before and after the search.

    The facts about data are its class, length and shapes. The content of the data is not read.

    Args:
        session: a prepared session.
    """
    spec, loader = session.job.spec, original_of(session.loader)
    autocast = torch.get_autocast_dtype(spec.device.type) if torch.is_autocast_enabled(spec.device.type) else "off"
    dtypes = sorted({str(parameter.dtype) for parameter in spec.model.parameters()})
    return {
        "model": session.fingerprint["model"],
        "loader": _loader(loader),
        "batch": _shapes(session.taken),
        "optimizer": f"{session.fingerprint['optimizer']}, {_settings(spec.optimizer)}",
        "update": f"accumulate={spec.accumulate}, clips={spec.max_grad_norm is not None}",
        "precision": f"{'/'.join(dtypes)}, autocast {autocast}".replace("torch.", ""),
        "deterministic": str(spec.deterministic),
    }


def code_of(session: Session) -> dict[str, str]:
    """Return the hash of each function and class of the user that belongs to the key, by name."""
    return hashes_of_source(_code_of(session.job.spec, original_of(session.loader)))


def _shapes(batches: Sequence[Any]) -> str:
    """Return dtypes and sizes of the batches' tensors. A size that varies is rounded up to a power of two.

    Padding differs from start to start, so its exact sizes would never match.
    """
    made = [_class_of(leaf) for leaf in objects_of(batches[0])]
    for same in zip(*map(tensors_within, batches), strict=False):
        sizes = (set(along) for along in zip(*map(sizes_of, same), strict=False))
        dtypes = {str(t.dtype).removeprefix("torch.") for t in same}
        made.append(f"{'/'.join(sorted(dtypes))}[{', '.join(map(_rounded, sizes))}]")
    return ", ".join(made)


def _rounded(sizes: set[int]) -> str:
    return str(*sizes) if len(sizes) == 1 else f"<={1 << (max(sizes) - 1).bit_length()}"


def _hardware(device: torch.device) -> str:
    cpu = f"{cpu_name()} with {torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cuda":
        return cpu
    found = torch.cuda.get_device_properties(device)
    libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    driver = text_of(_DRIVER).partition("\n")[0]
    return f"{cpu}, {found.multi_processor_count} SMs, {found.total_memory} bytes, {libraries}, {driver}"


def _processes(spec: Spec) -> str:
    return f"{group_size()} processes" + ", which decide together" * (spec.ranks.size > 1)


def _modes(device: torch.device) -> str:
    """Return the modes of this process that change dtypes or kernels."""
    backends: Any = torch.backends  # the stubs of torch.backends lack some of these modules
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    products = (backends.cuda.matmul, mkldnn.matmul, cudnn.conv, mkldnn.conv)
    modes = {
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        "products": [module.fp32_precision for module in products],
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "attention": attention_kernels(),
    }
    return ", ".join(f"{name} {mode}" for name, mode in modes.items())


def _is_relevant(variable: str) -> bool:
    return variable.startswith(ENVIRONMENT) and not variable.startswith(IRRELEVANT)


def _code_of(spec: Spec, loader: Any) -> list[Any]:
    """Return the user's functions and classes whose source belongs to the key."""
    code = [*spec.code, *{type(module) for root in spec.modules for module in root.modules()}]
    if isinstance(loader, DataLoader):
        code += [loader.collate_fn, type(loader.dataset)]
    return code


def _loader(loader: Any) -> str:
    try:
        length = str(len(loader))
    except Exception:  # the user's loader may raise anything
        length = "unknown"
    facts = [_class_of(loader), f"length {length}"]
    if isinstance(loader, DataLoader):
        parts = (loader.dataset, loader.sampler, loader.batch_sampler)
        facts += [*map(_class_of, parts), f"batch_size={loader.batch_size}", f"num_workers={loader.num_workers}"]
    return ", ".join(facts)


def _settings(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the optimizer's settings. The type of a number stands for the number, unless the number is 0."""
    if optimizer is None:
        return "none"
    shown = {name: _setting(value) for name, value in sorted(getattr(optimizer, "defaults", {}).items())}
    return ", ".join([f"{len(optimizer.param_groups)} groups", *(f"{name}={value}" for name, value in shown.items())])


def _setting(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or isinstance(value, (bool, str, torch.dtype)) or (is_number and value == 0):
        return str(value)
    return type(value).__name__


def _class_of(value: Any) -> str:
    return "none" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


MOST_PLANS = 256
MOST_BYTES = 4 << 20
"""Limits of the store. Above either limit, the least recently used plans are deleted."""

_KEY = "key"
_NAME = re.compile(r"\.?[0-9a-f]{32}\.json(\..*)?")
"""Names of the store's files, including temporary files that a killed process left."""


def read_plan(key: Mapping[str, str]) -> Plan | None:
    """Return the plan of a key, or None if there is none that can be trusted. A read counts as a use."""
    path = _path(key)
    if path is None or not _is_private(path.parent):
        return None
    try:
        data = json.loads(read_own(path) or "null")
        if not isinstance(data, dict) or data.get(_KEY) != dict(key):
            return None
        plan = Plan.from_dict(data)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return plan


def write_plan(key: Mapping[str, str], plan: Plan) -> None:
    """Write the plan of a key, and delete the least recently used plans if there are too many."""
    path = _path(key)
    if path is None:
        return
    try:
        text = json.dumps(plan.to_dict() | {_KEY: dict(key)}, indent=1)
    except TypeError:  # a forced value may be an object, such as a multiprocessing context
        return
    make_folder(path.parent)
    if not _is_private(path.parent):
        return
    write_own(path, text + "\n")
    _delete_least_used(path.parent)


def forget_decision(key: Mapping[str, str], technique: str) -> None:
    """Remove a technique from the plan of a key. Do nothing without such a plan."""
    plan = read_plan(key)
    if plan is not None and technique in plan.decisions:
        write_plan(key, plan.without(technique))


def _path(key: Mapping[str, str]) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
    return folder / "plans" / f"{digest}.json"


def _is_private(folder: Path) -> bool:
    """Return True if a folder belongs to this user, and only this user may write to the folder."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_shared


def _delete_least_used(folder: Path) -> None:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process has deleted the file
                    found.append((entry.stat(follow_symlinks=False), entry.path))
    size = 0
    for i, (status, path) in enumerate(sorted(found, key=lambda file: -file[0].st_mtime_ns)):
        size += status.st_size
        if i >= MOST_PLANS or size > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)
