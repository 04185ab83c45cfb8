"""Who takes part in benchmarks/update_path.py: one whole update each, from a scaled gradient to a stepped parameter.

An update is what stands between ``backward`` and ``zero_grad``: unscale, check for infinities, clip the global norm to
1 (except in ``PLAIN``), AdamW, update the scale; through the calls that users write, at the flags that are fastest.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flatout.amp as fa
import flatout.optim as fo

LR = 1e-3
SCALE = 1024.0
MAX_NORM = 1.0
NORM = 2.0
"""Of the unscaled gradients: the clip halves them, as clips do that do something."""


@dataclass
class Problem:
    """Parameters and gradients of one size, the same for every contender."""

    sizes: list[int]
    device: str
    gradients: dict[torch.dtype, tuple[list[Tensor], list[list[Tensor]]]] = field(default_factory=dict)
    turn: int = 0

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def _values(self, seed: int, scale: float) -> list[Tensor]:
        """Normal values that bfloat16 can hold, so that every dtype starts from the same numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = (torch.randn(n, device=self.device, generator=generator).mul_(scale) for n in self.sizes)
        return [values.bfloat16().float() for values in made]

    def parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(values.to(dtype)) for values in self._values(0, 0.02)]

    def fresh_gradients(self, params: list[torch.nn.Parameter]) -> None:
        """Scaled gradients, as ``backward`` leaves them after ``zero_grad``: other tensors than the last time."""
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
    """DRAM traffic of one update, counted from its passes; None where nobody has counted."""
    exact: bool = True
    """Whether its results must be torch's."""


def _scaler(make: Any, device: str) -> Any:
    scaler = make(device, init_scale=SCALE, growth_interval=1 << 30)
    scaler.scale(torch.zeros((), device=device))  # makes the scale's tensor
    return scaler


def _eager(optimizer: Any, params: list[Any], scaler: Any, clip: Callable[..., Tensor]) -> Callable[[], None]:
    def update() -> None:
        scaler.unscale_(optimizer)
        clip(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return update


def plain(optimizer: Any, make_scaler: Any, device: str, **options: float) -> Callable[[], None]:
    """Unscale, check, step: nothing is clipped."""
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
    """Unscale reads and writes g (8), the norm reads it (4), the clip reads and writes it (8), the step 28."""
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    return Contender("torch fused", params, torch_eager(optimizer, params, problem.device), 48)


def torch_foreach(problem: Problem) -> Contender:
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=True)
    return Contender("torch foreach", params, torch_eager(optimizer, params, problem.device), 100)


def torch_fused_and_cast(problem: Problem) -> Contender:
    """float32 weights, and the casts of all of them that autocast makes in every forward pass: 4 read, 2 written."""
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
        optimizer = fo.AdamW(params, lr=LR, **additions)
        device = problem.device
        update = flatout_lazy(optimizer, device) if lazy else flatout_eager(optimizer, params, device)
        return Contender(name, params, update, bytes_per_param, exact)

    return make


def torch_fused_plain(problem: Problem) -> Contender:
    """The check reads and writes g (8), the step reads p, g, m, v and writes them all (32)."""
    params = problem.parameters(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    return Contender("torch fused", params, plain(optimizer, torch.amp.GradScaler, problem.device), 40)


def flatout_plain(name: str, bytes_per_param: float, **options: float) -> Callable[[Problem], Contender]:
    def make(problem: Problem) -> Contender:
        params = problem.parameters(torch.float32)
        update = plain(fo.AdamW(params, lr=LR), fa.GradScaler, problem.device, **options)
        return Contender(name, params, update, bytes_per_param)

    return make


# ---- the others, where they are installed ------------------------------------------------------------------


class Missing(Exception):
    """Why a contender does not take part."""


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
            optimizer = make(library, params)
        except Exception as error:  # whatever it is, it is theirs, and the others go on
            raise Missing(f"{name}: {type(error).__name__}: {error}") from error
        return Contender(name, params, torch_eager(optimizer, params, problem.device), bytes_per_param, exact)

    return build


FP32 = [
    torch_fused,
    torch_foreach,
    # The check reads g (4), the step reads p, g, m, v and writes p, m, v.
    flatout("flatout lazy", 32),
    # One pass unscales, checks and measures (8), the clip reads and writes (8), the step 28.
    flatout("flatout eager", 44, lazy=False),
    # The same with moments of a byte each; an absmax per 256 of them is not counted.
    flatout("flatout, 8-bit moments", 20, exact=False, moment_dtype=torch.uint8),
    # torch's unscale and clip (20) before their steps; 8-bit moments are a byte each, read and written.
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
    # The check reads g (4), the step reads p, g, m, v and writes them all (32): p.grad is torch's afterwards.
    flatout_plain("flatout plain", 36),
    # The same, but g is not written.
    flatout_plain("flatout lazy", 32, max_grad_norm=math.inf),
]

BF16 = [
    torch_fused_and_cast,
    # g read twice (4); master, m, v read and written (24); the parameter written (2).
    flatout("flatout, float32 masters", 30, torch.bfloat16, master_weights="float32"),
    # The same, but 4 bytes of parameter and remainder read and written instead of 4 + 4 + 2.
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


def assemble(makers: list[Callable[[Problem], Contender]], problem: Problem) -> tuple[list[Contender], list[str]]:
    """Those that can take part, warmed up, and why the others cannot."""
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


def assert_agreement(contenders: list[Contender]) -> None:
    """What is timed is right: after the same updates all have the parameters of the first."""
    first = contenders[0]
    for other in (c for c in contenders[1:] if c.exact):
        for i in (0, -1):
            p, q = first.params[i].detach()[:100_000], other.params[i].detach()[:100_000]
            tolerance = 1e-5 if q.dtype == torch.float32 else 2.0**-7
            message = f"{other.name} has other parameters than {first.name}"
            # torch's norm of 32 million float32 numbers in one tensor is 0.2 % off, and with it the clipping.
            torch.testing.assert_close(q.float(), p, rtol=tolerance, atol=1e-5, msg=lambda m, s=message: f"{s}: {m}")
