"""Trainings of several libraries on all ranks of one process group, in turns.

    torchrun --standalone --nproc-per-node=2 -m support.rank_process JOB FILE PLAN ROUNDS SECONDS BUDGET

Rank 0 writes the samples per second of all ranks in each round, and the last losses, to FILE. A turn has the same
number of steps for every training. The time of a turn is that of its slowest rank. All ranks draw the order within a
round from the same seed. Each training has separate backend flags and random numbers.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support import data_parallel_loops as loops
from support.data_parallel_jobs import JOBS
from torch import Tensor

from flatout.core.snapshot import Snapshot

CHECKED = 20
"""Steps before the turns, after which all trainings must have the same loss."""

LEAD = 10
"""Number of timed steps for which one untimed step warms up."""

BATCHES = 8


class Lane:
    """Training on this rank.

    Args:
        step: function that trains on a batch.
        batches: batches of this rank, on its device.
    """

    def __init__(self, step: loops.Step, batches: list[loops.Batch]) -> None:
        self._step, self._batches = step, batches
        self._state = Snapshot.capture([])
        self._taken = 0

    def train(self, steps: int) -> tuple[Tensor, float]:
        """Train on all ranks, and return the last loss (mean over the ranks) and the seconds of the slowest rank."""
        self._state.restore()
        device = self._batches[0][0].device
        _wait(device)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            loss = self._step(self._batches[self._taken % BATCHES])
            self._taken += 1
        _wait(device)
        took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64, device=device)
        self._state = Snapshot.capture([])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        mean = loss.double().to(device)
        dist.all_reduce(mean)
        return mean.cpu() / dist.get_world_size(), took.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lanes_of(name: str, device: torch.device, plan: Path, budget: float) -> dict[str, Lane]:
    """Make the trainings of a job, with equal weights and equal batches."""
    factor = 1 if device.type == "cpu" else 4
    torch.manual_seed(0)
    model = JOBS[name].model(factor).to(device)
    whole = [tuple(part.to(device) for part in JOBS[name].batch(factor)) for _ in range(BATCHES)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [tuple(part.chunk(ranks)[rank] for part in batch) for batch in whole]
    steps = {
        "torch DDP": loops.ddp,
        "accelerate": loops.accelerated,
        "Lightning Fabric": loops.fabric,
        "flatout": loops.untuned,
        "flatout tuned": lambda model, loader: loops.tuned(model, loader, plan, budget),
    }
    return {lane: Lane(make(copy.deepcopy(model), whole), own) for lane, make in steps.items()}


def assert_same(losses: dict[str, Tensor], tolerance: float) -> None:
    """Check that all trainings have equal losses. The tuned training may compute in 16 bits."""
    for lane, loss in losses.items():
        allowed = 0.05 if lane == "flatout tuned" else tolerance
        torch.testing.assert_close(
            loss, losses["torch DDP"], rtol=allowed, atol=0.0, msg=lambda told, lane=lane: f"{lane}: {told}"
        )


def main(name: str, file: Path, plan: Path, rounds: int, seconds: float, budget: float) -> None:
    """Make the trainings, check them, and let them take turns of about ``seconds`` seconds."""
    on_gpu = torch.cuda.is_available()
    rank = int(dist.get_node_local_rank()) if on_gpu else 0
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    lanes = lanes_of(name, device, plan, budget)
    assert_same({lane: each.train(CHECKED)[0] for lane, each in lanes.items()}, 1e-5)
    paces = {lane: each.train(CHECKED)[1] / CHECKED for lane, each in lanes.items()}
    # The pace is that of the slowest rank, so all ranks take the same number of steps.
    steps = max(10, round(seconds / paces["torch DDP"]))
    took: dict[str, list[float]] = {lane: [] for lane in lanes}
    order, losses = random.Random(0), {}
    for _ in range(rounds):
        for lane in order.sample(list(lanes), len(lanes)):
            lanes[lane].train(-(-steps // LEAD))
            losses[lane], one = lanes[lane].train(steps)
            took[lane].append(one)
    assert_same(losses, 1e-3)
    if dist.get_rank() == 0:
        samples = steps * len(lanes["flatout"]._batches[0][0]) * dist.get_world_size()
        rates = {lane: [samples / each for each in times] for lane, times in took.items()}
        file.write_text(
            json.dumps({"rates": rates, "steps": steps, "losses": {lane: loss.item() for lane, loss in losses.items()}})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
