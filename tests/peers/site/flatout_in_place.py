"""pytest plugin that replaces torch's classes by flatout's, and writes the outcome of each test to a file.

``FLATOUT_IN_PLACE`` names the parts to replace, separated by commas. Without this variable torch's own classes run.
``FLATOUT_OUTCOMES`` is the JSON file that the outcomes go to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

PARTS = [part for part in os.environ.get("FLATOUT_IN_PLACE", "").split(",") if part]


def replace(name: str, new: object, *modules: ModuleType) -> None:
    for module in modules:
        assert hasattr(module, name), f"torch has moved {module.__name__}.{name}"
        setattr(module, name, new)


def replace_optimizers() -> None:
    import flatout.optim

    for name in ("SGD", "Adam", "AdamW"):
        replace(name, getattr(flatout.optim, name), torch.optim, sys.modules[f"torch.optim.{name.lower()}"])


def replace_scaler() -> None:
    import flatout.amp

    replace("GradScaler", flatout.amp.GradScaler, torch, torch.amp, torch.amp.grad_scaler)


def replace_clipping() -> None:
    import flatout.amp

    replace("clip_grad_norm_", flatout.amp.clip_grad_norm_, torch.nn.utils, torch.nn.utils.clip_grad)


def replace_loaders(*, in_memory: bool = False) -> None:
    from flatout.data import InMemoryLoader, Prefetcher, why_not_in_memory

    torchs = torch.utils.data.DataLoader

    class Epoch:
        """Epoch of a prefetcher. torch's tests also read attributes of torch's iterator."""

        def __init__(self, batches: Any) -> None:
            self.batches = batches
            self.torchs = batches._epoch.batches

        def __iter__(self) -> Epoch:
            return self

        def __next__(self) -> Any:
            return next(self.batches)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["torchs"], name)

    class AnyLoader(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return type.__instancecheck__(cls, instance) or isinstance(instance, torchs)

    class DataLoader(Prefetcher, metaclass=AnyLoader):
        """Prefetcher of the loader that a test creates, with the loader's other attributes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            loader: Any = torchs(*args, **kwargs)
            if in_memory and not why_not_in_memory(loader):
                loader = InMemoryLoader(loader)
            super().__init__(loader, "cpu")

        def __iter__(self) -> Any:
            return Epoch(super().__iter__())

        def __class_getitem__(cls, _: Any) -> type:
            return cls

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["loader"], name)

    replace("DataLoader", DataLoader, torch.utils.data)


REPLACE = {
    "optim": replace_optimizers,
    "amp": replace_scaler,
    "clip": replace_clipping,
    "data": replace_loaders,
    "memory": lambda: replace_loaders(in_memory=True),
}
for part in PARTS:
    REPLACE[part]()


def note(report: pytest.TestReport | pytest.CollectReport, outcome: str) -> None:
    """Append to the file at once, because a test may end the process."""
    if path := os.environ.get("FLATOUT_OUTCOMES"):
        with Path(path).open("a") as file:
            print(json.dumps([report.nodeid, outcome, report.longreprtext[-3000:]]), file=file)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "rerun" and (report.when == "call" or not report.passed):
        note(report, "skipped" if hasattr(report, "wasxfail") else report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(report, "failed")
