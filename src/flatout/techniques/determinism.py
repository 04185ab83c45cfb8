"""Neighbour: determinism and seeding."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from flatout.techniques.base import NotApplicable, Rule, Switch

if TYPE_CHECKING:
    from flatout.job import Job


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class DeterministicSwitch(Switch):
    """torch's deterministic algorithms, process-wide."""

    label = value = "deterministic"

    def __init__(self) -> None:
        cudnn = torch.backends.cudnn
        self._before = (
            cudnn.benchmark,
            cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._cublas = os.environ.get(CUBLAS)

    def _turn_on(self) -> None:
        # cuBLAS reads this when its handle is made; 8 buffers of 4,096 KiB, as torch's reproducibility notes say.
        os.environ.setdefault(CUBLAS, ":4096:8")
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        torch.use_deterministic_algorithms(True)

    def _turn_off(self) -> None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._before[:2]
        torch.use_deterministic_algorithms(self._before[2], warn_only=self._before[3])
        if self._cublas is None:
            os.environ.pop(CUBLAS, None)


class Determinism(Rule):
    """Algorithms whose results do not depend on scheduling, and no decision by timing that changes numerics.

    When it helps: debugging and comparing runs bit by bit. When it hurts: deterministic kernels can be slower, and
    operators without one raise.
    """

    name = "determinism"
    title = "determinism and seeding"
    kept_because = "torch uses deterministic algorithms, and no timing decides about anything that changes numerics"
    exact = True

    def check(self, job: Job) -> None:
        """On request only."""
        if not job.deterministic:
            raise NotApplicable("not asked for: optimize(deterministic=True, seed=...) turns it on")

    def switch(self, job: Job) -> Switch:
        """The process-wide flags."""
        return DeterministicSwitch()


def seed_all(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
