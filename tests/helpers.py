"""Helpers of several tests: bit-exact records of training state, files, threads and forks."""

import contextlib
import inspect
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.process_state import attention


def run_script(script, *arguments, timeout=300, **variables):
    """Run Python code in a new process with these environment variables. Return the process, which must succeed."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def special_file(folder, kind):
    """Return the path of a new "folder", "fifo", "socket" or "device" in a folder."""
    path = folder / "special"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to("/dev/zero")
    return path


@contextlib.contextmanager
def room_for_files(size):
    """Limit files of this process to ``size`` bytes inside the block, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def bits(tensor):
    """Return the raw bytes of a tensor, so that NaNs and signed zeros compare."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    copied = dense.cpu().flatten().clone()  # memory shared with NumPy can no longer be resized
    return copied.view(torch.uint8).numpy().tobytes()


def _picture(value):
    return (str(value.dtype), tuple(value.shape), bits(value)) if isinstance(value, torch.Tensor) else value


WHAT_TECHNIQUES_CHANGE = ("class", "compiled", "optimizer class", "threads")


def trained_state(model, optimizer=None):
    """Return the part of ``snapshot`` that active techniques do not change."""
    return {k: v for k, v in snapshot(model, optimizer).items() if k not in WHAT_TECHNIQUES_CHANGE}


def snapshot(model, optimizer=None):
    """Return everything that ``Snapshot`` promises to restore, as comparable plain data."""
    seen = {
        "parameters": {n: _picture(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "grads": {n: None if p.grad is None else _picture(p.grad) for n, p in model.named_parameters()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "buffers": {n: _picture(b) for n, b in model.named_buffers()},
        "keys": list(model.state_dict()),
        "class": type(model),
        "compiled": model._compiled_call_impl,
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "random": (random.getstate(), str(np.random.get_state()), bits(torch.get_rng_state())),
        "flags": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
            attention(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
        ),
        "threads": torch.get_num_threads(),
    }
    if optimizer is not None:
        names = {p: n for n, p in model.named_parameters()}
        seen["optimizer"] = {
            names[p]: {k: _picture(v) for k, v in state.items()} for p, state in optimizer.state.items()
        }
        seen["optimizer class"] = (
            type(optimizer),
            optimizer.step.__func__ if hasattr(optimizer.step, "__func__") else None,
        )
        seen["attributes"] = {
            k: _picture(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "step")
        }
        seen["groups"] = [
            {k: _picture(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
    return seen


class Operators(TorchDispatchMode):
    """Record the names of all operators in ``names``, except the profiler's ranges."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "profiler":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def native_threads():
    """Return the names of flatout's threads in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("flatout")]


def in_child(work) -> int:
    """Run ``work`` in a forked child and return the exit status. SIGALRM kills the child after two minutes."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def line_of(function, part):
    """Return ``"file.py:line"`` of the first line of a function that contains the part."""
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function)).name
    return f"{file}:{first + next(i for i, line in enumerate(lines) if part in line)}"
