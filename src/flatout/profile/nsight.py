"""Command lines of Nsight Systems and Nsight Compute for a training script.

Nsight and torch's profiler need the same counters of the driver, so the two must not run at once. Under Nsight,
``flatout profile --capture`` only opens the range that Nsight records, and names the operators in the range. The range
uses the CUDA profiler API, which both tools support and which includes autograd's own threads. An NVTX push/pop range
does not include these threads.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
_MAY_SAMPLE = 2  # highest level at which nsys samples without root


def commands(script: str, args: Sequence[str], steps: int, warmup: int, *, is_module: bool = False) -> tuple[str, str]:
    """Return the commands for a timeline (nsys) and for the details of one kernel (ncu).

    Args:
        script: path of the training script.
        args: its arguments.
        steps: updates to record.
        warmup: updates before the recorded ones.
        is_module: True if ``script`` is the name of a module.

    Returns:
        Two lines for a POSIX shell. ``{kernel}`` in the second line stands for the name of a kernel.
    """
    name = script.rpartition(".")[2] if is_module else Path(script).stem
    program = ["-m", script, *args] if is_module else [script, *args]
    run = [*_flatout(), "profile", "--capture", "--warmup", str(warmup)]
    sampling = [] if _may_sample() else ["--sample=none", "--cpuctxsw=none"]
    nsys = [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt", *sampling, "--cuda-graph-trace=node"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *(f"--output={name}", "--force-overwrite=true"),
    ]
    ncu = [
        *("ncu", "--set", "full", "--profile-from-start", "off", "--graph-profiling", "node", "--nvtx"),
        *("--kernel-name", "{kernel}", "--launch-count", "3", "--export", name, "--force-overwrite"),
    ]
    return (
        shlex.join([*nsys, *run, "--steps", str(steps), *program]),
        shlex.join([*ncu, *run, "--steps", "1", *program]).replace("'{kernel}'", "{kernel}"),
    )


def kernel_filter(kernel: str) -> str:
    """Return a kernel's name for ``ncu --kernel-name``, without return type, namespaces, template and arguments.

    An empty name gives a filter that matches every kernel.
    """
    bare = re.sub(r"\(anonymous namespace\)::", "", kernel)
    head = re.split(r"[<(]", bare, maxsplit=1)[0].split(" ")[-1].rpartition("::")[2]
    return shlex.quote(head) if head else "regex:."


def commands_of_main(steps: int, warmup: int) -> tuple[str, ...]:
    """Return ``commands`` for the script of this process; empty if there is none (a notebook, ``-c``, ``-m``)."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None or not script.endswith(".py"):
        return ()
    return commands(script, sys.argv[1:], steps, warmup)


def _flatout() -> list[str]:
    return ["flatout"] if shutil.which("flatout") else [sys.executable, "-m", "flatout"]


def _may_sample() -> bool:
    try:
        return int(_PARANOID.read_text()) <= _MAY_SAMPLE
    except (OSError, ValueError):
        return False
