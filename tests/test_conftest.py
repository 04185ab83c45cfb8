from __future__ import annotations

import random

import numpy as np
import pytest
import torch

drawn: list[tuple[float, float, float]] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_random_states_come_back(turn: int) -> None:
    drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[-1] == drawn[0]
