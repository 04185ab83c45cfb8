"""Twins: equal parameters under torch's for-loop optimizer (the reference) and under flatout's."""

from __future__ import annotations

from typing import Any

import torch

import flatout.optim as fo

SHAPES = [(1,), (3,), (0,), (5, 7), (64,), (129, 33), (16384,), (16385,), (0, 4)]
"""Sizes: odd ones, one element, a chunk, a chunk and one, and empty tensors in the middle and at the end."""


def parameters(dtype: torch.dtype, shapes: Any = SHAPES, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_grads(params: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def saved_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of one parameter in ``state_dict``, empty if the parameter has no state."""
    saved = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    (number,) = (n for n, p in zip(numbers, order, strict=True) if p is parameter)
    return saved["state"].get(number, {})


def twins(name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    """Return torch's optimizer, flatout's optimizer, torch's parameters and flatout's parameters.

    For 16-bit dtypes torch's parameters are float64, see :func:`step_both`.
    """
    theirs, ours = parameters(dtype), parameters(dtype)
    if dtype.itemsize == 2:
        theirs = [torch.nn.Parameter(p.detach().double()) for p in theirs]
    reference = getattr(torch.optim, name)(theirs, foreach=False, **options)
    return reference, getattr(fo, name)(ours, **options), theirs, ours


def step_both(reference: Any, optimizer: Any, seed: int) -> None:
    """Step both optimizers with the same gradients.

    torch's loop rounds every intermediate of 16-bit dtypes, and divides by an eps of 0 in float16. flatout computes in
    float32, and rounds only stored values. The reference is therefore a float64 step with rounded results.
    """
    theirs, ours = reference.param_groups[0]["params"], optimizer.param_groups[0]["params"]
    set_grads(ours, seed)
    for a, b in zip(theirs, ours, strict=True):
        a.grad = b.grad.to(a.dtype, copy=True)
    reference.step(), optimizer.step()
    if ours[0].dtype.itemsize == 2:
        for p in theirs:
            for t in (p.data, *(v for k, v in reference.state[p].items() if k != "step" and v is not None)):
                t.copy_(t.to(ours[0].dtype))


def assert_same(theirs: Any, ours: Any, dtype: torch.dtype) -> None:
    # 16-bit dtypes differ by a few units in the last place, if a rounding goes the other way.
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3}.get(dtype, 2e-2)
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        torch.testing.assert_close(
            b.to(a.dtype), a, rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"tensor {i}: {m}"
        )


def state_of(optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values()]
