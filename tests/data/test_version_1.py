"""States that version 1 saved in mid-epoch: the rest of the training is that of an uninterrupted run of version 1."""

from __future__ import annotations

import gzip
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.core.random_state import RandomState
from tests.data.test_resume import LOADERS, WRAPPERS, Log, dataset, held_by, scramble

FILE = Path(__file__).parent / "version_1.pt.gz"
SAVED: dict[str, Any] = torch.load(io.BytesIO(gzip.decompress(FILE.read_bytes())))
"""Name, loader, state, states of the global generators, indices of the following epochs, and a hash of the generators
at the ends of these epochs."""


def resumed(saved: Any, state: Any, generators: Any) -> tuple[Any, list[Any]]:
    """Return a loader that has loaded a state, and the generators that it holds."""
    scramble()
    loader = LOADERS[saved["kind"]](dataset())
    wrapped = WRAPPERS[saved["wrapper"]](loader)
    RandomState.capture().write(generators)
    wrapped.load_state_dict(state)
    return wrapped, held_by(loader)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("again", [False, True], ids=["once", "saved again"])
def test_goes_on_as_version_1_does(name: str, again: bool) -> None:
    saved, log = SAVED[name], Log()
    state, generators = saved["state"], saved["generators"]
    first: list[Any] = []
    if again and saved["epochs"][0]:
        wrapped, held = resumed(saved, state, generators)
        state, generators = log.run(wrapped, held, 1, (0, 1))
        first, log = [batch[0] for batch in log.epochs[0]], Log()
    wrapped, held = resumed(saved, state, generators)
    log.run(wrapped, held, len(saved["epochs"]))
    epochs = [[batch[0] for batch in epoch] for epoch in log.epochs]
    assert [first + epochs[0], *epochs[1:]] == saved["epochs"]
    assert hashlib.sha256(repr(log.generators).encode()).hexdigest() == saved["digest"]
