"""Check of flatout on a machine with a GPU, in three stages of at most nine minutes: figures, jobs, proof.

    make gpu-check                                                      all stages
    make gpu-check PHASES=figures                                       one stage
    make gpu-check PHASES="build optimize_gpu" ARGS_optimize_gpu="-k seed_mlp"    phases, with arguments for pytest

The first stage has the figures that matter most, and each stage is useful alone. Nothing is downloaded, and nothing is
installed outside of build/gpu. Packages come from the interpreter, and from the wheels in WHEELS. A phase that reaches
its limit keeps the figures that it has recorded. Environment variables:

    OUT     folder of the results                                           (default build/gpu-check)
            results.json   machine, versions, and status and seconds of each phase
            figures.md     tables of all figures
            <machine>.json all figures, for benchmarks/results
            log.txt, tests.xml
    PHASES  stages or phases to run, in order                               (default: all stages)
    WHEELS  folder of wheels to install, for packages that are missing      (default: none)
    ARCHS   CMake CUDA architectures                                        (default: 90a-real on sm_90, else the GPU's)
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))
import figures

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "gpu"
SITE, LOGS, WORK = BUILD / "site", BUILD / "logs", BUILD / "work"

LIMIT = 540
"""Limit of a stage, in seconds. A machine may be lent for ten minutes."""

GRACE = 10
"""Seconds before its limit in which a phase may end by itself, after an interrupt. pytest then writes its results."""

Command = Sequence[str]


# ---- phases ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Facts about the GPU, and options of this check.

    Attributes:
        facts: name and memory of the GPU, versions of torch and CUDA.
        archs: CMake CUDA architectures.
        out: folder of the results.
        wheels: wheels to install.
        full: True to measure at full size.
    """

    facts: Mapping[str, Any]
    archs: str
    out: Path
    wheels: Sequence[str] = ()
    full: bool = True


@dataclass(frozen=True)
class Phase:
    """Part of the check that runs in its own processes.

    Attributes:
        name: name in PHASES and in the results.
        seconds: estimated seconds on an H100 with 16 cores.
        limit: seconds after which the phase is ended.
        commands: returns the commands, which run one after another until one fails.
        needs: program without which the phase is unsupported.
        measures: True if the phase measures speed.
    """

    name: str
    seconds: int
    limit: int
    commands: Callable[[Machine], Sequence[Command]]
    needs: str = ""
    measures: bool = False


def pytest(*arguments: str) -> Command:
    """Return a command that runs pytest in a folder outside of the sources, so that it imports the built package."""
    place = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT))
    return (sys.executable, "-m", "pytest", *place, "-p", "no:cacheprovider", *arguments)


def benchmark(file: str, seconds: int, limit: int, select: str = "", *, name: str = "", needs: str = "") -> Phase:
    """Return a phase that runs a file in benchmarks, or the tests of it that ``select`` selects."""
    name = name or file

    def commands(machine: Machine) -> Sequence[Command]:
        chosen = shlex.split(os.environ.get(f"ARGS_{name}", "")) or (["-k", select] if select else [])
        size = ["--full"] if machine.full else []
        return [pytest(str(ROOT / "benchmarks" / f"{file}.py"), "-s", "-q", *size, *chosen)]

    return Phase(name, seconds, limit, commands, needs, measures=True)


def build(machine: Machine) -> Sequence[Command]:
    """Return the commands that install wheels and flatout into a folder of the build."""
    install = "-m pip install --quiet --no-index --no-deps --upgrade --target"
    pip = (sys.executable, *install.split(), str(SITE))
    options = {
        "build-dir": str(BUILD / "cmake"),
        "cmake.define.FLATOUT_CUDA": "ON",
        "cmake.define.FLATOUT_CUDA_ARCHS": machine.archs,
    }
    settings = [part for key, value in options.items() for part in ("-C", f"{key}={value}")]
    seen = "import flatout.native as n; print('CUDA kernels usable:', n.has_cuda_kernels())"
    return [
        *([(*pip, *machine.wheels)] if machine.wheels else []),
        (*pip, "--no-build-isolation", *settings, str(ROOT)),
        (sys.executable, "-c", seen),
    ]


def tests(machine: Machine) -> Sequence[Command]:
    """Return the command of tests/gpu, with one process for two cores and 8 GiB of the GPU."""
    processes = min((os.cpu_count() or 2) // 2, machine.facts.get("memory", 0) >> 33)
    has_xdist = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode == 0
    parallel = ["-n", str(processes), "--dist", "worksteal"] if has_xdist else []
    report = ["--junitxml", str(machine.out / "tests.xml"), "-o", "faulthandler_timeout=100"]
    return [pytest(str(ROOT / "tests" / "gpu"), *parallel, *report)]


def kernels(machine: Machine) -> Sequence[Command]:
    """Return the commands that run the kernels' cases without torch. CI runs the same cases on emulated devices."""
    program = BUILD / "cmake" / "device_kernels"
    return [("cmake", "--build", str(BUILD / "cmake"), "--target", program.name), (str(program),)]


def sanitize(tool: str) -> Callable[[Machine], Sequence[Command]]:
    """Return the command of a sanitizer, for tests that are small, because kernels then run 10 to 100 times slower."""

    def commands(machine: Machine) -> Sequence[Command]:
        # torch's caching allocator would hide an access outside of a tensor but inside the allocator's pool.
        sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool)
        return [(*sanitizer, "--error-exitcode", "86", *pytest("-q", "-m", "sanitize", str(ROOT / "tests" / "gpu")))]

    return commands


STAGES: dict[str, list[Phase]] = {
    "figures": [
        Phase("build", 60, 90, build),
        benchmark("update_path", 90, 110, "cuda"),
        benchmark("optimize_gpu", 150, 170, "seed_mlp or gpt2"),
        benchmark("kernel_times", 35, 50),
        benchmark("step_variants", 35, 50, needs="nvcc"),
        benchmark("data_path_gpu", 55, 70),
    ],
    "jobs": [
        Phase("build", 60, 90, build),
        benchmark("optimize_gpu", 130, 150, "wide or resnet50", name="optimize_gpu_large"),
        benchmark("checklist", 75, 95, "perceptron and not torchscript"),
        benchmark("case_study", 170, 205),
    ],
    "proof": [
        Phase("build", 60, 90, build),
        Phase("tests", 160, 190, tests),
        Phase("kernels", 20, 50, kernels),
        Phase("memcheck", 60, 80, sanitize("memcheck"), needs="compute-sanitizer"),
        Phase("racecheck", 40, 50, sanitize("racecheck"), needs="compute-sanitizer"),
        benchmark("normalize_images", 30, 40, "cuda"),
        benchmark("counting_overhead", 30, 40),
    ],
}
"""Phases by stage. The limits of a stage add up to at most ``LIMIT``, so no phase takes the time of another."""

OTHERS = [benchmark("data_parallel", 100, 300)]
"""Phases that run only by name. This one needs two GPUs."""


def chosen(names: Sequence[str]) -> list[Phase]:
    """Return the phases of stages and phases by name. A phase that is chosen twice runs once.

    Raises:
        ValueError: there is no stage and no phase of a name.
    """
    by_name = {phase.name: phase for phase in [*(each for stage in STAGES.values() for each in stage), *OTHERS]}
    found: dict[str, Phase] = {}
    for name in names:
        if name not in STAGES and name not in by_name:
            raise ValueError(f"PHASES must name some of {', '.join([*STAGES, *by_name])}, got {name}")
        for phase in STAGES.get(name) or [by_name[name]]:
            found.setdefault(phase.name, phase)
    return list(found.values())


# ---- running -----------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Result of a phase.

    Attributes:
        name: name of the phase.
        status: "passed", "failed", "timed out" or "unsupported".
        seconds: seconds that the phase took.
        estimate: estimated seconds on an H100.
        limit: limit in seconds.
    """

    name: str
    status: str
    seconds: float
    estimate: int
    limit: int


def environment(machine: Machine) -> dict[str, str]:
    """Return the environment variables of all phases."""
    path = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return {
        **os.environ,
        "OUT": str(machine.out),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "FLATOUT_FAIL_WITHOUT_GPU": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count())),
    }


def run_command(command: Command, variables: Mapping[str, str], log: Path, end: float) -> int | None:
    """Run a command until ``time.monotonic()`` is ``end``, print what it prints, and append this to a log.

    Returns:
        The exit status; None if the command had to be ended.
    """
    interrupted = False
    with log.open("ab") as sink, log.open("rb") as printed:
        printed.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command, cwd=WORK, env=variables, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < end:
                if not interrupted and time.monotonic() > end - GRACE:
                    process.send_signal(signal.SIGINT)
                    interrupted = True
                time.sleep(0.1)
                _show(printed.read())
        finally:  # workers that a command leaves behind would hold memory of the GPU
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _show(printed.read())
    return None if interrupted or process.returncode == -signal.SIGKILL else process.returncode


def _show(output: bytes) -> None:
    sys.stdout.write(output.decode(errors="replace"))
    sys.stdout.flush()


def run_phase(phase: Phase, machine: Machine) -> Result:
    """Run a phase within its limit."""
    begun = time.monotonic()
    status = "passed"
    log = LOGS / f"{phase.name}.log"
    log.write_bytes(b"")
    if phase.needs and shutil.which(phase.needs, path=environment(machine)["PATH"]) is None:
        status = "unsupported"
        log.write_text(f"{phase.name} needs {phase.needs}, which is not on the PATH\n")
    else:
        for command in phase.commands(machine):
            code = run_command(command, environment(machine), log, begun + phase.limit)
            if code != 0:
                status = "timed out" if code is None else "failed"
                break
        if phase.needs and "Device not supported" in log.read_text(errors="replace"):
            status = "unsupported"
    return Result(phase.name, status, time.monotonic() - begun, phase.seconds, phase.limit)


# ---- results -----------------------------------------------------------------------------------------------

PROBE = """import json, torch
facts = {"gpu": "none", "torch": torch.__version__, "cuda": torch.version.cuda or ""}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    facts |= {"gpu": p.name, "capability": f"{p.major}{p.minor}", "memory": p.total_memory}
print(json.dumps(facts))"""
"""Program that prints facts about torch and its GPU. It ends before the phases, and frees its memory of the GPU."""


def probe() -> dict[str, Any]:
    """Return facts about torch and its GPU."""
    printed = subprocess.run([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def output_of(*command: str, having: str = "") -> str:
    """Return the first line with ``having`` that ``command`` prints; empty if the command is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    lines = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return next((line.strip() for line in lines if having in line), "")


def versions(machine: Machine) -> dict[str, Any]:
    """Return the facts about machine and versions that belong to every figure."""
    nvcc = "/usr/local/cuda/bin/nvcc" if shutil.which("nvcc") is None else "nvcc"
    return {
        **machine.facts,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": sys.version.split()[0],
        "nvcc": output_of(nvcc, "--version", having="release"),
        "architectures": machine.archs,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "command": "make gpu-check",
    }


def counts_of_tests(out: Path) -> dict[str, int]:
    """Return the numbers of tests, failures, errors and skips of the GPU suite; empty if it did not finish."""
    try:
        suites = ElementTree.parse(out / "tests.xml").getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):  # a killed run leaves an incomplete file
        return {}
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, "0"))
    return counts


NO_TABLE = "no table:"
"""Beginning of the reason why a table could not be made."""


def tables(out: Path) -> str:
    """Return the tables of all figures in a folder."""
    made = {}
    for name in figures.TABLES:
        try:
            made[name] = figures.table(name, out)
        except Exception as error:  # a table must not stop the phases that follow
            made[name] = f"{NO_TABLE} {type(error).__name__}: {error}\n"
    return "\n".join(f"### {name}\n\n{table}" for name, table in made.items() if table)


@dataclass
class Report:
    """Results so far, which are written after each phase."""

    machine: Machine
    versions: dict[str, Any]
    phases: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Write the results with those of another phase."""
        self.phases.append(result)
        out = self.machine.out
        content = {
            "environment": self.versions,
            "phases": [vars(each) | {"seconds": round(each.seconds)} for each in self.phases],
            "tests": counts_of_tests(out),
        }
        (out / "results.json").write_text(json.dumps(content, indent=2) + "\n")
        logs = [f"==> {log.name} <==\n{log.read_text(errors='replace')}" for log in sorted(LOGS.glob("*.log"))]
        (out / "log.txt").write_text("\n".join(logs))
        (out / "figures.md").write_text(tables(out))


def main() -> int:
    """Run the phases, print their results, and return the exit status."""
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check").resolve()
    try:
        phases = chosen((os.environ.get("PHASES") or " ".join(STAGES)).split())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # A shell may start its background jobs with interrupts ignored, and commands would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for folder in (out, LOGS, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    for old in [*LOGS.glob("*.log"), *(out / name for name in ("results.json", "figures.md", "log.txt", "tests.xml"))]:
        old.unlink(missing_ok=True)
    facts = probe()
    if facts["gpu"] == "none":
        print("make gpu-check requires a GPU that torch can use, got none. Look at nvidia-smi", file=sys.stderr)
        return 2
    own = f"{facts['capability']}-real".replace("90-real", "90a-real")
    wheels = sorted(map(str, Path(os.environ["WHEELS"]).glob("*.whl"))) if os.environ.get("WHEELS") else []
    machine = Machine(facts, os.environ.get("ARCHS") or own, out, wheels)
    report = Report(machine, versions(machine))
    for phase in phases:
        print(f"== {phase.name}: about {phase.seconds} s, at most {phase.limit} s", flush=True)
        result = run_phase(phase, machine)
        report.add(result)
        print(f"== {phase.name}: {result.status}, {result.seconds:.0f} s", flush=True)
        if phase.name == "build" and result.status != "passed":
            break
    print((out / "figures.md").read_text())
    for each in report.phases:
        print(f"{each.name:20} {each.status:12} {each.seconds:4.0f} s of {each.limit} s")
    print(f"written: {out}")
    return int(any(each.status not in ("passed", "unsupported") for each in report.phases))


if __name__ == "__main__":
    sys.exit(main())
