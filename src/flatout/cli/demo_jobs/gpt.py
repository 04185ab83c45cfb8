"""Job 2: a byte-level GPT on CPython's own language reference, an English text that every CPython contains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatout.cli.demo_jobs.demo_job import DemoJob, Sample, Training

HELD_OUT_SHARE = 0.1
"""Share of the text, at its end, for the validation loss."""


@dataclass(frozen=True)
class GptSize:
    """Size of the job.

    Attributes:
        layers: transformer blocks.
        heads: attention heads per block.
        width: features of a position, a multiple of ``heads``.
        context: bytes of one window.
        stride: bytes from the start of one training window to the start of the next.
        training: hyper-parameters.
        text: number of bytes of the text; None takes the whole text.
    """

    layers: int
    heads: int
    width: int
    context: int
    stride: int
    training: Training
    text: int | None = None


SIZES = {
    "cpu": GptSize(2, 4, 64, 64, 64, Training(epochs=2, batch_size=32, lr=1e-3)),
    "cuda": GptSize(8, 8, 512, 256, 128, Training(epochs=4, batch_size=64, lr=5e-4)),
    "quick": GptSize(1, 2, 32, 32, 32, Training(epochs=2, batch_size=32, lr=3e-3), text=20_000),
}


class TextWindows(Dataset[Sample]):
    """Windows of a text. A window becomes a tensor when it is read."""

    def __init__(self, text: bytes, context: int, stride: int) -> None:
        self.text = text
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.context - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Sample:
        """Return the bytes of a window and the byte after each of these bytes, both [context], int64."""
        start = index * self.stride
        window = self.text[start : start + self.context + 1]
        ids = torch.tensor(list(window), dtype=torch.long)
        return ids[:-1], ids[1:]


def read_text(limit: int | None = None) -> bytes:
    """Return CPython's language reference as ``help()`` shows it, about 460 KB of English.

    Args:
        limit: number of bytes; None takes all.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()[:limit]


def load(context: int, stride: int, limit: int | None = None) -> tuple[TextWindows, TextWindows]:
    """Read the text, and split off its end as held-out text.

    Args:
        context: bytes per window.
        stride: bytes between the starts of training windows. Held-out windows have the stride ``context``.
        limit: number of bytes of the text; None takes all.

    Returns:
        Training and held-out windows. No byte is in both.
    """
    text = read_text(limit)
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    return TextWindows(text[:cut], context, stride), TextWindows(text[cut:], context, context)


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a perceptron with ``4 * width`` hidden units."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, T, C] to [N, T, C]."""
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """GPT over bytes: learned positions, pre-norm blocks, output weights shared with the embedding."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map bytes [N, T], int64, to scores of the next bytes [N, T, 256]."""
        x = self.embed(ids) + self.position[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats per byte, of scores [N, T, 256] against targets [N, T]."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def build(size: GptSize) -> DemoJob:
    """Return the job at one of ``SIZES``."""
    train, held_out = load(size.context, size.stride, size.text)
    return DemoJob(
        name="gpt",
        title=f"byte-level GPT: CPython's reference in {len(train):,} windows of {size.context} bytes",
        unit="windows",
        train=train,
        held_out=held_out,
        build_model=lambda: Gpt(size.layers, size.heads, size.width, size.context),
        loss_fn=next_byte_loss,
        training=size.training,
        metrics={},
    )
