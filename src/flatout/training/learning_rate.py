"""Learning rates for another number of samples per update: scaled, warmed up, and on the user's own schedule."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from flatout.core.toggle import Toggle


def lr_factor(rule: str, before: int, after: int) -> float:
    """What learning rates are multiplied by where an update averages over more samples, or over fewer.

    Args:
        rule: ``"linear"``: after / before (Goyal et al., 2017, arXiv:1706.02677). ``"sqrt"``: its square root
            (Krizhevsky, 2014, arXiv:1404.5997; for adaptive optimizers Malladi et al., 2022, arXiv:2205.10287, who
            change betas and eps as well). ``"none"``: 1.
        before: samples per update that the rates were chosen for.
        after: samples per update now.

    Raises:
        ValueError: another rule, or less than one sample.
    """
    for name, samples in (("before", before), ("after", after)):
        if samples < 1:
            raise ValueError(f"{name} must be >= 1, got {samples}")
    if rule == "linear":
        return after / before
    if rule == "sqrt":
        return math.sqrt(after / before)
    if rule == "none":
        return 1.0
    raise ValueError(f"rule must be 'linear', 'sqrt' or 'none', got {rule!r}")


class ScaledSchedule(Toggle):
    """The user's learning rates times a factor, on a schedule that goes on counting in the user's own updates.

    Behind update u each group has ``raw * w(u)``. ``raw`` is what the user's schedule says for the group behind
    ``floor(u * per_update)`` steps: exactly as far at each epoch's end as in the user's own loop, and never further.
    ``w`` is ``factor``; where that is above 1 it grows to it, by the same amount at each update, from 1 (Goyal et al.,
    2017, arXiv:1706.02677, section 2.2, "gradual warmup"): ``w(u) = 1 + (factor - 1) * min(1, u / warmup)``. The
    schedule does not wait for the warm-up.

    ``raw`` is kept, so that nothing drifts. Where somebody else has changed a group's rate since it was written (by
    hand, or ``ReduceLROnPlateau``, which users step with a metric), the change is taken for one of the scaled rate:
    ``raw`` is then that rate / w. A group that was added since comes with its ``raw``. Rates that are tensors stay the
    same tensors, and nothing waits for their device. What schedulers do with momentum and betas is left alone.

    While it is off, ``step`` is the step that the scheduler gets in the user's own loop.

    Args:
        optimizer: whose groups' rates are scaled.
        scheduler: the user's, stepped here and nowhere else; None: rates stay what they are but for the warm-up.
        factor: of the learning rates, > 0; see ``lr_factor``.
        warmup: updates that it takes to get there; 0: ``factor`` at once.
        per_update: steps that the user's own loop would have given the scheduler for each update taken now, > 0:
            updates in an epoch before / updates in an epoch now.

    Raises:
        ValueError: one of the three is out of its range.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, *, factor: float, warmup: int, per_update: Fraction
    ) -> None:
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"factor must be > 0 and finite, got {factor}")
        if warmup < 0:
            raise ValueError(f"warmup must be >= 0, got {warmup}")
        if per_update <= 0:
            raise ValueError(f"per_update must be > 0, got {per_update}")
        self.label = f"learning rate x{factor:.4g}"
        if warmup and factor > 1:
            self.label += f", warm-up of {warmup} update{'s' * (warmup > 1)}"
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._factor = factor
        self._warmup = warmup
        self._per_update = per_update
        self._updates = 0  # taken while it was on
        self._raw: list[float | Tensor] = []  # of each group; empty while it is off
        self._written: list[float | Tensor] = []  # what the groups were left with

    def step(self) -> None:
        """Set the rates of the next update; to be called once behind each.

        Raises:
            Exception: the scheduler's own. The groups have scaled rates then, too.
        """
        if not self._is_on:
            if self._scheduler is not None:
                self._scheduler.step()
            return
        self._look()
        due = math.floor((self._updates + 1) * self._per_update) - math.floor(self._updates * self._per_update)
        self._updates += 1
        try:
            if self._scheduler is not None and due:
                self._put(self._raw)  # schedulers go on from the rates that they find
                for _ in range(due):
                    self._scheduler.step()
                self._raw = self._rates()
        finally:
            self._write()

    def get_last_lr(self) -> list[float]:
        """The groups' rates as the next update uses them. It waits for the device where they are tensors on one."""
        return [float(rate) for rate in self._rates()]

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on, beside the optimizer's state: numbers, lists of them, and the scheduler's state."""
        if self._is_on:
            self._look()
        return {
            "on": self._is_on,
            "factor": self._factor,
            "warmup": self._warmup,
            "per_update": [self._per_update.numerator, self._per_update.denominator],
            "updates": self._updates,
            "raw": [float(rate) for rate in self._raw],
            "rates": self.get_last_lr(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was made, before or after the optimizer's state is loaded; on if it was on then.

        Raises:
            ValueError: it is of another schedule. Nothing has changed then.
        """
        saved = (
            ("factor", state["factor"], self._factor),
            ("warmup", state["warmup"], self._warmup),
            ("per_update", Fraction(*state["per_update"]), self._per_update),
        )
        differences = ", ".join(f"{name} {theirs} instead of {ours}" for name, theirs, ours in saved if theirs != ours)
        if differences:
            raise ValueError(f"the state is of another schedule: {differences}")
        if (state["scheduler"] is None) != (self._scheduler is None):
            raise ValueError("the state is of another schedule: only one of it and this training has a scheduler")
        is_on, updates, raw, rates = state["on"], state["updates"], state["raw"], state["rates"]
        groups = len(self._optimizer.param_groups)
        if len(rates) != groups:
            raise ValueError(
                f"the state is of another optimizer: it has rates of {len(rates)} parameter groups, the optimizer has "
                f"{groups}"
            )
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))  # CyclicLR takes an entry out of it
        self._is_on, self._updates = is_on, updates
        self._put(rates)
        self._raw, self._written = list(raw), self._rates()

    def _turn_on(self) -> None:
        self._look()
        self._write()

    def _turn_off(self) -> None:
        self._look()
        self._put(self._raw)
        self._raw = []

    def _weight(self) -> float:
        """``w`` of the updates taken so far."""
        if self._factor <= 1 or self._updates >= self._warmup:
            return self._factor
        return 1 + (self._factor - 1) * (self._updates / self._warmup)

    def _look(self) -> None:
        """Take in what others have done to the rates since they were written. Looking twice is looking once."""
        found, known, weight = self._rates(), len(self._raw), self._weight()
        self._raw = [
            _unscaled(rate, self._raw[i], self._written[i], weight) if i < known else rate
            for i, rate in enumerate(found)
        ]
        self._written = found

    def _write(self) -> None:
        weight = self._weight()
        self._put([rate * weight for rate in self._raw])
        self._written = self._rates()

    def _put(self, rates: list[float | Tensor]) -> None:
        """Write one rate to each group, and to what the scheduler tells of them."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate.reshape(()) if isinstance(rate, Tensor) else rate)
            else:
                group["lr"] = rate
        if hasattr(self._scheduler, "_last_lr"):
            self._scheduler._last_lr = self._rates()

    def _rates(self) -> list[float | Tensor]:
        """Of each group, as it is now; copies of tensors."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _unscaled(found: float | Tensor, raw: float | Tensor, written: float | Tensor, weight: float) -> float | Tensor:
    """``raw`` while a rate is what was written; else it follows from what was found."""
    if isinstance(found, Tensor) and isinstance(written, Tensor):
        return torch.where(found == written, raw, found / weight)  # nothing waits for the device
    is_unchanged = not isinstance(found, Tensor) and not isinstance(written, Tensor) and found == written
    return raw if is_unchanged else found / weight
