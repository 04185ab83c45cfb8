"""Checks of ``flatout doctor``, as a table of rules. Each rule has a verdict, a text, a fix and a condition."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import flatout
from flatout import native
from flatout.cli import facts
from flatout.cli.facts import GIB, Facts, first_line
from flatout.core.machine import available_memory, free_shared_memory, swap, text_of, total_memory, usable_cores

Verdict = Literal["good", "note", "slow", "broken"]
"""``slow``: costs speed. ``broken``: something does not work. ``note``: worth knowing."""

SEVERITY: tuple[Verdict, ...] = ("good", "note", "slow", "broken")
"""Verdicts, the worst last."""


@dataclass(frozen=True)
class Finding:
    """Result of one rule.

    Attributes:
        topic: ``install``, ``GPU``, ``CPU``, ``memory``, ``settings`` or ``ranks``; ``other`` if reading failed.
        name: the subject.
        found: the subject's state, in words.
        verdict: the judgment of the state.
        fix: the remedy, empty if there is none.
    """

    topic: str
    name: str
    found: str
    verdict: Verdict = "good"
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """Template of a finding, and the condition for the finding. Facts fill the fields of the three texts."""

    name: str
    found: str
    verdict: Verdict = "good"
    fix: str = ""
    when: Callable[[Facts], object] = lambda facts: True


@dataclass(frozen=True)
class Check:
    """Reader of facts and the rules that judge them.

    For each set of facts and each name, the first rule whose condition holds gives a finding.
    """

    topic: str
    name: str
    read: Callable[[], Iterable[Facts]]
    rules: tuple[Rule, ...]

    def findings(self) -> Iterator[Finding]:
        """Yield the findings. An exception of the reader becomes a finding."""
        try:
            for read in self.read():
                judged = set()
                for rule in self.rules:
                    if rule.name not in judged and rule.when(read):
                        judged.add(rule.name)
                        name, found, fix = (text.format_map(vars(read)) for text in (rule.name, rule.found, rule.fix))
                        yield Finding(self.topic, name, found, rule.verdict, fix)
        except Exception as error:  # the machine may be of an unforeseen kind
            yield Finding("other", self.name, f"could not be looked at: {first_line(error)}", "note")


def examine() -> tuple[Finding, ...]:
    """Examine the machine and the install without changing anything."""
    return tuple(finding for check in CHECKS for finding in check.findings())


def as_dicts(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """Return the findings as plain values for JSON."""
    return [asdict(finding) for finding in findings]


_REBUILD = "set CUDA_HOME to a CUDA {cuda} toolkit with nvcc, and install flatout again"
_NEWER_DRIVER = "install a driver for CUDA {cuda} or newer"
_RESET_GPU = "reset the GPU: sudo nvidia-smi --gpu-reset, or reboot"
_SET_GOVERNOR = "sudo cpupower frequency-set -g performance"
_FOLLOW_LOAD = {"intel_pstate", "amd-pstate-epp"}
"""Frequency drivers that raise the clock under load, also with the ``powersave`` governor."""
_FEW_FILES = 4096
"""Limit of open files that workers may exceed, because each tensor that a worker sends holds a descriptor."""

_SLOW_VARIABLES = {
    # variable: (values that slow training, any value if empty; effect)
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel launch waits for the kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ((), "every tensor is a cudaMalloc and a cudaFree"),
    "NVIDIA_TF32_OVERRIDE": (("0",), "TF32 is forbidden, whatever torch says"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked on all ranks"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile compiles nothing"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile compiles nothing"),
    "TORCH_COMPILE_DEBUG": (("1",), "torch.compile writes down all that it does"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "torch.compile rebuilds every kernel in every run"),
    "PYTHONDEVMODE": ((), "Python checks every allocation"),
    "PYTHONTRACEMALLOC": ((), "Python notes where every allocation comes from"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through host memory"),
}

CHECKS = (
    Check("install", "flatout", lambda: [
        Facts(version=flatout.__version__, python=platform.python_version(), cuda=torch.version.cuda)
    ], (
        Rule("flatout", "{version}, Python {python}, with CUDA kernels", when=lambda f: native.BUILT_WITH_CUDA),
        Rule("flatout", "{version}, Python {python}, for the CPU", when=lambda f: not f.cuda),
        Rule("flatout", "{version}, Python {python}, without CUDA kernels", "slow", _REBUILD,
             lambda f: torch.cuda.is_available()),
        Rule("flatout", "{version}, Python {python}, without CUDA kernels", "note", _REBUILD),
    )),
    Check("install", "torch", lambda: [
        Facts(version=torch.__version__, cuda=torch.version.cuda or torch.version.hip)
    ], (
        Rule("torch", "{version}, for CUDA {cuda}", when=lambda f: f.cuda),
        Rule("torch", "{version}, for the CPU alone, on a machine with an NVIDIA GPU", "broken",
             "install a build of torch for CUDA: https://pytorch.org/get-started/locally",
             lambda f: facts.DRIVER.exists()),
        Rule("torch", "{version}, for the CPU alone"),
    )),
    Check("install", "extras", lambda: [
        Facts(missing=" and ".join(name for name in ("psutil", "pynvml") if importlib.util.find_spec(name) is None))
    ], (
        Rule("extras", "without {missing}", "note", "pip install 'flatout[monitor]'", lambda f: f.missing),
        Rule("extras", "psutil, nvidia-ml-py"),
    )),
    Check("install", "compiler", facts.compilers, (
        Rule("torch.compile", "no C++ compiler: it cannot build kernels", "slow",
             "install one: sudo apt install g++", lambda f: f.missing == "C++ compiler"),
        Rule("torch.compile", "no Python.h: it cannot build kernels", "slow",
             "install Python's headers: sudo apt install python3-dev", lambda f: f.missing == "Python.h"),
        Rule("torch.compile", "no Triton: it cannot build kernels", "slow",
             "pip install triton", lambda f: f.missing == "Triton"),
        Rule("torch.compile", "{tools}"),
    )),
    Check("install", "tools", lambda: [
        Facts(tools=", ".join(filter(shutil.which, ("nsys", "ncu"))))
    ] if torch.cuda.is_available() else [], (
        Rule("profilers", "{tools}", when=lambda f: f.tools),
        Rule("profilers", "neither nsys nor ncu", "note"),
    )),
    Check("GPU", "driver", facts.driver, (
        Rule("driver", "{version}", when=lambda f: f.version),
        Rule("driver", "torch cannot use the GPU: {error}", "broken", _NEWER_DRIVER, lambda f: f.error),
        Rule("device", "hidden by CUDA_VISIBLE_DEVICES={visible!r}: training runs on the CPU", "note",
             "unset CUDA_VISIBLE_DEVICES", lambda f: f.visible is not None),
        Rule("device", "none: training runs on the CPU", "note", when=lambda f: f.has_none),
    )),
    Check("GPU", "gpus", facts.gpus, (
        Rule("{gpu}", "cannot be used: {error}", "broken",
             "nvidia-smi -q tells how the GPU is; another program may hold it, or it needs a reset",
             lambda f: f.error),
        Rule("{gpu}", "{model}", "note", "no bfloat16 and no TF32 before Ampere: mixed precision is float16",
             lambda f: f.before_ampere),
        Rule("{gpu}", "{model}"),
        Rule("{gpu} torch", "torch {torch} is built for {built_for}", "broken",
             "install a torch whose build has {architecture}", lambda f: f.cannot_run_torch),
        Rule("{gpu} kernels", "torch's own operations run: flatout's kernels were built with CUDA "
             "{old_driver.built_with}, the driver supports CUDA {old_driver.supports}", "slow",
             "{old_driver.fix}", lambda f: f.cannot_run_kernels and f.old_driver),
        Rule("{gpu} kernels", "torch's own operations run: flatout's kernels are built for other GPUs", "slow",
             "build flatout for {architecture}", lambda f: f.cannot_run_kernels),
        Rule("{gpu} peak", "not in the table: no MFU against a data sheet", "note",
             "flatout.mfu.measured_peak_flops() tells what it reaches", lambda f: f.without_data_sheet),
        # No rule checks the generation of the link, because an idle GPU lowers the generation.
        Rule("{gpu} PCIe", "{lanes[0]} lanes of {lanes[1]}", "slow",
             "copies to the GPU are slower: seat the card in a full slot, or ask who runs the machine",
             lambda f: f.lanes and f.lanes[0] < f.lanes[1]),
        Rule("{gpu} start", "persistence mode is off: the driver initializes the GPU for every program", "note",
             "sudo nvidia-smi -pm 1", lambda f: f.persistence == 0),
        Rule("{gpu} memory", "1 error that ECC could not correct", "broken", _RESET_GPU,
             lambda f: f.memory_errors == 1),
        Rule("{gpu} memory", "{memory_errors} errors that ECC could not correct", "broken", _RESET_GPU,
             lambda f: f.memory_errors),
        Rule("{gpu} clocks", "held down by: {slowdowns}", "slow",
             "cool the machine, or nvidia-smi -rgc; flatout monitor shows it live", lambda f: f.slowdowns),
    )),
    Check("GPU", "cudnn", facts.cudnn, (
        Rule("cuDNN", "{error}", "broken",
             "unset LD_LIBRARY_PATH, or take another cuDNN out of it: torch brings its own", lambda f: f.error),
        Rule("cuDNN", "not available", "slow", "install a build of torch with cuDNN", lambda f: f.is_missing),
        Rule("cuDNN", "{version}, switched off", "slow", "torch.backends.cudnn.enabled = True",
             lambda f: not f.enabled),
        Rule("cuDNN", "{version}", "note", "deterministic algorithms may be slower", lambda f: f.deterministic),
        Rule("cuDNN", "{version}"),
    )),
    Check("GPU", "tf32", facts.tf32, (
        Rule("TF32", "on", when=lambda f: f.precision == "tf32"),
        Rule("TF32", "off: float32 products run on CUDA cores", "slow",
             "torch.set_float32_matmul_precision('high'), if 10 bits of mantissa do"),
    )),
    Check("CPU", "cores", facts.cores, (
        Rule("cores", "{cores} ({limits})", when=lambda f: f.cores == f.visible),
        Rule("cores", "{cores} usable of {visible} logical ({limits})"),
        Rule("threads", "{threads} in each of {ranks} ranks, on {cores} cores", "slow",
             "OMP_NUM_THREADS={share} torchrun ...: more threads than cores wait for each other",
             lambda f: f.ranks > 1 and f.threads > f.share),
        Rule("threads", "{threads} in each of {ranks} ranks, on {cores} cores: OMP_NUM_THREADS={variable}", "note",
             "OMP_NUM_THREADS={share} torchrun ...: torchrun sets it to 1 otherwise",
             lambda f: f.ranks > 1 and f.threads < f.share and f.variable is not None),
        Rule("threads", "{threads} in each of {ranks} ranks", when=lambda f: f.ranks > 1),
        Rule("threads", "{threads}, on {cores} cores", "slow",
             "torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}: more threads than cores wait for each other",
             lambda f: f.threads > f.cores),
        Rule("threads", "{threads}, on {cores} cores: OMP_NUM_THREADS={variable}", "note",
             "unset OMP_NUM_THREADS, where this is the machine's only training (torchrun sets it to 1)",
             lambda f: f.threads < f.cores and f.variable is not None),
        Rule("threads", "{threads}"),
    )),
    Check("CPU", "load", lambda: [Facts(load=os.getloadavg()[0], cores=usable_cores())], (
        Rule("load", "{load:.1f} on {cores} cores", "note",
             "what flatout measures now is measured beside something else", lambda f: f.load > f.cores / 2),
        Rule("load", "{load:.1f}"),
    )),
    Check("CPU", "governor", facts.governors, (
        Rule("governor", "{governors}", when=lambda f: f.governors == "performance"),
        Rule("governor", "{governors}", "slow", _SET_GOVERNOR,
             lambda f: "powersave" in f.governors and not f.drivers & _FOLLOW_LOAD),
        Rule("governor", "{governors}", "note", _SET_GOVERNOR),
    )),
    Check("CPU", "numa", lambda: [Facts(nodes=sum(1 for _ in facts.NODES.glob("node[0-9]*")))], (
        Rule("NUMA", "{nodes} nodes", "note",
             "numactl --cpunodebind=N --membind=N, with N of the GPU: nvidia-smi topo -m", lambda f: f.nodes > 1),
    )),
    Check("memory", "memory", lambda: [Facts(free=available_memory() / GIB, total=total_memory() / GIB)], (
        Rule("RAM", "{free:.1f} of {total:.1f} GiB available", "slow",
             "less than a few workers need: end other programs", lambda f: f.free < 2),
        Rule("RAM", "{free:.1f} of {total:.1f} GiB available"),
    )),
    Check("memory", "swap", lambda: [Facts(used=used / GIB, total=total / GIB) for used, total in [swap()]], (
        Rule("swap", "{used:.1f} of {total:.1f} GiB in use", "note",
             "memory was short: fewer workers, or end other programs", lambda f: f.used > 0.25),
    )),
    Check("memory", "huge pages", lambda: [Facts(file=facts.HUGE_PAGES)], (
        Rule("huge pages", "transparent huge pages are off", "note",
             "echo madvise | sudo tee {file}", lambda f: "[never]" in text_of(f.file)),
    )),
    Check("memory", "shared memory", lambda: [Facts(free=free_shared_memory() / GIB)], (
        Rule("/dev/shm", "{free:.2f} GiB free", "slow",
             "workers send here: docker run --shm-size=8g; else sudo mount -o remount,size=8g /dev/shm",
             lambda f: f.free < 1),
        Rule("/dev/shm", "{free:.2f} GiB free", when=lambda f: f.free < math.inf),
    )),
    Check("memory", "files", facts.open_files, (
        Rule("open files", "unlimited", when=lambda f: f.soft is None),
        Rule("open files", "{soft:,}, at most {hard}", "note",
             "ulimit -n {hard}: every tensor that a worker sends holds a descriptor", lambda f: f.soft < _FEW_FILES),
        Rule("open files", "{soft:,}"),
    )),
    Check("settings", "environment", lambda: [
        Facts(variable=name, value=value, effect=effect) for name, (values, effect) in _SLOW_VARIABLES.items()
        if (value := os.environ.get(name)) and (value in values or not values)
    ], (
        Rule("environment", "{variable}={value}: {effect}", "slow", "unset {variable}"),
    )),
    Check("settings", "allocator", lambda: [
        Facts(variable=name, value=os.environ[name])
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(name)
    ], (
        Rule("allocator", "{variable}={value}"),
    )),
    Check("settings", "tracing", lambda: [Facts()], (
        Rule("tracing", "on: a debugger or a coverage tool looks at every line of Python", "slow",
             "time the training without it", lambda f: sys.gettrace() is not None),
    )),
    Check("settings", "anomaly mode", lambda: [Facts()], (
        Rule("anomaly detection", "on: every backward node is checked for NaN", "slow",
             "torch.autograd.set_detect_anomaly(False)", lambda f: torch.is_anomaly_enabled()),
    )),
)  # fmt: skip
"""Checks of ``flatout doctor``, in the order of the page."""
