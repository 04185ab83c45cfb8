"""Four jobs of benchmarks/data_parallel.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Job:
    """Training with cross-entropy.

    Attributes:
        model: makes the model on the CPU, with its width multiplied by a factor.
        batch: makes inputs and targets of two ranks' batches on the CPU, for the same factor.
    """

    model: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


class Tagger(nn.Module):
    """Transformer that predicts a class for each token."""

    def __init__(self, width: int, tokens: int = 2000, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.positions)).mT  # [N, classes, length]


def mlp(factor: int) -> nn.Module:
    wide = 768 * factor
    return nn.Sequential(nn.Linear(256, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, CLASSES))


def cnn(factor: int) -> nn.Module:
    wide = 16 * factor
    return nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * wide, 4 * wide, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * wide, CLASSES),
    )  # fmt: skip


def many_parameters(factor: int) -> nn.Module:
    """Return a model of 402 small parameters."""
    wide = 32 * factor
    blocks = [nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, wide), nn.ReLU()) for _ in range(100)]
    return nn.Sequential(*blocks, nn.Linear(wide, CLASSES))


def classes(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


JOBS = {
    "mlp": Job(mlp, lambda factor: (torch.randn(256 * factor, 256), classes(256 * factor))),
    "cnn": Job(cnn, lambda factor: (torch.randn(32 * factor, 3, 32, 32), classes(32 * factor))),
    "transformer": Job(
        lambda factor: Tagger(128 * factor),
        lambda factor: (torch.randint(2000, (16 * factor, 64)), classes(16 * factor, 64)),
    ),
    "many parameters": Job(
        many_parameters, lambda factor: (torch.randn(256 * factor, 32 * factor), classes(256 * factor))
    ),
}
