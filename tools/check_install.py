"""Check of an installed flatout: imports it, calls native code, and tunes a small training.

Usage, in an environment that has flatout and no compiler on its PATH: python tools/check_install.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout import native


def main() -> None:
    """Raise AssertionError if a part of the installation fails."""
    compilers = [name for name in ("c++", "cc", "g++", "gcc", "nvcc", "cmake", "ninja") if shutil.which(name)]
    assert not compilers, f"the PATH must have no compiler, got {compilers}"
    assert "site-packages" in flatout.__file__, f"flatout must be installed, got {flatout.__file__}"
    assert Path(sys.prefix) in Path(flatout.__file__).parents, f"{flatout.__file__} is of another environment"
    data = TensorDataset(torch.randn(512, 16), torch.randint(4, (512,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    run = flatout.optimize(model, loader, optimizer, cross_entropy, expected_steps=1000, budget=4)
    losses = [float(run.step(batch)) for _ in range(2) for batch in run.loader]
    assert len(losses) == 16, f"two epochs must have 16 steps, got {len(losses)}"
    assert all(loss == loss for loss in losses), f"losses must be numbers, got {losses}"
    kept = sorted(run.plan.decisions)
    run.undo()
    kernels = "CUDA kernels" if native.BUILT_WITH_CUDA else "no CUDA kernels"
    print(
        f"flatout {flatout.__version__} with {kernels}, torch {torch.__version__}: kept {', '.join(kept) or 'nothing'}"
    )


if __name__ == "__main__":
    main()
