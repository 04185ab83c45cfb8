"""Job 1: scikit-learn's 1,797 handwritten digits, 8x8 pixels, and a small convolutional network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatout.cli.demo_jobs.demo_job import DemoJob, Sample, Training

HELD_OUT = 360
"""Number of images for the final accuracy. The other 1,437 images are for training."""

MEAN, STD = 0.3053, 0.3760
"""Mean and standard deviation of the training pixels, scaled to [0, 1]."""


@dataclass(frozen=True)
class DigitsSize:
    """Size of the job.

    Attributes:
        width: channels of the first convolution. The other widths are multiples of ``width``.
        training: hyper-parameters.
        images: number of training images; None takes all 1,437.
    """

    width: int
    training: Training
    images: int | None = None


SIZES = {
    "cpu": DigitsSize(width=16, training=Training(epochs=60, batch_size=64, lr=1e-3)),
    "cuda": DigitsSize(width=128, training=Training(epochs=60, batch_size=128, lr=1e-3)),
    "quick": DigitsSize(width=16, training=Training(epochs=5, batch_size=16, lr=3e-3), images=320),
}


class DigitImages(Dataset[Sample]):
    """Images that become tensors one by one, as with torchvision's ``ToTensor`` and ``Normalize``."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images  # [N, 8, 8], float64, values 0..16
        self.labels = labels  # [N], int64

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        """Return the normalized image ([1, 8, 8], float32) and its label (0-dim, int64)."""
        image = self.images[index].astype(np.float32) / 16.0
        tensor = torch.from_numpy(image).unsqueeze(0)
        tensor = (tensor - MEAN) / STD
        return tensor, torch.tensor(int(self.labels[index]))


def load(limit: int | None = None) -> tuple[DigitImages, DigitImages]:
    """Read the digits, and split the images in the same way every time.

    Args:
        limit: number of training images; None takes all.

    Returns:
        Training and held-out images. No image is in both.

    Raises:
        ImportError: scikit-learn, which contains the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits job needs scikit-learn, which carries the images: pip install 'flatout[demo]'"
        ) from error

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:][:limit]
    images, labels = digits.images, digits.target.astype(np.int64)
    return DigitImages(images[train], labels[train]), DigitImages(images[held_out], labels[held_out])


def build_model(width: int) -> nn.Sequential:
    """Return two blocks of convolution, batch normalization and pooling, then two linear layers with dropout.

    Args:
        width: channels of the first convolution. The second convolution has twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 4 * width),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(4 * width, 10),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose highest score is the right class, 0-dim float32."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


def build(size: DigitsSize) -> DemoJob:
    """Return the job at one of ``SIZES``."""
    train, held_out = load(size.images)
    return DemoJob(
        name="digits",
        title=f"handwritten digits: a small CNN on {len(train):,} images of 8x8 pixels",
        unit="images",
        train=train,
        held_out=held_out,
        build_model=lambda: build_model(size.width),
        loss_fn=F.cross_entropy,
        training=size.training,
        metrics={"accuracy": accuracy},
    )
