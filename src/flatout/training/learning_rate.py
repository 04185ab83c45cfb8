"""Learning rates for another number of samples per update: scaling, warm-up, schedules, and lines for the report."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from flatout.core.toggle import Toggle

LR_RULES = ("linear", "sqrt", "none")
"""Rules of ``lr_factor``."""

_PROPORTIONAL = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose updates are proportional to the gradient."""


def rule_for(optimizer: torch.optim.Optimizer) -> str:
    """Return the rule of ``lr_rule="auto"``.

    The rule is linear for SGD and ASGD (Goyal et al., 2017, arXiv:1706.02677), for subclasses, and for optimizers that
    wrap one of them. All others get ``"sqrt"``. Optimizers that normalize the gradient need it, such as Adam and
    RMSprop (Malladi et al., 2022, arXiv:2205.10287). Adagrad, Adafactor and Lion need it below the batch size at which
    the best rate falls again (Li et al., 2024, arXiv:2405.14578). For an unknown optimizer, sqrt is the smaller change.
    """
    found = [optimizer]
    for each in found:
        # isinstance raises for a dead proxy
        held = (value for value in vars(each).values() if issubclass(type(value), torch.optim.Optimizer))
        found += [inner for inner in held if not any(inner is known for known in found)]
    return "linear" if any(isinstance(each, _PROPORTIONAL) for each in found) else "sqrt"


def lr_factor(rule: str, before: int, after: int) -> float:
    """Return the factor of the learning rates for another number of samples per update.

    Args:
        rule: ``"linear"`` gives after / before (Goyal et al., 2017, arXiv:1706.02677). ``"sqrt"`` gives the square root
            of after / before (Krizhevsky, 2014, arXiv:1404.5997). For adaptive optimizers its source is Malladi et al.
            (2022, arXiv:2205.10287), who also change betas and eps. ``"none"`` gives 1.
        before: samples per update that the learning rates were chosen for.
        after: samples per update now.

    Raises:
        ValueError: ``rule`` is unknown, or a number of samples is less than 1.
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
    raise ValueError(f"rule must be one of {', '.join(map(repr, LR_RULES))}, got {rule!r}")


def steps_of(scheduler: Any) -> int | None:
    """Return the number of steps that a scheduler counts; None if it counts none."""
    if isinstance(scheduler, ScaledSchedule):
        scheduler = scheduler._scheduler
    if isinstance(scheduler, torch.optim.lr_scheduler.ChainedScheduler):  # counts no steps itself
        scheduler = scheduler._schedulers[0]
    return getattr(scheduler, "last_epoch", None)


class ScaledSchedule(Toggle):
    """Schedule of the user's learning rates times a factor, in the pace of the user's own updates.

    After update u each group has the learning rate ``raw * w(u)``. ``raw`` is the user's schedule for the group after
    ``floor(u * per_update)`` steps. So at each epoch's end the schedule has exactly as many steps as in the user's own
    loop, and never more. A factor up to 1 applies at once, so ``w`` is ``factor``. A larger factor is reached in equal
    steps, with ``w(u) = 1 + (factor - 1) * min(1, u / warmup)``. The source is "gradual warmup" in section 2.2 of Goyal
    et al. (2017, arXiv:1706.02677). The schedule continues during the warm-up.

    ``raw`` is stored, so rounding errors do not add up. Other code may change a group's learning rate, as users and
    ``ReduceLROnPlateau`` do. The new value counts as scaled, so ``raw`` becomes the new value / w. A group that was
    added later starts with its own rate as ``raw``. Learning rates that are tensors stay the same tensors, and the host
    does not wait for their device. Momentum and betas are not scaled.

    While the schedule is off, ``step`` is one step of the user's scheduler.

    Args:
        optimizer: the optimizer whose learning rates are scaled.
        scheduler: the user's scheduler, which only this object may step. With None, learning rates are constant after
            the warm-up.
        factor: factor of the learning rates, > 0, as ``lr_factor`` returns it.
        warmup: number of updates until the factor is reached. 0 applies ``factor`` at once.
        per_update: scheduler steps per update, > 0. The value is updates per epoch in the user's own loop / updates per
            epoch now.

    Raises:
        ValueError: ``factor``, ``warmup`` or ``per_update`` is out of its range.
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
        self._updates = 0  # while the schedule was on
        self._raw: list[float | Tensor] = []  # of each group, or empty while the schedule is off
        self._written: list[float | Tensor] = []  # last values in the groups

    def step(self) -> None:
        """Set the learning rates of the next update. Call this once after each update.

        Raises:
            Exception: the scheduler failed. The groups still get scaled learning rates.
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
                self._put(self._raw)  # schedulers compute new rates from the present ones
                for _ in range(due):
                    self._scheduler.step()
                self._raw = self._rates()
        finally:
            self._write()

    def get_last_lr(self) -> list[float]:
        """Return the groups' learning rates for the next update. Tensors on a GPU make the host wait for the GPU."""
        return [float(rate) for rate in self._rates()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, with numbers, lists of numbers, and the scheduler's state.

        The optimizer's state is not included.
        """
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
        """Resume from ``state``, before or after the optimizer's state is loaded.

        The schedule is on if it was on when the state was saved.

        Raises:
            ValueError: the state belongs to another schedule. Nothing has changed.
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
            self._scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))  # CyclicLR removes an entry
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
        """Return ``w`` after the updates so far."""
        if self._factor <= 1 or self._updates >= self._warmup:
            return self._factor
        return 1 + (self._factor - 1) * (self._updates / self._warmup)

    def _look(self) -> None:
        """Read changes by other code since the last write. A second call changes nothing."""
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
        """Write one rate to each group, and to the values that the scheduler reports."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate.reshape(()) if isinstance(rate, Tensor) else rate)
            else:
                group["lr"] = rate
        if hasattr(self._scheduler, "_last_lr"):
            self._scheduler._last_lr = self._rates()

    def _rates(self) -> list[float | Tensor]:
        """Return the current rate of each group, with tensors copied."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _unscaled(found: float | Tensor, raw: float | Tensor, written: float | Tensor, weight: float) -> float | Tensor:
    """Return ``raw`` if ``found`` equals ``written``, else ``found / weight``."""
    if isinstance(found, Tensor) and isinstance(written, Tensor):
        return torch.where(found == written, raw, found / weight)  # the host does not wait for the device
    is_unchanged = not isinstance(found, Tensor) and not isinstance(written, Tensor) and found == written
    return raw if is_unchanged else found / weight


WARMUP_EPOCHS = 5
WARMUP_SHARE = 0.1
"""Length of the warm-up to a larger learning rate (Goyal et al., 2017, arXiv:1706.02677).

In a short training the warm-up takes at most ``WARMUP_SHARE`` of all updates.
"""

GENERALISES_BELOW = 1024
"""Samples per update at which the report starts to warn.

In Keskar et al. (2017, arXiv:1609.04836), models that are trained with batches of thousands generalize worse. Goyal et
al. trained with 8,192 samples without a loss of accuracy, with the linear rule and the warm-up.
"""


@dataclass(frozen=True)
class BatchSizeChange:
    """Change of the number of samples per update.

    Attributes:
        rule: rule of the learning rates, one of ``LR_RULES``.
        samples: samples per update, before and after.
        updates: updates per epoch, before and after.
        training: updates of the whole training after the change.
    """

    rule: str
    samples: tuple[int, int]
    updates: tuple[int, int]
    training: int

    @property
    def factor(self) -> float:
        """Factor of the learning rates."""
        return lr_factor(self.rule, *self.samples)

    @property
    def warmup(self) -> int:
        """Number of updates of the warm-up, or 0 if learning rates do not grow."""
        if self.factor <= 1:
            return 0
        return min(WARMUP_EPOCHS * self.updates[1], math.ceil(WARMUP_SHARE * self.training))

    def schedule(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> ScaledSchedule:
        """Return the schedule for the new updates.

        Args:
            optimizer: the optimizer whose learning rates change.
            scheduler: the user's scheduler, or None.
        """
        per_update = Fraction(*self.updates)
        return ScaledSchedule(optimizer, scheduler, factor=self.factor, warmup=self.warmup, per_update=per_update)

    def told(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return lines for the report, one per change. Call this before the optimizer's learning rates change."""
        before, after = self.samples
        told = [f"an update has {after:,} samples instead of {before:,}"]
        rates = dict.fromkeys(float(group["lr"]) for group in optimizer.param_groups)
        if self.factor == 1:
            told.append(f"the learning rate stays (lr_rule={self.rule!r})")
        else:
            changed = ", ".join(f"{rate:.3g} → {rate * self.factor:.3g}" for rate in rates)
            how = f"warmed up over {self.warmup:,} updates" if self.warmup else "at once"
            told.append(f"learning rate {changed} ({self.rule} rule), {how}")
        if self.rule == "linear" and rule_for(optimizer) == "sqrt":
            told.append(f"rates of {type(optimizer).__name__} scale with the square root: lr_rule='sqrt'")
        if after > before and after >= GENERALISES_BELOW:
            told.append(
                f"models may generalise worse with {GENERALISES_BELOW:,} samples and more (Keskar et al., 2017): "
                "compare run.evaluate"
            )
        return told
