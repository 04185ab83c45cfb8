"""Datasets with random augmentation, by the generator that they draw from."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset

GLOBAL = np.random.default_rng(0)

HELD = {
    "torch.Generator": torch.Generator,
    "numpy.Generator": lambda: np.random.default_rng(0),
    "numpy.RandomState": lambda: np.random.RandomState(0),
    "random.Random": lambda: random.Random(0),
    "of the module": lambda: None,
}
"""Makers of generators that a dataset holds, or that its code names."""


class Augmented(Dataset):
    """Samples that hold their number and a random one.

    Args:
        how: "torch", "random" or "numpy" for a global generator, or a key of ``HELD``.
    """

    def __init__(self, how):
        self.how = how
        self.rng = HELD.get(how, lambda: None)()

    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((8,), float(i)), GLOBAL.random() if self.how == "of the module" else self._draw()

    def _draw(self):
        if self.how in ("torch", "torch.Generator"):
            return torch.rand((), generator=self.rng, dtype=torch.float64).item()
        if self.how == "numpy":
            return np.random.rand()
        if self.how == "numpy.RandomState":
            return self.rng.random_sample()
        return random.random() if self.rng is None else self.rng.random()


class Hidden(Dataset):
    """Samples that depend on the number of samples made before."""

    def __init__(self):
        self.made = 0

    def __len__(self):
        return 32

    def __getitem__(self, i):
        self.made += 1
        return torch.full((8,), float(self.made)), 0.0
