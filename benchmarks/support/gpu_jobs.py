"""Jobs of benchmarks/optimize_gpu.py and case_study.py, in sizes for a GPU, and in small sizes for tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support import scale
from support.loops import DEVICE
from support.scale import scaled
from support.training_jobs import Images
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from examples.gpt import TEXT, Block
from flatout.data import InMemoryLoader


@dataclass(frozen=True)
class GpuJob:
    """Training job.

    Attributes:
        name: name in the benchmark.
        unit: unit of rates, such as images or tokens.
        units: number of these units in a sample.
        batch_size: samples per step.
        batches: makes the loader. Its batches are on the device already, except for the case study.
        model: makes a newly initialized model, on torch's default device.
        optimizer: makes the optimizer for the parameters.
        loss_fn: ``(output, target) -> scalar`` for pairs; None if the model's output contains ``loss``.
    """

    name: str
    unit: str
    units: int
    batch_size: int
    batches: Callable[[], Iterable[Any]]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch on the model's device."""
        return model(**batch)["loss"] if self.loss_fn is None else self.loss_fn(model(batch[0]), batch[1])

    def rate(self, samples_per_second: float) -> str:
        """Return the rate in units per second, as text."""
        return f"{samples_per_second * self.units:,.0f} {self.unit}/s"

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model on the device, with the same weights in each call, and its optimizer."""
        torch.manual_seed(0)
        with DEVICE:
            model = self.model()
        return model, self.optimizer(model.parameters())


# ---- sizes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transformer:
    """Sizes of a GPT and of its batches."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    batch_size: int


@dataclass(frozen=True)
class Convolutional:
    """Sizes of a ResNet with bottleneck blocks and of its batches."""

    blocks: tuple[int, ...]
    width: int
    side: int
    batch_size: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of all jobs.

    Attributes:
        perceptron: number of inputs, hidden features, and samples of a batch.
        case_study: sizes with the starting batch size.
        workers: workers of the case study's loader.
        gpt2: sizes of the model of 124 million parameters on a GPU.
        wide: sizes of layers of a 7B model on a GPU.
        resnet50: the published sizes on a GPU.
    """

    perceptron: tuple[int, int, int]
    case_study: Transformer
    workers: int
    gpt2: Transformer
    wide: Transformer
    resnet50: Convolutional


def sizes() -> Sizes:
    """Return the sizes for this device. Small runs have the same sizes on all devices."""
    if DEVICE.type == "cuda" and scale.full:
        # A wide step on 16 sequences takes 75 GB beside the second training of the same job.
        has_much = torch.cuda.get_device_properties(DEVICE).total_memory > 100e9
        return Sizes(
            perceptron=(1024, 2048, 512),
            case_study=Transformer(24, 16, 1024, 1024, 50304, 4),
            workers=4,
            gpt2=Transformer(12, 12, 768, 1024, 50304, 32),
            wide=Transformer(4, 32, 4096, 2048, 32000, 16 if has_much else 8),
            resnet50=Convolutional((3, 4, 6, 3), 64, 224, 256),
        )
    return Sizes(
        perceptron=(64, 128, 32),
        case_study=scaled(Transformer(4, 4, 128, 128, 4096, 8), Transformer(1, 2, 32, 32, 1024, 4)),
        workers=1,
        gpt2=Transformer(2, 2, 32, 32, 512, 4),
        wide=Transformer(1, 2, 64, 32, 256, 2),
        resnet50=Convolutional((1, 1, 1, 1), 8, 64, 4),
    )


# ---- models ------------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """GPT-2 with its loss: learned positions, pre-norm blocks, output weights shared with the embedding."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Map tokens and the next tokens, both int64 [N, T], to the mean cross-entropy."""
        x = self.embed(ids) + self.position[: ids.shape[1]]
        scores = self.head(self.norm(self.blocks(x)))
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), targets.flatten())}


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions. The middle one has the stride, as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, inputs, H, W] to [N, 4 width, H / stride, W / stride]."""
        return functional.relu(self.convolutions(x) + self.shortcut(x), inplace=True)


def resnet(size: Convolutional, classes: int = 1000) -> nn.Sequential:
    """Return a ResNet. ResNet-50 has 25,557,032 parameters and 4.1 billion multiply-adds for 224 x 224 pixels."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, size.width, 7, 2, 3, bias=False), nn.BatchNorm2d(size.width), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = size.width
    for stage, blocks in enumerate(size.blocks):
        for block in range(blocks):
            width = size.width << stage
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of English text. Each read splits a window into words, and looks up their numbers."""

    def __init__(self, context: int, vocabulary: int) -> None:
        self.context = context
        self.text = TEXT.decode()
        known = dict.fromkeys(re.findall(r"\w+|\W", self.text))
        self.number = {word: i % vocabulary for i, word in enumerate(known)}
        self.characters = 4 * (context + 1)  # words and separators have 2.7 characters on average
        self.count = (len(self.text) - self.characters) // 512

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = index * 512
        words = re.findall(r"\w+|\W", self.text[begin : begin + self.characters])
        ids = torch.tensor([self.number.get(word, 0) for word in words[: self.context + 1]])
        return {"ids": ids[:-1], "targets": ids[1:]}


# ---- jobs --------------------------------------------------------------------------------------------------

SIZE = sizes()


def seed_mlp() -> GpuJob:
    """Return the multi-layer perceptron of a tutorial on GPU utilization, which trains on a single batch."""
    features, hidden, batch_size = SIZE.perceptron
    x = torch.randn(batch_size, features, device=DEVICE)
    y = torch.randn(batch_size, features, device=DEVICE)
    return GpuJob(
        name="seed MLP",
        unit="samples",
        units=1,
        batch_size=batch_size,
        batches=lambda: [(x, y)] * 1000,
        model=lambda: nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features)),
        optimizer=torch.optim.Adam,
        loss_fn=functional.mse_loss,
    )


def case_study(batch_size: int) -> GpuJob:
    """Return GPT-2 medium on text that is split into words on each read, with a usual loader on the host."""
    size = SIZE.case_study
    windows = Windows(size.context, size.vocabulary)
    return GpuJob(
        name="case study",
        unit="tokens",
        units=size.context,
        batch_size=batch_size,
        batches=lambda: DataLoader(windows, batch_size, shuffle=True, drop_last=True),
        model=lambda: Gpt(size),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )


def _on_random_tokens(name: str, size: Transformer) -> GpuJob:
    ids = torch.randint(size.vocabulary, (8, size.batch_size, size.context + 1), device=DEVICE)
    return GpuJob(
        name=name,
        unit="tokens",
        units=size.context,
        batch_size=size.batch_size,
        batches=lambda: [{"ids": each[:, :-1].contiguous(), "targets": each[:, 1:].contiguous()} for each in ids],
        model=lambda: Gpt(size),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )


def gpt2() -> GpuJob:
    """Return GPT-2 of 124 million parameters, with windows of 1024 tokens."""
    return _on_random_tokens("GPT-2 124M", SIZE.gpt2)


def wide_gpt() -> GpuJob:
    """Return layers of a 7B model, as many as fit in memory with AdamW and with batches that fill the GPU."""
    return _on_random_tokens(f"7B-width GPT, {SIZE.wide.layers} layers", SIZE.wide)


def resnet50() -> GpuJob:
    """Return ResNet-50 on byte images in device memory."""
    size = SIZE.resnet50
    count = 8 * size.batch_size
    images = torch.randint(256, (count, 3, size.side, size.side), dtype=torch.uint8)
    loader = DataLoader(TensorDataset(images, torch.randint(1000, (count,))), size.batch_size, shuffle=True)
    return GpuJob(
        name="ResNet-50",
        unit="images",
        units=1,
        batch_size=size.batch_size,
        batches=lambda: InMemoryLoader(loader, device=DEVICE),
        model=lambda: Images(resnet(size)),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        loss_fn=functional.cross_entropy,
    )
