"""Data class of a demo job: real data, a model, a loss and hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor]

LONG_TRAINING = 50_000
"""Value of ``expected_steps`` in the demo.

The demo trains for seconds, in which half a minute of compilation never pays back. With this value, the tuning decides
as for a long training. The demo shows the time of the tuning beside the gain.
"""


@dataclass(frozen=True)
class Training:
    """Hyper-parameters that the naive and the optimized training share.

    Attributes:
        epochs: passes over the training data.
        batch_size: samples per step.
        lr: learning rate of ``torch.optim.AdamW``. The other arguments have torch's defaults.
        seed: seed of initial weights, shuffling and dropout.
    """

    epochs: int
    batch_size: int
    lr: float
    seed: int = 0


@dataclass(frozen=True)
class DemoJob:
    """Training job on real data.

    Attributes:
        name: name in ``--job``.
        title: description in one line.
        unit: word for samples, in the plural.
        train: training samples, transformed in Python one by one.
        held_out: samples that no training step uses.
        build_model: returns a newly initialized model on the CPU. The weights depend only on torch's global seed.
        loss_fn: ``(outputs, targets) -> scalar``, a mean over samples.
        training: hyper-parameters.
        metrics: further held-out metrics by name, ``(outputs, targets) -> mean over the batch``.
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
