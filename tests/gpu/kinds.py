"""Small models of four kinds, with data and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, BATCH = 5 * 32 + 8, 32
"""Number of samples in a dataset and in a batch. The last batch of an epoch is smaller."""


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, whose statistics are buffers.

    The convolutions have no bias. BatchNorm cancels a bias, so the gradient of the bias would be rounding error. Adam
    would turn this error into a full update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))


class Block(nn.Module):
    """Transformer block.

    ``qkv`` has no bias. Softmax cancels a bias of the keys, so the gradient of this bias would be rounding error.
    """

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class TinyGpt(nn.Module):
    """Transformer whose output layer shares its weights with the embedding."""

    def __init__(self, tokens: int = 48, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions))).flatten(0, 1)


class Recommender(nn.Module):
    """Embedding of a user, concatenated with the sum of item embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, 16), nn.EmbeddingBag(80, 16, mode="sum")
        self.head = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1:])], 1)).flatten()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _numbers(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def _integers(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, (SAMPLES, *shape), generator=torch.Generator().manual_seed(2))


def _next_token(scores: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(scores, tokens.flatten())


@dataclass(frozen=True)
class Kind:
    """Kind of training.

    Attributes:
        model: function that makes the model.
        data: function that makes inputs and targets.
        loss_fn: loss of outputs and targets.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy


def _text() -> tuple[Tensor, Tensor]:
    tokens = _integers(48, 13)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


KINDS = {
    "perceptron": Kind(perceptron, lambda: (_numbers(32), _integers(10))),
    "convolutions": Kind(Convolutions, lambda: (_numbers(3, 12, 12), _integers(10))),
    "gpt": Kind(TinyGpt, _text, _next_token),
    "recommender": Kind(Recommender, lambda: (_integers(80, 6), _numbers()), functional.mse_loss),
}
