"""Checks of data-parallel training on GPUs, which run on all ranks of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from flatout.techniques import REGISTRY, Measured
from tests.distributed import data_parallel_checks as checks
from tests.gpu.trace import traced

MEGABYTES = 32
"""Bytes that a sample takes in the forward of the check below."""


def memory_that_runs_out_is_recovered(rank: int) -> None:
    """Limit the memory of a rank, so that half of its batch fits."""
    reference, model = checks.net(), checks.net()
    expected = checks.whole_training(reference, "adamw", epochs=2)
    run = checks.optimized(model, checks.optimizer_of(model, "adamw"))
    device = torch.device("cuda", torch.cuda.current_device())

    def allocate(place: str, call: int, samples: int) -> None:
        if place == "forward":
            torch.empty(samples * MEGABYTES << 20, dtype=torch.uint8, device=device)

    model.fails = allocate
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (4 * MEGABYTES << 20)  # a batch has 6 samples for each rank
    if dist.get_rank() == rank:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = checks.trained(run, 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.micro_batch == 3
    checks.assert_same_training(model, reference, losses, expected)
    run.undo()


def cuda_graphs_are_refused() -> None:
    """Refuse to capture a step, because the ranks communicate on their hosts in the middle of a step."""
    model = checks.net()
    techniques = {t.name: False for t in REGISTRY if isinstance(t, Measured)}
    del techniques["cuda_graph"], techniques["fused_optimizer"]
    run = checks.optimized(model, checks.optimizer_of(model, "adamw"), techniques=techniques, budget=2.0)
    assert run.report.row("cuda_graph").status == "not applicable"
    run.undo()


def a_step_waits_for_no_gpu(weight: bool) -> None:
    """Train without a wait of the host for the device. A number of the host weights the loss."""
    model = checks.net()
    loss_weight = (lambda batch: float(len(batch[1]))) if weight else None
    run = checks.optimized(model, checks.optimizer_of(model, "flatout"), loss_weight=loss_weight)
    batches = [tuple(part.cuda() for part in batch) for batch in checks.slices()]
    for batch in 2 * batches:  # DDP waits for its timers in the first ten steps
        run.step(batch)
    assert traced(lambda: [run.step(batch) for batch in batches]).waits == []
    run.undo()


CASES: dict[str, Callable[[], None]] = {
    **{
        f"training: {kind}, accumulate {accumulate}, {unused or 'all'} used": partial(
            checks.trains_as_one_process, kind, accumulate, 0.05, unused, None
        )
        for kind in ("adamw", "flatout")
        for accumulate in (1, 3)
        for unused in ("", "always")
    },
    **{
        f"out of memory: {place}, rank {rank}, accumulate {accumulate}": partial(
            checks.out_of_memory_is_recovered, place, rank, 2, "", accumulate
        )
        for place in ("forward", "backward")
        for rank in (0, 1)
        for accumulate in (1, 2)
    },
    "out of memory: update": partial(checks.out_of_memory_in_the_update_is_recovered, "adamw", 1, 4),
    "out of memory: average": partial(checks.out_of_memory_before_the_average_is_recovered, 1, 1),
    "memory that runs out on rank 0": partial(memory_that_runs_out_is_recovered, 0),
    "memory that runs out on rank 1": partial(memory_that_runs_out_is_recovered, 1),
    "error in the forward": partial(checks.an_error_of_one_rank_ends_the_step_on_all, "forward", 6),
    "error in the backward": partial(checks.an_error_of_one_rank_ends_the_step_on_all, "backward", 6),
    "buffers": partial(checks.buffers_stay_equal, 1),
    "own loop": partial(checks.own_loop_equals_ddp, 2),
    "weights of the loss": partial(checks.a_loader_is_sliced, 65, True, "weighted"),
    "channels_last": checks.channels_last_is_kept,
    "CUDA graphs": cuda_graphs_are_refused,
}
"""Checks for any backend, by name."""


def case(name: str) -> None:
    """Run a check by its name, and verify that the check has used the GPU."""
    before = _allocations()
    CASES[name]()
    assert _allocations() > before


def _allocations() -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)
