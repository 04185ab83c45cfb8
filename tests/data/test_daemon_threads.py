"""A daemon thread within ``next`` when the interpreter ends."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import threading
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from flatout.data import InMemoryLoader, Prefetcher

    data = TensorDataset(torch.zeros(2048, 1024), torch.arange(2048))
    loader = {wrap}
    started = threading.Event()

    def iterate():
        while True:
            for _ in loader:
                started.set()

    threading.Thread(target=iterate, daemon=True).start()
    started.wait()
"""


@pytest.mark.parametrize(
    "wrap",
    ["InMemoryLoader(DataLoader(data, 256))", "Prefetcher(InMemoryLoader(DataLoader(data, 256)), 'cpu')"],
    ids=["in memory", "prefetcher"],
)
def test_a_daemon_thread_within_next_does_not_abort_the_process(wrap):
    script = textwrap.dedent(SCRIPT.format(wrap=wrap))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
