"""Suites of other projects that run with flatout's classes, and their places in a checkout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """Test files of one project.

    Attributes:
        name: name of the row in the table.
        project: folder of the checkout, as ``git clone`` names it.
        parts: parts of torch that flatout's classes replace, see ``site/flatout_in_place.py``.
        tests: files and folders, relative to ``folder``. Missing ones are left out.
        folder: folder of the checkout in which pytest runs.
        packages: folders of the checkout to import from.
        version_file: the file of the checkout that holds its version.
        select: pytest's ``-k``.
    """

    name: str
    project: str
    parts: tuple[str, ...]
    tests: tuple[str, ...]
    folder: str = "."
    packages: tuple[str, ...] = ()
    version_file: str = "version.txt"
    select: str = ""

    def found(self, sources: Path) -> list[str]:
        """Return the tests that the checkout under ``sources`` has."""
        return [test for test in self.tests if (sources / self.project / self.folder / test).exists()]

    def version(self, sources: Path) -> str:
        """Return the version of the checkout under ``sources``."""
        file = sources / self.project / self.version_file
        # A version file holds the bare version, or sets `__version__` below a license that contains another number.
        found = re.search(r"(?:\A|__version__ = [\"'])(\d+\.\d+[.\w]*)", file.read_text()) if file.exists() else None
        return found[1] if found else "unknown"


def _torch(name: str, parts: tuple[str, ...], *tests: str, select: str = "") -> Suite:
    return Suite(name, "pytorch", parts, tests, folder="test", select=select)


def _lightning(name: str, package: str, *tests: str) -> Suite:
    return Suite(
        name,
        "pytorch-lightning",
        TRAINING,
        tuple(f"{package}/{test}" for test in tests),
        folder="tests",
        packages=("src", "tests"),
        version_file="src/version.info",
    )


TRAINING = ("optim", "amp", "clip")
# torch's tests of DataLoader over tensors, because an InMemoryLoader takes no other dataset
OF_TENSORS = "TestDataLoader and not Persistent and (sequential or shuffle or random_sampler or batch or len or last)"
SUITES = (
    _torch("torch, learning-rate schedulers", ("optim",), "optim/test_lrscheduler.py"),
    _torch("torch, optimizers", ("optim",), "test_optim.py", select="not TestLRScheduler and not TestSWAUtils"),
    _torch("torch, averaged weights", ("optim", "data"), "optim/test_swa_utils.py"),
    _torch("torch, GradScaler", TRAINING, "test_torch.py", select="grad_scal or pickle_gradscaler"),
    _torch("torch, clip_grad_norm_", ("clip",), "test_nn.py", select="clip_grad_norm"),
    _torch("torch, DataLoader in a Prefetcher", ("data",), "test_dataloader.py"),
    _torch("torch, DataLoader in an InMemoryLoader", ("memory",), "test_dataloader.py", select=OF_TENSORS),
    Suite(
        "timm, optimizers and schedulers",
        "pytorch-image-models",
        ("optim",),
        ("tests/test_optim.py", "tests/test_scheduler.py"),
        packages=(".",),
        version_file="timm/version.py",
    ),
    _lightning(
        "Lightning, Fabric",
        "tests_fabric",
        "plugins/precision",
        "strategies/test_single_device.py",
        "strategies/test_strategy.py",
        "test_fabric.py",
        "test_wrappers.py",
        "utilities/test_optimizer.py",
    ),
    _lightning(
        "Lightning, Trainer",
        "tests_pytorch",
        "callbacks/test_gradient_accumulation_scheduler.py",
        "callbacks/test_lr_monitor.py",
        "callbacks/test_stochastic_weight_avg.py",
        "callbacks/test_weight_averaging.py",
        "core/test_lightning_optimizer.py",
        "loops/optimization",
        "models/test_amp.py",
        "models/test_hooks.py",
        "models/test_restore.py",
        "plugins",
        "trainer/optimization",
    ),
    Suite(
        "accelerate",
        "accelerate",
        TRAINING,
        tuple(
            f"tests/test_{name}.py"
            for name in ("accelerator", "grad_sync", "kwargs_handlers", "optimizer", "scheduler", "state_checkpointing")
        ),
        packages=("src",),
        version_file="src/accelerate/__init__.py",
    ),
)
