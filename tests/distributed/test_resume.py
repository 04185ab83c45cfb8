"""Resumed trainings under torchrun: after kills, and on another number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import launch

pytestmark = pytest.mark.slow

SCRIPT = (Path(__file__).parent / "scripts" / "resumable.py").read_text()
EPOCHS = 4
LIMIT = 240.0
"""Seconds after which a launch fails. Each attempt starts four processes, which takes 15 seconds on a busy machine."""
KILLS = 3
"""Number of kills in a launch. Every attempt except the last one is killed."""


def trained(folder: Path, ranks: int, *arguments: object, **variables: str) -> list[dict[str, Any]]:
    """Run the script, and return the result of each rank."""
    folder.mkdir(exist_ok=True)
    environment = {"PYTHONPATH": str(launch.ROOT), "FLATOUT_CACHE": "off", **variables}
    texts = [str(folder), *map(str, arguments)]
    if ranks == 1:
        ended = launch.alone(SCRIPT, *texts, **environment)
    else:
        options = (f"--max-restarts={KILLS}",)
        ended = launch.torchrun(SCRIPT, *texts, ranks=ranks, options=options, limit=LIMIT, **environment)
    assert ended.status == [0], ended.err
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def seen(folder: Path) -> Counter[int]:
    """Return how often each sample was used, and reset the record."""
    files = list(folder.glob("seen-*"))
    samples = Counter(int(line) for file in files for line in file.read_text().split())
    for file in files:
        file.unlink()
    return samples


@pytest.fixture(scope="module", params=[2, 4])
def unbroken(request, tmp_path_factory):
    return request.param, trained(tmp_path_factory.mktemp("unbroken") / "run", request.param, EPOCHS, 0, 0)


def test_killed_ranks_come_back_and_end_bit_equal(unbroken, tmp_path, request):
    ranks, expected = unbroken
    launches = request.config.getoption("--jobs") or 1  # each has three kills
    attempts = 0
    for seed in range(launches):
        found = trained(tmp_path / str(seed), ranks, EPOCHS, seed, KILLS)
        attempts += found[0]["attempt"]
        for each in found:
            assert each["history"] == expected[0]["history"]
            for name, value in expected[0]["state"].items():
                assert torch.equal(each["state"][name], value), (seed, name)
    assert attempts >= launches


def test_a_training_resumes_on_other_numbers_of_ranks(tmp_path):
    """Train on 2, 4 and then 1 ranks, and stop in mid-epoch.

    Each epoch uses each sample once, with the losses of one rank.
    """
    whole = trained(tmp_path / "whole", 1, EPOCHS, 0, 0, DROPS="0")
    folder = tmp_path / "parts"
    trained(folder, 2, EPOCHS, 0, 0, DROPS="0", LAST_STEP="5")
    parts = [seen(folder)]
    trained(folder, 4, EPOCHS, 0, 0, DROPS="0", LAST_STEP="30")
    parts.append(seen(folder))
    (last,) = trained(folder, 1, EPOCHS, 0, 0, DROPS="0")
    parts.append(seen(folder))
    assert [sum(part.values()) for part in parts] == [5 * 8, 2 * 90 + 6 * 8 - 5 * 8, 4 * 90 - 2 * 90 - 6 * 8]
    assert parts[0] + parts[1] + parts[2] == Counter(dict.fromkeys(range(90), EPOCHS))
    losses = [row["loss"] for row in last["history"]]
    torch.testing.assert_close(losses, [row["loss"] for row in whole[0]["history"]], rtol=1e-5, atol=1e-6)
    for name, value in whole[0]["state"].items():
        torch.testing.assert_close(last["state"][name], value, rtol=1e-4, atol=1e-5)
