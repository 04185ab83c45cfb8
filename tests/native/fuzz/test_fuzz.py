"""Random calls of the native core, which must not crash the process.

``FLATOUT_FUZZ_CASES=10000`` runs more cases, and ``FLATOUT_FUZZ_SEED`` chooses other cases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.fuzz.runner import fuzz
from tests.native.fuzz.signatures import Signature, host_functions, operators, undeclared

CASES = int(os.environ.get("FLATOUT_FUZZ_CASES", "1500"))
SEED = os.environ.get("FLATOUT_FUZZ_SEED", "0")
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_no_call_crashes() -> None:
    # A separate process, because children are forked and this process has run parallel regions.
    command = [sys.executable, "-m", "tests.native.fuzz", "--seed", SEED, "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_everything_public_is_fuzzed() -> None:
    assert undeclared() == []
    named = {signature.name for signature in operators()}
    assert {"torch.ops.flatout.step_bucket_", "torch.ops.flatout.set_grads", "torch.ops.flatout.scale_"} <= named
    assert {"_host.Stager.copy", "_host.StepCounter.mark"} <= {signature.name for signature in host_functions()}


def test_a_crash_is_found_and_named() -> None:
    def crash(number: int) -> None:
        if number == 7:
            os.kill(os.getpid(), signal.SIGSEGV)

    crashes, _, _ = fuzz([Signature("torch.ops.flatout.crash", (("number", "int"),), crash)], 0, 0, 60)
    assert crashes
    assert {found.status for found in crashes} == {"SIGSEGV"}
    again, _, _ = fuzz([Signature("torch.ops.flatout.crash", (("number", "int"),), crash)], 0, crashes[0].case, 1)
    assert again == crashes[:1]
