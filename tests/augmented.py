"""Datasets with random augmentation, which draw from different kinds of generators."""

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
"""Constructors of generators that a dataset holds, by name. "of the module" means a global variable."""


class Augmented(Dataset):
    """Dataset whose samples are an index and a random number.

    Args:
        how: the generator: "torch", "random" or "numpy" for a global one, or a key of ``HELD``.
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
    """Dataset whose samples depend on the number of samples made before."""

    def __init__(self):
        self.made = 0

    def __len__(self):
        return 32

    def __getitem__(self, i):
        self.made += 1
        return torch.full((8,), float(self.made)), 0.0
