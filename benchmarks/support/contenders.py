"""Contenders of benchmarks/update_path.py. Each runs whole updates, from a scaled gradient to a stepped parameter.

An update consists of all operations between ``backward`` and ``zero_grad``: unscale, check for infinities, clip the
global norm to 1 (except in ``PLAIN``), run AdamW, and update the scale. The updates of ``PURE_BF16`` only run AdamW.
Each contender uses the calls that users write, with the fastest flags.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flatout.amp as fa
import flatout.optim as fo

LR = 1e-3
SCALE = 1024.0
MAX_NORM = 1.0
NORM = 2.0
"""Norm of the unscaled gradients. The clip halves them, so that it has an effect."""


@dataclass
class Problem:
    """Parameters and gradients of the same sizes, which are equal for all contenders.

    Attributes:
        sizes: number of elements of each parameter.
        device: "cpu" or "cuda".
        no_decay_below: parameters with fewer elements are a second group, which has no weight decay.
    """

    sizes: list[int]
    device: str
    no_decay_below: int = 0
    gradients: dict[torch.dtype, tuple[list[Tensor], list[list[Tensor]]]] = field(default_factory=dict)
    turn: int = 0

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def _values(self, seed: int, scale: float) -> list[Tensor]:
        """Return normal values that bfloat16 can represent, so that all dtypes start with equal numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = (torch.randn(n, device=self.device, generator=generator).mul_(scale) for n in self.sizes)
        return [values.bfloat16().float() for values in made]

    def parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(values.to(dtype)) for values in self._values(0, 0.02)]

    def groups(self, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Return the groups of parameters for an optimizer."""
        small = [p for p in params if p.numel() < self.no_decay_below]
        large = [p for p in params if p.numel() >= self.no_decay_below]
        return [{"params": large}, *([{"params": small, "weight_decay": 0.0}] if small else [])]

    def fresh_gradients(self, params: list[torch.nn.Parameter]) -> None:
        """Set scaled gradients, in other tensors than the last time, as a ``backward`` after ``zero_grad`` does."""
        dtype = params[0].dtype
        if dtype not in self.gradients:
            values = self._values(1, SCALE * NORM / self.total**0.5)
            source = [v.to(dtype) for v in values]
            self.gradients[dtype] = source, [[torch.empty_like(v) for v in source] for _ in range(2)]
        source, sets = self.gradients[dtype]
        self.turn += 1
        grads = sets[self.turn % 2]
        torch._foreach_copy_(grads, source)
        for p, g in zip(params, grads, strict=True):
            p.grad = g


@dataclass
class Contender:
    name: str
    params: list[torch.nn.Parameter]
    update: Callable[[], object]
    bytes_per_param: float | None
    """DRAM traffic of one update, counted from its passes; None if unknown."""
    exact: bool = True
    """True if the results must equal those of torch."""
    rounds_gradients: bool = False
    """True if the clip writes 16-bit gradients before the step, so that others differ by one more rounding."""


def _scaler(make: Any, device: str) -> Any:
    scaler = make(device, init_scale=SCALE, growth_interval=1 << 30)
    scaler.scale(torch.zeros((), device=device))  # creates the tensor of the scale
    return scaler


def _eager(optimizer: Any, params: list[Any], scaler: Any, clip: Callable[..., Tensor]) -> Callable[[], None]:
    def update() -> None:
        scaler.unscale_(optimizer)
        clip(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return update


def plain(optimizer: Any, make_scaler: Any, device: str, **options: float) -> Callable[[], None]:
    """Return an update that unscales, checks and steps, without clipping."""
    scaler = _scaler(make_scaler, device)

    def update() -> None:
        scaler.step(optimizer, **options)
        scaler.update()

    return update


def torch_eager(optimizer: Any, params: list[Any], device: str) -> Callable[[], None]:
    scaler = _scaler(torch.amp.GradScaler, device)
    return _eager(optimizer, params, scaler, lambda p, n: torch.nn.utils.clip_grad_norm_(p, n, foreach=True))


def flatout_eager(optimizer: Any, params: list[Any], device: str) -> Callable[[], None]:
    return _eager(optimizer, params, _scaler(fa.GradScaler, device), fa.clip_grad_norm_)


def flatout_lazy(optimizer: Any, device: str) -> Callable[[], None]:
    scaler = _scaler(fa.GradScaler, device)

    def update() -> None:
        scaler.step(optimizer, max_grad_norm=MAX_NORM)
        scaler.update()

    return update


# ---- torch and flatout -------------------------------------------------------------------------------------


def torch_fused(problem: Problem) -> Contender:
    """Make torch's fused AdamW: unscale reads and writes g (8 bytes), the norm reads g (4), the clip 8, the step 28."""
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(problem.groups(params), lr=LR, fused=True)
    return Contender("torch fused", params, torch_eager(optimizer, params, problem.device), 48)


def torch_foreach(problem: Problem) -> Contender:
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(problem.groups(params), lr=LR, foreach=True)
    return Contender("torch foreach", params, torch_eager(optimizer, params, problem.device), 100)


def torch_fused_and_cast(problem: Problem) -> Contender:
    """Make ``torch_fused`` with autocast's casts of all weights in a forward pass: 4 bytes read, 2 written."""
    contender = torch_fused(problem)
    step, contender.name, contender.bytes_per_param = contender.update, "torch fused + cast", 54

    def update() -> None:
        step()
        for p in contender.params:
            p.detach().to(torch.bfloat16)

    contender.update = update
    return contender


def flatout(
    name: str, bytes_per_param: float, dtype: torch.dtype = torch.float32, *, lazy: bool = True, exact: bool = True,
    **additions: Any,
) -> Callable[[Problem], Contender]:  # fmt: skip
    def make(problem: Problem) -> Contender:
        params = problem.parameters(dtype)
        optimizer = fo.AdamW(problem.groups(params), lr=LR, **additions)
        device = problem.device
        update = flatout_lazy(optimizer, device) if lazy else flatout_eager(optimizer, params, device)
        return Contender(name, params, update, bytes_per_param, exact)

    return make


def torch_fused_plain(problem: Problem) -> Contender:
    """Make a fused AdamW without clip: the check reads and writes g (8), the step reads and writes p, g, m, v (32)."""
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(problem.groups(params), lr=LR, fused=True)
    return Contender("torch fused", params, plain(optimizer, torch.amp.GradScaler, problem.device), 40)


def flatout_plain(name: str, bytes_per_param: float, **options: float) -> Callable[[Problem], Contender]:
    def make(problem: Problem) -> Contender:
        params = problem.parameters(torch.float32)
        update = plain(fo.AdamW(problem.groups(params), lr=LR), fa.GradScaler, problem.device, **options)
        return Contender(name, params, update, bytes_per_param)

    return make


def torch_fused_bf16(problem: Problem) -> Contender:
    """Make torch's fused AdamW in bfloat16: p, g, m, v are read (8), p, m, v are written (6)."""
    params = problem.parameters(torch.bfloat16)
    return Contender("torch fused", params, torch.optim.AdamW(problem.groups(params), lr=LR, fused=True).step, 14)


def torch_fused_bf16_clipped(problem: Problem) -> Contender:
    """Make ``torch_fused_bf16`` after a clip: the norm reads g (2), the clip reads and writes g (4)."""
    contender = torch_fused_bf16(problem)
    step, contender.bytes_per_param, contender.rounds_gradients = contender.update, 20, True

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(contender.params, MAX_NORM, foreach=True)
        step()

    contender.update = update
    return contender


def flatout_bf16(
    name: str, bytes_per_param: float, max_norm: float | None = None, *, exact: bool = True, **additions: Any
) -> Callable[[Problem], Contender]:
    """Make flatout's AdamW on weights and gradients in bfloat16, without a gradient scaler."""

    def make(problem: Problem) -> Contender:
        params = problem.parameters(torch.bfloat16)
        optimizer = fo.AdamW(problem.groups(params), lr=LR, **additions)
        step = optimizer.step if max_norm is None else partial(fo.update, optimizer, max_grad_norm=max_norm)
        return Contender(name, params, step, bytes_per_param, exact)

    return make


# ---- other libraries, if they are installed ----------------------------------------------------------------


class Missing(Exception):
    """Reason why a contender does not take part."""


def peer(
    name: str, module: str, make: Callable[[Any, list[Any]], Any], bytes_per_param: float | None, *,
    only_on: str = "", exact: bool = True,
) -> Callable[[Problem], Contender]:  # fmt: skip
    def build(problem: Problem) -> Contender:
        if only_on and problem.device != only_on:
            raise Missing(f"{name}: only on {only_on}")
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
            raise Missing(f"{name}: {'not installed' if missing else error}") from error
        try:
            params = problem.parameters(torch.float32)
            optimizer = make(library, problem.groups(params))
        except Exception as error:  # an error of the library must not stop the others
            raise Missing(f"{name}: {type(error).__name__}: {error}") from error
        return Contender(name, params, torch_eager(optimizer, params, problem.device), bytes_per_param, exact)

    return build


def flatout_replayed(problem: Problem) -> Contender:
    """Make a replay of the lazy update as a CUDA graph, which reads gradients at fixed addresses."""
    if problem.device != "cuda":
        raise Missing("flatout lazy, replayed: only on cuda")
    contender = flatout("flatout lazy, replayed", 32, exact=False, capturable=True)(problem)
    warm_up(contender, problem)  # creates the state, so the parameters have more updates than those of others
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        contender.update()
    contender.update = graph.replay
    return contender


FP32 = [
    torch_fused,
    torch_foreach,
    # The check reads g (4), the step reads p, g, m, v and writes p, m, v.
    flatout("flatout lazy", 32),
    # One pass unscales, checks and measures (8), the clip reads and writes (8), the step 28.
    flatout("flatout eager", 44, lazy=False),
    flatout_replayed,
    # The lazy update with moments of a byte each. The absmax of each 256 moments is not counted.
    flatout("flatout, 8-bit moments", 20, exact=False, moment_dtype=torch.uint8),
    # torch's unscale and clip (20) precede the step. 8-bit moments are a byte each, read and written.
    peer("bitsandbytes AdamW32bit", "bitsandbytes.optim", lambda m, p: m.AdamW32bit(p, lr=LR), 48),
    peer("bitsandbytes AdamW8bit", "bitsandbytes.optim", lambda m, p: m.AdamW8bit(p, lr=LR), 36, exact=False),
    peer("torchao AdamW8bit", "torchao.optim", lambda m, p: m.AdamW8bit(p, lr=LR), 36, exact=False),
    peer(
        "apex FusedAdam", "apex.optimizers",
        lambda m, p: m.FusedAdam(p, lr=LR, weight_decay=1e-2), 48, only_on="cuda",
    ),
    peer(
        "TransformerEngine FusedAdam", "transformer_engine.pytorch.optimizers",
        lambda m, p: m.FusedAdam(p, lr=LR, weight_decay=1e-2), 48, only_on="cuda",
    ),
    peer("flashoptim FlashAdamW", "flashoptim", lambda m, p: m.FlashAdamW(p, lr=LR), None, only_on="cuda", exact=False),
]  # fmt: skip

PLAIN = [
    torch_fused_plain,
    # The check reads g (4), the step reads p, g, m, v and writes all four (32). p.grad then equals torch's.
    flatout_plain("flatout plain", 36),
    # As above, but without a write of g.
    flatout_plain("flatout lazy", 32, max_grad_norm=math.inf),
]

BF16 = [
    torch_fused_and_cast,
    # g is read twice (4), master, m, v are read and written (24), the parameter is written (2).
    flatout("flatout, float32 masters", 30, torch.bfloat16, master_weights="float32"),
    # As above, but 4 bytes of parameter and remainder are read and written instead of 4 + 4 + 2.
    flatout("flatout, remainder", 28, torch.bfloat16, master_weights="remainder"),
    flatout(
        "flatout, remainder, 8-bit moments",
        16,
        torch.bfloat16,
        exact=False,
        master_weights="remainder",
        moment_dtype=torch.uint8,
    ),
    flatout("flatout, float32 + copy", 34, low_precision_copy=torch.bfloat16),
    flatout("flatout eager, float32 masters", 36, torch.bfloat16, lazy=False, master_weights="float32"),
]


# Trainings without float32 weights have no gradient scaler. float32 moments take 16 bytes instead of 8.
PURE_BF16 = [
    torch_fused_bf16,
    flatout_bf16("flatout", 14),
    flatout_bf16("flatout, float32 moments", 22, exact=False, moment_dtype=torch.float32),
    flatout_bf16("flatout, stochastic rounding", 14, exact=False, stochastic_rounding=True),
]

PURE_BF16_CLIPPED = [torch_fused_bf16_clipped, flatout_bf16("flatout lazy", 16, MAX_NORM)]


def assemble(makers: list[Callable[[Problem], Contender]], problem: Problem) -> tuple[list[Contender], list[str]]:
    """Return the contenders that can take part, warmed up, and the reasons why the others cannot."""
    contenders, missing = [], []
    for make in makers:
        try:
            contender = make(problem)
            warm_up(contender, problem)
        except Missing as reason:
            missing.append(str(reason))
        else:
            contenders.append(contender)
    return contenders, missing


def warm_up(contender: Contender, problem: Problem) -> None:
    for _ in range(3):
        problem.fresh_gradients(contender.params)
        try:
            contender.update()
        except Exception as error:
            if contender.name.startswith(("torch ", "flatout")):
                raise
            raise Missing(f"{contender.name}: {type(error).__name__}: {error}") from error


def disagreements(contenders: list[Contender]) -> list[str]:
    """Return which exact contenders have other parameters than the first contender after the same updates."""
    first, found = contenders[0], []
    for other in (c for c in contenders[1:] if c.exact):
        for i in (0, -1):
            p, q = first.params[i].detach()[:100_000].float(), other.params[i].detach()[:100_000]
            # torch's norm of 32 million float32 numbers in one tensor has an error of 0.2 %, and so has its clip.
            relative, absolute = (1e-5 if q.dtype == torch.float32 else 2.0**-7), 1e-5
            if first.rounds_gradients:
                relative, absolute = 2.0**-6, 1e-4
            try:
                torch.testing.assert_close(q.float(), p, rtol=relative, atol=absolute)
            except AssertionError as error:
                found.append(f"{other.name} has other parameters than {first.name}: {error}")
    return found
