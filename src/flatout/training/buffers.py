"""Buffers that change once per batch, although each part of the batch updates them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatout.core.saved import SavedTensor, owned


class Buffers:
    """Buffers that change once per batch, although each part of the batch updates them.

    Args:
        slots: the buffers of each module, by name.
        moved: True for each module whose buffers the whole batch has updated already. None means no module.
    """

    def __init__(self, slots: Sequence[dict[str, Tensor | None]], moved: Sequence[bool] | None) -> None:
        self._kept: list[tuple[dict[str, Tensor | None], str, SavedTensor, Tensor]] = []
        self._means: dict[int, Tensor] = {}
        self._moved = set()
        for i, own in enumerate(slots):
            for name, buffer in own.items():
                if buffer is None:
                    continue
                position, saved = len(self._kept), SavedTensor(buffer)
                bits = saved.bits
                assert bits is not None
                self._kept.append((own, name, saved, bits))
                if moved is not None and moved[i]:
                    self._moved.add(position)
                elif bits.is_floating_point() or bits.is_complex():
                    self._means[position] = torch.zeros_like(bits)

    def put_back(self) -> None:
        """Restore the buffers as they were before the batch."""
        for position in range(len(self._kept)):
            self._write_back(position)

    def add(self, share: float) -> None:
        """Add the update by one part, weighted with its ``share`` of the samples."""
        with torch.no_grad():
            for position in list(self._means):
                now, bits = self._now(position), self._kept[position][-1]
                if now is None or now.shape != bits.shape or now.dtype != bits.dtype:
                    del self._means[position]
                else:
                    self._means[position].add_(now - bits, alpha=share)

    def conclude(self) -> None:
        """Write the result of one update.

        Buffers that cannot be averaged, such as counts, keep the value of the last part.
        """
        with torch.no_grad():
            for position, mean in self._means.items():
                slots, name, saved, bits = self._kept[position]
                now = self._now(position)
                if now is None:
                    continue
                total = bits + mean
                total = torch.where(total.isnan(), now, total)  # infinities, as in masks, have no difference
                if slots[name] is saved.tensor:
                    now.copy_(total)
                else:  # other code may use the new object, so it must not change
                    slots[name] = total
        for position in self._moved:
            self._write_back(position)

    def _now(self, position: int) -> Tensor | None:
        slots, name, _, _ = self._kept[position]
        buffer = slots.get(name)
        return None if buffer is None else owned(buffer)

    def _write_back(self, position: int) -> None:
        slots, name, saved, _ = self._kept[position]
        if slots.get(name) is not saved.tensor:
            slots[name] = saved.tensor
            return
        saved.restore()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mapping from names to buffers that a module uses.

    For a ScriptModule, return a copy, because its buffers are never replaced.
    """
    return dict(module._buffers.items()) if isinstance(module, torch.jit.ScriptModule) else module._buffers
