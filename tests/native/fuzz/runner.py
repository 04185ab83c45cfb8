"""Runner of fuzz cases in children of a fork server, which finds the case that kills a child.

``python -m tests.native.fuzz --seed 7 --first 345 --cases 1 --show`` repeats one case.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.native.fuzz.signatures import Signature, host_functions, operators
from tests.native.fuzz.values import Values

CASES_PER_CHILD = 250
MEMORY_BYTES = 8 << 30
"""Bytes of address space that a child may map in addition to its server. A larger request raises an error."""
STILL_SECONDS = 120
"""Seconds without a new case after which a child counts as hanging."""


@dataclass(frozen=True)
class Crash:
    """Case that ended its process."""

    seed: int
    case: int
    status: str

    def __str__(self) -> str:
        command = f"python -m tests.native.fuzz --seed {self.seed} --first {self.case} --cases 1 --show"
        return f"case {self.case} of seed {self.seed}: {self.status}. Repeat it: {command}"


def run_case(signatures: Sequence[Signature], seed: int, case: int, show: bool = False) -> tuple[int, int]:
    """Run a few calls that share their values. Return the number of calls, and of calls that did not raise."""
    rng = random.Random(f"{seed}/{case}")
    values = Values(rng, signatures)
    # Most calls have one subject, so that results fit later arguments.
    room = rng.choice(sorted({signature.name.split(".")[0] + "." for signature in signatures}))
    own = [signature for signature in signatures if signature.name.startswith(room)]
    if room == "_host.":
        methods = {signature.receiver for signature in own}
        room += rng.choice(sorted(methods - {""}))  # one class, or classes that its methods take and return
        own += 8 * [signature for signature in own if signature.name.startswith(room)]
    else:
        own += 3 * [signature for signature in own if any(kind == "int" for _, kind in signature.arguments[:1])]
        own += 3 * [signature for signature in own if signature.makes_int]
    calls = rng.randrange(2, 9)
    passed = 0
    buckets = []
    for _ in range(calls):
        signature = rng.choice(own)
        if values.chance(0.15):
            values.change_a_tensor()
        for _ in range(rng.choice((1, 1, 10))):  # repeats calls with other arguments to pass the checks
            receivers = values.known(signature.receiver)
            if signature.receiver and not receivers:
                break
            positional, keywords = values.arguments(signature)
            if signature.receiver:
                positional.insert(0, rng.choice(receivers))
            if show:
                print(signature.name, positional, keywords, file=sys.stderr, flush=True)
            try:
                result = signature.function(*positional, **keywords)
            except Exception as error:
                if show:
                    print("   raised", type(error).__name__, str(error)[:200], file=sys.stderr, flush=True)
                continue
            passed += 1
            if signature.name == "torch.ops.flatout.make_bucket":
                buckets.append(result)
            values.keep(result)
            break
    del values
    for bucket in buckets:
        torch.ops.flatout.free_bucket(bucket)
    return calls, passed


def _child(signatures: Sequence[Signature], seed: int, cases: range, pipe: int) -> None:
    faulthandler.disable()  # the parent names the case
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    calls = passed = 0
    for case in cases:
        os.write(pipe, case.to_bytes(8, "little"))
        more, well = run_case(signatures, seed, case)
        calls, passed = calls + more, passed + well
    gc.collect()
    os.write(pipe, (1 << 63 | calls << 31 | passed).to_bytes(8, "little"))


def _fork(signatures: Sequence[Signature], seed: int, cases: range) -> tuple[str, int, int, int]:
    """Run cases in a child process.

    Returns:
        Failure ("" for none), last started case, number of calls, and number of calls that did not raise.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            _child(signatures, seed, cases, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    last, calls, passed, hangs = cases.start, 0, 0, False
    with os.fdopen(reading, "rb") as pipe:
        while True:
            if not select.select([pipe], [], [], STILL_SECONDS)[0]:
                hangs = True
                os.kill(child, signal.SIGKILL)
            word = pipe.read(8)
            if len(word) < 8:
                break
            number = int.from_bytes(word, "little")
            if number >> 63:
                calls, passed = number >> 31 & 0xFFFFFFFF, number & 0x7FFFFFFF
            else:
                last = number
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if hangs:
        return "hangs", last, 0, 0
    return ("" if code == 0 else signal.Signals(-code).name if code < 0 else f"exit status {code}"), last, calls, passed


def fuzz(signatures: Sequence[Signature], seed: int, first: int, cases: int) -> tuple[list[Crash], int, int]:
    """Run cases from ``first`` on. Return crashes, the number of calls, and the number of calls that did not raise."""
    crashes: list[Crash] = []
    calls = passed = 0
    start, end = first, first + cases
    while start < end:
        part = range(start, min(start + CASES_PER_CHILD, end))
        status, last, more, well = _fork(signatures, seed, part)
        calls, passed, start = calls + more, passed + well, part.stop
        if status:
            crashes.append(_one_by_one(signatures, seed, range(part.start, last + 1), status))
            print(crashes[-1], flush=True)
            start = last + 1
    return crashes, calls, passed


def _one_by_one(signatures: Sequence[Signature], seed: int, cases: range, status: str) -> Crash:
    """Return the case that crashes alone, or the last case if the crash needs the cases before."""
    for case in reversed(cases):
        alone = _fork(signatures, seed, range(case, case + 1))[0]
        if alone:
            return Crash(seed, case, alone)
    return Crash(seed, cases[-1], f"{status}, after cases {cases[0]} to {cases[-1]} only (--first, --cases)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--show", action="store_true", help="print every call, in this process")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signatures = operators() + host_functions()
    if options.show:
        for case in range(options.first, options.first + options.cases):
            run_case(signatures, options.seed, case, show=True)
        return 0
    began = time.monotonic()
    crashes, calls, passed = fuzz(signatures, options.seed, options.first, options.cases)
    took = time.monotonic() - began
    print(f"{options.cases} cases, {calls} calls, {passed} did not raise, {len(crashes)} crashes, {took:.0f} s")
    return 1 if crashes else 0
