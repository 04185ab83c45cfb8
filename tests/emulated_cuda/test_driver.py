"""Fallback to torch's operations if the driver is too old for flatout's kernels."""

from __future__ import annotations

import json
from typing import Any

from tests.emulated_cuda.record import needs_emulated_devices
from tests.helpers import run_script

pytestmark = needs_emulated_devices

SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from flatout import native
    from flatout.cli import diagnosis
    from flatout.data import Prefetcher
    from flatout.optim import SGD

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = [native.has_cuda_kernels() for _ in range(2)]
    x = torch.ones(3, device=device, requires_grad=True)
    optimizer = SGD([x], lr=0.5)
    for batch in Prefetcher([torch.ones(3)] * 2, device):
        (x * batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [[f.name, f.verdict, f.found, f.fix] for f in diagnosis.examine() if f.topic == "GPU"]
ours = [str(w.message) for w in caught if w.category is RuntimeWarning and "flatout" in str(w.message)]
print(json.dumps({"device": device, "kernels": kernels, "x": x.tolist(), "warnings": ours, "found": found}))
"""


def process(driver: int, runtime: int) -> dict[str, Any]:
    """Train in a new process with these versions of CUDA, and return the report of the process."""
    ended = run_script(SCRIPT, EMULATED_CUDA_DRIVER=str(driver), EMULATED_CUDA_RUNTIME=str(runtime))
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert report["x"] == [0.0, 0.0, 0.0]
    return report


def test_a_driver_that_is_just_new_enough() -> None:
    report = process(12010, 12080)
    assert (report["device"], report["kernels"], report["warnings"]) == ("cuda", [True, True], [])
    assert all(verdict == "good" for name, verdict, *_ in report["found"] if name.endswith(("driver", "kernels")))


def test_a_driver_for_torch_and_not_for_the_kernels() -> None:
    report = process(12000, 12080)
    assert (report["device"], report["kernels"]) == ("cuda", [False, False])
    (warning,) = report["warnings"]
    ((verdict, found, fix),) = (rest for name, *rest in report["found"] if name == "driver")
    assert verdict == "slow"
    for text in (warning, found + fix):
        assert all(version in text for version in ("12.0", "12.8", "12.1"))


def test_a_driver_for_neither() -> None:
    report = process(12000, 13000)
    assert (report["device"], report["kernels"]) == ("cpu", [False, False])
    (warning,) = report["warnings"]
    assert all(version in warning for version in ("12.0", "13.0"))
