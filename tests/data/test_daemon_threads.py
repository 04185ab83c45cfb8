"""Daemon threads inside ``next`` at interpreter exit."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import threading
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from flatout.data import InMemoryLoader, Prefetcher

    data = TensorDataset(torch.zeros(1 << 20, 1))  # most of the time goes into torch.randperm, within next
    loader = {wrap}
    started = threading.Event()
    kept = []  # a tensor that is freed outside of next asks for the GIL inside torch, too

    def iterate():
        while True:
            for batch in loader:
                kept.append(batch)
                started.set()

    threading.Thread(target=iterate, daemon=True).start()
    started.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        "InMemoryLoader(DataLoader(data, 1 << 19, shuffle=True))",
        "Prefetcher(InMemoryLoader(DataLoader(data, 1 << 19, shuffle=True)), 'cpu')",
    ],
    ids=["in memory", "prefetcher"],
)
def test_a_daemon_thread_within_next_does_not_abort_the_process(wrap):
    script = textwrap.dedent(SCRIPT.format(wrap=wrap))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
