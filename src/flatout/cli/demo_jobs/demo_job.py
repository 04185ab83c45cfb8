"""What a demo job is: real data, a model, a loss and the numbers it is trained with, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor]

LONG_TRAINING = 50_000
"""Steps that ``optimize`` is told to expect. The demo trains for seconds, where half a minute of compilation can
never pay; it decides as for a training worth optimizing, and shows what the tuning cost beside what it brought."""


@dataclass(frozen=True)
class Training:
    """The hyper-parameters that the naive and the optimized training share.

    Attributes:
        epochs: passes over the training data.
        batch_size: samples per step.
        lr: learning rate given to ``torch.optim.AdamW``; everything else keeps torch's default.
        seed: seeds initial weights, shuffling and dropout.
    """

    epochs: int
    batch_size: int
    lr: float
    seed: int = 0


@dataclass(frozen=True)
class DemoJob:
    """A training job on real data.

    Attributes:
        name: what ``--job`` calls it.
        title: one line for people.
        unit: what one sample is, in the plural.
        train: training samples, transformed in Python one by one.
        held_out: samples that no training step sees.
        build_model: a freshly initialised model, on the CPU; its weights depend on torch's global seed only.
        loss_fn: ``(outputs, targets) -> scalar``, a mean over samples.
        training: hyper-parameters.
        metrics: further held-out measures, ``(outputs, targets) -> mean over the batch``.
    """

    name: str
    title: str
    unit: str
    train: Dataset[Sample]
    held_out: Dataset[Sample]
    build_model: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    training: Training
    metrics: dict[str, Callable[[Tensor, Tensor], Tensor]]
