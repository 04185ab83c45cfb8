"""Averages of an optimizer's weights: saving, loading, and use in the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flatout.core import dtensor
from flatout.optim.options import compute_dtype


class Averages:
    """``optimizer.ema``: exponential moving averages of the weights, which the step updates if ``ema_decay`` is set.

    The averages equal those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(ema_decay)``, if its
    first update precedes the first step. A parameter without a step is its own average. ``optimizer.state_dict()``
    contains the averages, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def _parameters(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self._optimizer.param_groups for p in group["params"]]

    def _averages(self) -> list[Tensor | None]:
        state = self._optimizer.state
        return [state[p].get("ema") if p in state else None for _, p in self._parameters()]

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"averages": {position of the parameter: average}}``. Tensors are not copied, as in torch."""
        found = {i: average for i, average in enumerate(self._averages()) if average is not None}
        return {"averages": found}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the averages of another optimizer over the same parameters, or over those of a model of another dtype.

        Raises:
            ValueError: ``state_dict`` is not the result of :meth:`state_dict`, or an average has no parameter of the
                same shape in a group with ``ema_decay``. Nothing is changed.
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
        """Write the averages to ``parameters``, rounded to their dtype.

        Args:
            parameters: as many as the optimizer has, in the same order.

        Raises:
            ValueError: the number of parameters differs. Nothing is changed.
        """
        targets, sources = list(parameters), self._parameters()
        if len(targets) != len(sources):
            raise ValueError(f"parameters must be as many as the optimizer has ({len(sources)}), got {len(targets)}")
        for target, (_, p), average in zip(targets, sources, self._averages(), strict=True):
            target.copy_(p if average is None else average)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Replace the parameters, and their low-precision copies, by the averages inside the block.

        After the block, the parameters have the same bits as before. This takes the memory of one copy of the
        parameters. The optimizer cannot step inside the block.

        Raises:
            RuntimeError: the block is inside another such block.
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
