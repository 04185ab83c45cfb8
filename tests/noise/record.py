"""Recorder of step times while other processes are busy.

    python -m tests.noise.record tests/noise/recordings.npz

Each recording is a float32 array of shape (updates, 3) of consecutive training steps of a perceptron: wall time and CPU
time in seconds, and the voluntary context switches of the training's thread. Its key names the step, the number
of intra-op threads and the number of busy processes: ``"5 ms, 1 thread, 4 busy"``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

BUSY = (0, 1, 2, 4, 8)
STEPS = {
    # name: (width of the perceptron, batch size, forwards and backwards per update, seconds to record, threads)
    "0.3 ms": (64, 40, 1, 4.0, (1,)),
    "5 ms": (256, 352, 1, 12.0, (1, 2)),
    "100 ms": (1024, 512, 1, 25.0, (1, 2)),
    "2 s": (1024, 512, 20, 60.0, (1,)),
}
MOST_UPDATES = 8000
FEWEST_UPDATES = 6


def update_of(width: int, batch: int, parts: int) -> Callable[[], None]:
    """Return one SGD update of a perceptron with three hidden layers."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))

    def update() -> None:
        for _ in range(parts):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def record(update: Callable[[], None], seconds: float) -> np.ndarray:
    """Return wall time, CPU time and voluntary context switches of consecutive updates, shape (updates, 3)."""
    for _ in range(2):
        update()
    readings = [_reading()]
    end = readings[0][0] + seconds
    while len(readings) <= FEWEST_UPDATES or (readings[-1][0] < end and len(readings) <= MOST_UPDATES):
        update()
        readings.append(_reading())
    return np.diff(readings, axis=0).astype(np.float32)


def _reading() -> tuple[float, float, int]:
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


SPIN = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
"""Program that keeps a core busy until its parent has ended for any reason."""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy inside the block. The processes end with this process at the latest."""
    command = [sys.executable, "-S", "-c", SPIN, str(os.getpid())]
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        time.sleep(1.0)  # the processes start, and the scheduler balances them
        yield


def main(path: str) -> None:
    """Record every step with every number of busy processes, and save the recordings."""
    recordings = {}
    for busy in BUSY:
        with busy_processes(busy):
            for name, (width, batch, parts, seconds, threads) in STEPS.items():
                for count in threads:
                    torch.set_num_threads(count)
                    times = record(update_of(width, batch, parts), seconds)
                    key = f"{name}, {count} thread{'s' * (count > 1)}, {busy} busy"
                    recordings[key] = times
                    low, middle = 1e3 * np.quantile(times, [0.05, 0.5], axis=0)
                    waits, load = times[:, 2].mean(), os.getloadavg()[0]
                    print(
                        f"{key:30} {len(times):5} updates, wall {low[0]:8.3f} / {middle[0]:8.3f} ms, "
                        f"CPU {low[1]:8.3f} / {middle[1]:8.3f} ms (5 % / median), "
                        f"{waits:.2f} switches per update, load {load:.1f}",
                        flush=True,
                    )
    np.savez_compressed(path, **recordings)


if __name__ == "__main__":
    main(sys.argv[1])
