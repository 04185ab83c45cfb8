"""Termination of a training in which one rank fails or is killed."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from tests.distributed.launch import IMPORTS, JOIN, plainly, torchrun

pytestmark = pytest.mark.slow

SECONDS = 20.0
"""Seconds from the failure to the end of the last process: 2 to 4 s on idle cores, but tests share cores.

Torchrun kills ranks that ignore SIGTERM after 30 s.
"""

ON_HOST = f"on host {socket.gethostname()}"

FAIL = """
def fail(error=ValueError("no such size")):
    tell(f"failed {time.time()}")
    raise error
"""

PLACES = {
    "others in a collective": """
if dist.get_rank() == 1:
    time.sleep(0.5)
    fail()
dist.all_reduce(torch.ones(1))
""",
    "others in an agreement": """
from flatout.distributed.agreement import GroupAgreement
ranks = GroupAgreement(process_group.control_group())
ranks.check()
if dist.get_rank() == 1:
    time.sleep(0.5)
    fail()
ranks.check()
""",
    # Replacement of NCCL, which does not notice the exit of a peer. During a collective, Python handles no signal.
    "others blocked": """
import ctypes, signal
signal.signal(signal.SIGTERM, lambda *_: None)
if dist.get_rank() == 1:
    time.sleep(0.5)
    fail()
while True:
    ctypes.CDLL(None).pause()
""",
    "in a loader": """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 8
    def __getitem__(self, place):
        if place == 4 and dist.get_rank() == 1:
            fail()
        return torch.ones(1)
for batch in DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
""",
    "in an agreed block": """
from flatout.distributed.agreement import GroupAgreement
ranks = GroupAgreement(process_group.control_group())
with ranks.attempt():
    if dist.get_rank() == 1:
        fail()
""",
}


def ranks_with_tracebacks(err: str) -> list[str]:
    """Return the ranks whose errors are shown, in order of time. Torch puts the rank before each line."""
    return list(dict.fromkeys(re.findall(r"^\[rank(\d)\]: Traceback \(most", err, re.MULTILINE)))


def lines_of_flatout(err: str) -> list[str]:
    return re.findall(r"^flatout: (.*)", err, re.MULTILINE)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("launch", [plainly, torchrun])
def test_all_ranks_end_and_the_failed_one_is_named(launch, place: str) -> None:
    ended = launch(JOIN + FAIL + PLACES[place])
    assert all(ended.status)
    assert ended.seconds_since("failed") < SECONDS
    assert ranks_with_tracebacks(ended.err) == ["1"]
    # torchrun may end the other rank by SIGTERM before this rank writes its line.
    assert len(lines_of_flatout(ended.err)) == 1 or (launch is torchrun and lines_of_flatout(ended.err) == [])
    for line in lines_of_flatout(ended.err):
        assert line.startswith(f"rank 0 ends: rank 1 {ON_HOST} failed: ")
        assert "ValueError: no such size" in line or "ValueError" not in PLACES[place]
    if launch is torchrun:
        assert "no such size" in ended.err.split("Root Cause")[1]


def test_all_ranks_that_fail_alike_show_their_errors() -> None:
    ended = plainly(JOIN + FAIL + "fail()")
    assert ended.status == [1, 1]
    assert sorted(ranks_with_tracebacks(ended.err)) == ["0", "1"]


def test_a_failure_of_the_rank_that_keeps_the_store_is_named() -> None:
    looks_rarely = """
import atexit, os
atexit.register(os._exit, 1)  # handlers run in reverse order: this one right after flatout's
from flatout.distributed import failures
failures._INTERVAL, failures._PATIENCE = 2.0, 4.0
"""
    ended = plainly(looks_rarely + JOIN + FAIL + PLACES["others blocked"].replace("== 1", "== 0"))
    assert ended.status == [1, 1]
    assert ended.seconds_since("failed") < SECONDS
    assert ranks_with_tracebacks(ended.err) == ["0"]
    assert lines_of_flatout(ended.err) == [f"rank 1 ends: rank 0 {ON_HOST} failed: ValueError: no such size"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named(lost: int) -> None:
    kill = f"""
if dist.get_rank() == {lost}:
    time.sleep(1)
    tell(f"failed {{time.time()}}")
    os.kill(os.getpid(), 9)
while True:
    dist.all_reduce(torch.ones(1))
"""
    ended = plainly(JOIN + kill, ranks=3)
    assert ended.seconds_since("failed") < SECONDS
    assert ended.status[lost] == -signal.SIGKILL
    assert all(ended.status)
    named = {re.search(r"ends: rank (\d) on host", line)[1] for line in lines_of_flatout(ended.err)}  # type: ignore[index]
    assert named == {str(lost)}


def test_a_rank_without_memory_for_zeros_ends_all() -> None:
    """Fail in a forward whose all-reduces the rank cannot complete. The other rank waits for these all-reduces."""
    fails = """
import flatout
class Fails(torch.nn.Linear):
    def forward(self, x):
        if dist.get_rank() == 1:
            tell(f"failed {time.time()}")
            raise torch.OutOfMemoryError("planned")
        return super().forward(x)
def no_memory(reducer):
    raise torch.OutOfMemoryError("no memory for zeros")
dist.Reducer._get_zeros_like_grad_buckets = no_memory
model = Fails(4, 2)
optimizer = torch.optim.SGD(model.parameters())
batches = [(torch.ones(4, 4), torch.ones(4, 2))]
run = flatout.optimize(model, batches, optimizer, torch.nn.functional.mse_loss, budget=0, plan=None)
run.step(next(iter(run.loader)))
"""
    ended = plainly(JOIN + fails)
    assert ended.status == [1, 1]
    assert ended.seconds_since("failed") < SECONDS
    assert ranks_with_tracebacks(ended.err) == ["1"]


def test_torchrun_names_a_killed_rank() -> None:
    kill = """
if dist.get_rank() == 1:
    tell(f"failed {time.time()}")
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(1))
"""
    ended = torchrun(JOIN + kill)
    assert ended.status == [1]
    assert ended.seconds_since("failed") < SECONDS
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", ended.err.split("Root Cause")[1])


def test_the_first_rank_shows_a_traceback_of_another_host() -> None:
    hosts = "import os, socket\nsocket.gethostname = lambda: 'host' + os.environ['RANK']\n"
    ended = plainly(hosts + JOIN + FAIL + PLACES["others blocked"])
    (line,) = lines_of_flatout(ended.err)
    assert line == "rank 0 ends: rank 1 on host host1 failed: ValueError: no such size"
    assert re.search(r"^Traceback \(most(?:.|\n)* in fail\n(?:.|\n)*^ValueError: no such size", ended.err, re.MULTILINE)


def test_a_scripts_hooks_are_called_and_tracebacks_come_first() -> None:
    before = """
import sys, time
def before(kind, *error):
    time.sleep(3)
    print("before", kind.__name__, file=sys.stderr)
sys.excepthook = before
"""
    after = """
hook = sys.excepthook
def after(kind, *error):
    print("after", kind.__name__, file=sys.stderr)
    hook(kind, *error)
sys.excepthook = after
"""
    ended = plainly(before + JOIN + after + FAIL + PLACES["others blocked"])
    lines = ended.err.splitlines()
    assert lines[:2] == ["after ValueError", "[rank1]: before ValueError"]
    assert lines[2:] == [f"flatout: rank 0 ends: rank 1 {ON_HOST} failed: ValueError: no such size"]


@pytest.mark.parametrize(("ending", "status"), [("KeyboardInterrupt()", -signal.SIGINT), ("SystemExit(3)", 3)])
def test_interrupts_and_exits_are_no_failures(ending: str, status: int) -> None:
    script = f"""
if dist.get_rank() == 1:
    fail({ending})
time.sleep(2.5)
tell("rank 0 goes on")
"""
    ended = plainly(JOIN + FAIL + script)
    assert ended.status == [0, status]
    assert ended.out[1:] == ["rank 0 goes on"]
    assert lines_of_flatout(ended.err) == []


OWN_GROUP = """
dist.init_process_group("gloo")
hook = sys.excepthook
process_group.control_group()
"""


def test_a_scripts_own_group_is_monitored() -> None:
    ended = plainly(IMPORTS + OWN_GROUP + FAIL + PLACES["others blocked"])
    assert ended.status == [1, 1]
    assert ended.seconds_since("failed") < SECONDS
    assert len(lines_of_flatout(ended.err)) == 1


def test_a_failure_after_the_end_of_a_scripts_own_group_is_of_one_rank() -> None:
    after = """
dist.destroy_process_group()
if dist.get_rank_before:
    fail()
time.sleep(2.5)
assert sys.excepthook is hook
"""
    script = IMPORTS + OWN_GROUP + "dist.get_rank_before = dist.get_rank()\n" + FAIL + after
    ended = plainly(script)
    assert ended.status == [0, 1]
    assert lines_of_flatout(ended.err) == []


def test_a_forked_child_is_not_the_rank() -> None:
    fork = """
if dist.get_rank() == 1:
    child = os.fork()
    if child == 0:
        fail()
    tell(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
time.sleep(2)
total = torch.ones(1)
dist.all_reduce(total)
"""
    ended = plainly(JOIN + FAIL + fork)
    assert ended.status == [0, 0]
    assert "child 1" in ended.out
    assert lines_of_flatout(ended.err) == []


def test_a_group_that_does_not_close_cannot_keep_a_failed_rank() -> None:
    hangs = "dist.destroy_process_group = lambda: time.sleep(50)\n"
    ended = plainly(JOIN + hangs + FAIL + PLACES["others in a collective"])
    assert ended.status == [1, 1]
    assert ended.seconds_since("failed") < SECONDS
