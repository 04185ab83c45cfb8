"""``SGD``: torch's class with a native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.optim.dynamic8 import absmax_name
from flatout.optim.native_step import NativeStep


class SGD(NativeStep, torch.optim.SGD):
    """Equals ``torch.optim.SGD`` with the same arguments, in one pass over memory.

    Momentum buffers start as zeros. So they are defined after a skipped first step. torch's fused SGD leaves them
    undefined.

    In the first step, torch sets the buffer to the gradient. With ``dampening``, this differs from the rule of later
    steps. Only the device has the information which step is the first one that is not skipped. So the state of each
    parameter then has a count, ``step``. ``state_dict`` contains the count only if stochastic rounding needs it, too.
    Otherwise ``state_dict`` equals torch's, and the buffer of a parameter with count 0 is None.

    For the additional options see :class:`flatout.optim.AdamW`.
    """

    _rule = "sgd"
    _torch_class = torch.optim.SGD

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _counts(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0 and group["dampening"] != 0)

    def _options(self, group: dict[str, Any]) -> list[float | Tensor]:
        return [group["momentum"], group["dampening"], group["nesterov"]]

    def _published(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        result = super()._published(group, state)
        if not group.get("stochastic_rounding") and result.pop("step", None) == 0:
            result["momentum_buffer"] = None
            result.pop(absmax_name("momentum_buffer"), None)
        return result

    def _torch_update(self, factor: Tensor | None, found_inf: Tensor | None, unscales: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "step" in self.state.get(p, ()):
                    self.state[p] = self._published(group, self.state[p])
        super()._torch_update(factor, found_inf, unscales)
