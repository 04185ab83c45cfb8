"""Updates of benchmarks/kernel_times.py.

``ncu --profile-from-start off python -m support.kernel_cases`` runs each once between the marks of a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from support import contenders as c
from support.scale import scaled

CASES: dict[str, Callable[[c.Problem], c.Contender]] = {
    "float32": c.flatout("flatout", 32),
    "bfloat16": c.flatout_bf16("flatout", 16, c.MAX_NORM),
    "bfloat16, float32 moments": c.flatout_bf16("flatout", 24, c.MAX_NORM, moment_dtype=torch.float32),
    "bfloat16, remainder": c.flatout("flatout", 28, torch.bfloat16, master_weights="remainder"),
    "bfloat16, float32 masters": c.flatout("flatout", 30, torch.bfloat16, master_weights="float32"),
    "bfloat16, stochastic": c.flatout_bf16("flatout", 16, c.MAX_NORM, stochastic_rounding=True),
    "float32, 8-bit moments": c.flatout("flatout", 20, moment_dtype=torch.uint8),
    "float32, average": c.flatout("flatout", 40, ema_decay=0.999),
}
"""Clipped updates with the bytes that they move per parameter. Each begins with the check of the gradients."""


def prepared() -> Iterator[tuple[str, c.Problem, c.Contender]]:
    """Yield the cases with new gradients after a warm-up. The memory of a case is freed before the next one."""
    for name, make in CASES.items():
        problem = c.Problem([scaled(124_000_000, 40_000)], "cuda")
        contender = make(problem)
        c.warm_up(contender, problem)
        problem.fresh_gradients(contender.params)
        torch.cuda.synchronize()
        yield name, problem, contender
        del problem, contender
        torch.cuda.empty_cache()


def main() -> None:
    """Run each update once between the marks."""
    for _, _, contender in prepared():
        torch.cuda.profiler.start()
        contender.update()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
