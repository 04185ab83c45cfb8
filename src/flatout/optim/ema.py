"""The averages of an optimizer's weights: saved, put into the model, and taken out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flatout.core import dtensor
from flatout.optim.options import compute_dtype


class Averages:
    """``optimizer.ema``: exponential moving averages of the weights, kept by the step where ``ema_decay`` is set.

    They equal ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(ema_decay)``, first updated before
    the first step. A parameter that has not been stepped is its own average. They are part of
    ``optimizer.state_dict()`` too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def _parameters(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self._optimizer.param_groups for p in group["params"]]

    def _averages(self) -> list[Tensor | None]:
        state = self._optimizer.state
        return [state[p].get("ema") if p in state else None for _, p in self._parameters()]

    def state_dict(self) -> dict[str, Any]:
        """``{"averages": {position of the parameter: average}}``; tensors are the live ones, as in torch."""
        found = {i: average for i, average in enumerate(self._averages()) if average is not None}
        return {"averages": found}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the averages of another optimizer over the same parameters, or of a model of other dtype.

        Raises:
            ValueError: it is not of :meth:`state_dict`, or an average has no parameter of its shape in a group with
                ``ema_decay``. Nothing is changed.
        """
        if "averages" not in state_dict:
            raise ValueError(f"state_dict must have the key 'averages', got {list(state_dict)}")
        parameters = self._parameters()
        for i, average in state_dict["averages"].items():
            if not 0 <= i < len(parameters) or parameters[i][0].get("ema_decay") is None:
                raise ValueError(f"averages[{i}] must belong to a parameter in a group with ema_decay")
            if average.shape != parameters[i][1].shape:
                shape = tuple(parameters[i][1].shape)
                raise ValueError(f"averages[{i}] must have shape {shape}, got {tuple(average.shape)}")
        for i, average in state_dict["averages"].items():
            p = parameters[i][1]
            kept = average.to(device=p.device, dtype=compute_dtype(p.dtype), copy=True)
            self._optimizer.state[p]["ema"] = dtensor.spread_like(kept, p)

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[Tensor]) -> None:
        """Writes the averages, rounded to their dtype, into ``parameters``: as many as the optimizer has, in order.

        Raises:
            ValueError: there are more or fewer parameters. Nothing is changed.
        """
        targets, sources = list(parameters), self._parameters()
        if len(targets) != len(sources):
            raise ValueError(f"parameters must be as many as the optimizer has ({len(sources)}), got {len(targets)}")
        for target, (_, p), average in zip(targets, sources, self._averages(), strict=True):
            target.copy_(p if average is None else average)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, parameters (and their low-precision copies) hold the averages; after, the very bits of before.

        It costs one copy of the parameters. The optimizer cannot step inside.

        Raises:
            RuntimeError: the averages are swapped in already.
        """
        optimizer = self._optimizer
        if getattr(optimizer, "_swapped", False):
            raise RuntimeError("optimizer.ema.swap() must not be nested: the parameters hold their averages already")
        parameters = [p for _, p in self._parameters()]
        kept = [p.detach().clone() for p in parameters]
        optimizer._swapped = True  # type: ignore[attr-defined]
        try:
            self.copy_to(parameters)
            self._copies_follow()
            yield
        finally:
            del optimizer._swapped  # type: ignore[attr-defined]
            with torch.no_grad():
                for p, bits in zip(parameters, kept, strict=True):
                    p.copy_(bits)
            self._copies_follow()

    @torch.no_grad()
    def _copies_follow(self) -> None:
        for p, state in self._optimizer.state.items():
            if "copy" in state:
                state["copy"].copy_(p)
