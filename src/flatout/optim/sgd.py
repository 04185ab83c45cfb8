"""``SGD``: torch's class with a native step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from flatout.optim.base import NativeStep, learning_rate, like

_sgd = torch.ops.flatout.sgd_


class SGD(NativeStep, torch.optim.SGD):
    """Equals ``torch.optim.SGD`` with the same arguments, in one pass over memory.

    Momentum buffers start as zeros, so a first step that found infinities leaves nothing undefined behind (in
    torch's fused SGD it does). torch sets the buffer to the bare gradient in the first step; with
    ``dampening`` that differs from the rule of later steps, and only the device knows which step is the first
    one *taken*: a count per parameter is kept in its state, as ``steps_taken``. ``state_dict`` and pickles show
    torch's state only: no counts, and a buffer that waits for its first step is None.
    """

    _torch_class = torch.optim.SGD

    def _native_step(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        factor: Tensor | None,
        found_inf: Tensor | None,
        memory: list[Tensor] | None = None,
    ) -> None:
        device = params[0].device
        buffers: list[Tensor] = []
        steps_taken: list[Tensor] = []
        if group["momentum"] != 0:
            for i, p in enumerate(params):
                state = self.state[p]
                buffer = state.get("momentum_buffer")
                if group["dampening"] != 0:
                    steps_taken.append(_count(state, p))
                if buffer is None:
                    state["momentum_buffer"] = buffer = torch.zeros_like(p, memory_format=torch.preserve_format)
                if memory is not None:
                    state["momentum_buffer"] = buffer = like(buffer, memory[i])
                buffers.append(buffer)
        lr, lr_tensor = learning_rate(group["lr"], device)
        _sgd(
            memory or params,
            grads,
            buffers,
            steps_taken,
            lr=lr,
            lr_tensor=lr_tensor,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )

    def _torch_update(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        self._settle()
        super()._torch_update(factor, found_inf)

    def _settle(self) -> None:
        """Makes the state torch's alone, see :func:`_settled`. Synchronises."""
        self.state.update({p: _settled(state) for p, state in self.state.items()})

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        result = super().state_dict()
        result["state"] = {key: _settled(state) for key, state in result["state"].items()}
        return result

    def __getstate__(self) -> dict[str, Any]:
        result = super().__getstate__()
        settled = {p: _settled(state) for p, state in self.state.items()}
        return {**result, "state": defaultdict(dict, settled)}


def _count(state: dict[str, Any], p: Tensor) -> Tensor:
    """Steps taken with the buffer in ``state``; one that came without a count is in use already."""
    fresh = state.get("momentum_buffer") is None
    if fresh or "steps_taken" not in state:
        state["steps_taken"] = torch.full((), 0.0 if fresh else 1.0, dtype=torch.float32, device=p.device)
    return state["steps_taken"]


def _settled(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` as torch has it: without the count, and without a buffer whose first step was never taken."""
    if "steps_taken" not in state:
        return state
    settled = {key: value for key, value in state.items() if key != "steps_taken"}
    if state["steps_taken"].item() == 0:
        settled["momentum_buffer"] = None
    return settled
