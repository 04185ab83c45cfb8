"""``SGD``: torch's class with a native step."""

from __future__ import annotations

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
    one *taken*: a count per parameter is kept there. ``state_dict`` shows torch's state only: a buffer that
    waits for its first step is None.
    """

    _torch_class = torch.optim.SGD
    _steps_taken: dict[Tensor, Tensor]  # only of parameters whose group has dampening

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
                    steps_taken.append(self._count(p, fresh=buffer is None))
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

    def _count(self, p: Tensor, *, fresh: bool) -> Tensor:
        counts = self.__dict__.setdefault("_steps_taken", {})
        if fresh or p not in counts:
            counts[p] = torch.full((), 0.0 if fresh else 1.0, dtype=torch.float32, device=p.device)
        return counts[p]

    def _settle(self) -> None:
        """Makes the state torch's alone: buffers whose first step was never taken are None. Synchronises."""
        counts = self.__dict__.pop("_steps_taken", {})
        for p, count in counts.items():
            if count.item() == 0 and p in self.state:
                self.state[p]["momentum_buffer"] = None

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        self._settle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.pop("_steps_taken", None)
        super().__setstate__(state)
