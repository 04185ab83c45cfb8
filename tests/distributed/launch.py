"""Scripts on several ranks: under torchrun, or as processes that have only the variables of torch's convention."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 180.0
"""Seconds after which a launch fails."""

IMPORTS = """
import os, sys, time, torch, torch.distributed as dist
from flatout.distributed import process_group

def tell(line):  # at once, and not mixed with the lines of other ranks
    os.write(1, (line + chr(10)).encode())
"""
"""Beginning of a script."""

JOIN = (
    IMPORTS
    + """
if process_group.is_launched():
    process_group.join(process_group.local_device())
"""
)
"""Beginning of a script whose ranks form flatout's group."""

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    """Result of a launch.

    Attributes:
        status: exit status of each process: of torchrun alone, or of the ranks.
        out: lines that the ranks have written to standard output, in any order.
        err: standard error of all processes, in the order of time.
        end: ``time.time()`` when the last process has ended.
    """

    status: list[int]
    out: list[str]
    err: str
    end: float

    def seconds_since(self, mark: str) -> float:
        """Return the seconds from the last line ``MARK TIME`` of standard output to the end."""
        times = [float(line.split()[1]) for line in self.out if line.startswith(f"{mark} ")]
        return self.end - max(times)


def torchrun(
    script: str, *arguments: str, options: tuple[str, ...] = (), ranks: int = 2, limit: float = LIMIT, **variables: str
) -> Ended:
    """Run Python code on several ranks of one machine, and fail after ``limit`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(script)
        return _ended(
            [_torchrun(ranks, *options, str(file), *arguments)],
            [{**variables, "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1")}],
            limit,
        )


def torchrun_module(*command: str, ranks: int = 2, limit: float = LIMIT, **variables: str) -> Ended:
    """Run ``python -m`` and a module, or a script if the first word is empty, on several ranks of one machine."""
    module = ("-m", command[0]) if command[0] else ()
    environment = {"OMP_NUM_THREADS": "1", **variables}
    return _ended([_torchrun(ranks, *module, *command[1:])], [environment], limit)


def plainly(script: str, *, ranks: int = 2, **variables: str) -> Ended:
    """Run Python code on several ranks without an agent, as ``srun`` and ``mpirun`` do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environments = [{**common, "RANK": str(rank), **variables} for rank in range(ranks)]
    return _ended([[sys.executable, "-c", script]] * ranks, environments)


def alone(script: str, *arguments: str, **variables: str) -> Ended:
    """Run Python code in one process without variables of a launcher."""
    return _ended([[sys.executable, "-c", script, *arguments]], [variables])


def _torchrun(ranks: int, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", f"--nproc-per-node={ranks}", *arguments),
    ]


def _ended(commands: list[list[str]], variables: list[dict[str, str]], limit: float = LIMIT) -> Ended:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env={**inherited, **added}, stdout=out, stderr=err, start_new_session=True
            )
            for command, added in zip(commands, variables, strict=True)
        ]
        deadline = time.monotonic() + limit
        try:
            status = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
            end = time.time()
        except subprocess.TimeoutExpired:
            err.seek(0)
            raise AssertionError(f"not ended after {limit:.0f} s:\n{err.read()[-8000:]}") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read().splitlines(), err.read(), end)
