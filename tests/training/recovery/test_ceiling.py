"""Training under a real limit of address space."""

import subprocess
import sys
import textwrap

import pytest

CEILING = """
    import resource, sys, warnings
    import torch
    from torch import nn
    from torch.nn import functional
    import flatout

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # What a forward keeps for the backward: 24 x 8192 x 128 doubles, 201 MB.
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.Tanh())]).double()
    x, y = torch.randn(24576, 128, dtype=torch.float64), torch.randn(24576, 128, dtype=torch.float64)
    batches = list(zip(x.split(8192), y.split(8192)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    techniques = {"compile": False, "precision": False, "fused_optimizer": True}
    run = flatout.optimize(model, [(x[:8], y[:8])], optimizer, functional.mse_loss, techniques=techniques, budget=0)
    run.step((x[:64], y[:64]))
    if sys.argv[1] == "limited":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [float(run.step(batch)) for batch in batches]
    warned = [w for w in caught if w.category is RuntimeWarning and "8192" in str(w.message)]
    print(run.micro_batch, len(warned), *[repr(float(p.sum())) for p in model.parameters()], *map(repr, losses))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux alone")
def test_a_real_ceiling():
    told = {}
    for name in ("limited", "free"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CEILING), name], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        micro_batch, warned, *numbers = done.stdout.split()
        told[name] = list(map(float, numbers))
        if name == "free":
            assert (micro_batch, warned) == ("None", "0")
        else:
            assert int(micro_batch) < 8192
            assert int(warned) >= 1
    assert told["limited"] == pytest.approx(told["free"], rel=1e-8, abs=1e-10)
