"""Seven jobs of benchmarks/optimize.py."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from examples import digits, gpt


@dataclass(frozen=True)
class Job:
    """Training job.

    Attributes:
        name: name in the benchmark.
        dataset: map-style dataset. Its samples are pairs or mappings of tensors.
        batch_size: samples per step.
        model: makes a newly initialized model on the CPU.
        optimizer: class of the optimizer in torch.
        lr: learning rate.
        loss_fn: ``(output, target) -> scalar`` for pairs; None if the model's output has ``.loss``.
        attends: True if the model has attention, for which there are several kernels.
        draws: True if samples draw random numbers, so that each epoch makes them again.
    """

    name: str
    dataset: Dataset[Any]
    batch_size: int
    model: Callable[[], nn.Module]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    lr: float = 1e-3
    loss_fn: Callable[[Any, Tensor], Tensor] | None = functional.cross_entropy
    attends: bool = False
    draws: bool = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch on the model's device."""
        return model(**batch).loss if self.loss_fn is None else self.loss_fn(model(batch[0]), batch[1])


class Images(nn.Module):
    """Net for byte images, which scales bytes to [0, 1] first."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [N, 3, H, W] to scores."""
        return self.net(images.float() / 255)


class Sentences(Dataset[dict[str, Tensor]]):
    """Token ids with their class, as mappings."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(vocabulary, (samples, length), generator=generator)
        self.labels = self.ids.sum(1) % 2

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def seed_mlp() -> Job:
    """Return a multi-layer perceptron, as in many tutorials on GPU utilization."""
    x = torch.randn(8192, 1024, generator=torch.Generator().manual_seed(0))
    y = torch.randn(8192, 1024, generator=torch.Generator().manual_seed(1))
    layers = lambda: nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))  # noqa: E731
    return Job("seed MLP", TensorDataset(x, y), 512, layers, torch.optim.Adam, loss_fn=functional.mse_loss)


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text and the bytes after each of their bytes. A window becomes a tensor when it is read."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        ids = torch.tensor(list(self.text[start : start + self.context + 1]))
        return ids[:-1], ids[1:]


def digits_cnn() -> Job:
    """Return the CNN of examples/digits.py."""
    width, batch_size = (128, 128) if torch.cuda.is_available() else (16, 64)
    train, _ = digits.load()
    return Job("digits CNN", train, batch_size, lambda: digits.build_model(width))


def byte_gpt() -> Job:
    """Return the GPT of examples/gpt.py, on windows that become tensors when they are read."""
    sizes, batch_size = ((8, 8, 512, 256), 64) if torch.cuda.is_available() else ((2, 4, 64, 64), 32)
    windows = TextWindows(gpt.TEXT[: len(gpt.TEXT) * 9 // 10], context=sizes[-1])
    model = lambda: gpt.GPT(*sizes)  # noqa: E731
    loss = lambda scores, targets: functional.cross_entropy(scores.flatten(0, 1), targets.flatten())  # noqa: E731
    return Job("byte GPT", windows, batch_size, model, loss_fn=loss, attends=True)


def resnet(samples: int = 2048, batch_size: int = 32) -> Job:
    """Return ResNet-18 on byte images of 64 x 64 pixels in memory."""
    from torchvision.models import resnet18

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (samples, 3, 64, 64), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    net = lambda: Images(resnet18(num_classes=10))  # noqa: E731
    return Job("ResNet-18", TensorDataset(images, labels), batch_size, net, torch.optim.SGD, lr=0.01)


@functools.cache
def image_files(samples: int) -> str:
    """Return a folder of JPEG files of 500 x 375 pixels in two class folders, with detail at all scales."""
    from PIL import Image

    folder, generator = Path(tempfile.mkdtemp(prefix="flatout-images-")), np.random.default_rng(0)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for i in range(samples):
        coarse = Image.fromarray(generator.integers(0, 255, (46, 62, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        pixels = (pixels + generator.integers(-20, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
        (folder / str(i % 2)).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / str(i % 2) / f"{i:04}.jpg", quality=90)
    return str(folder)


def resnet_files(samples: int = 512, batch_size: int = 32) -> Job:
    """Return ResNet-18 on crops of 64 x 64 pixels of JPEG files."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.models import resnet18

    draws = [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip()]
    floats = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    dataset = ImageFolder(image_files(samples), transforms.Compose(draws + floats))
    net = lambda: resnet18(num_classes=2)  # noqa: E731
    return Job("ResNet-18 on files", dataset, batch_size, net, torch.optim.SGD, lr=0.01, draws=True)


def bert_tiny() -> Job:
    """Return BERT-tiny (2 layers, 128 features) as a classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8192, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = lambda: BertForSequenceClassification(config)  # noqa: E731
    return Job("BERT-tiny", Sentences(4096, 64, 8192), 32, model, loss_fn=None, attends=True)


def tabular() -> Job:
    """Return a small perceptron on a table. Loading the rows takes most of the time."""
    x = torch.randn(200_000, 64, generator=torch.Generator().manual_seed(0))
    y = (x[:, :8].sum(1) > 0).long()
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    )
    return Job("tabular MLP", TensorDataset(x, y), 1024, layers)


JOBS = {make.__name__: make for make in (seed_mlp, digits_cnn, byte_gpt, resnet, resnet_files, bert_tiny, tabular)}
