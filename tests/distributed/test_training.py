"""Unchanged scripts under torchrun, which train on several ranks as in one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import launch
from tests.frameworks import imported

pytestmark = pytest.mark.slow

SCRIPTS = {"quickstart": "", "hugging_face": "transformers"}


def records(script: str, folder: Path, ranks: int, **variables: str) -> list[dict[str, Any]]:
    """Run a script, by ``python`` for one rank, and return the record of each rank."""
    folder.mkdir()
    text = (Path(__file__).parent / "scripts" / f"{script}.py").read_text()
    environment = {"PYTHONPATH": str(launch.ROOT), "HF_HUB_OFFLINE": "1", "FLATOUT_CACHE": "off", **variables}
    if ranks == 1:
        ended = launch.alone(text, str(folder), **environment)
    else:
        ended = launch.torchrun(text, str(folder), ranks=ranks, **environment)
    assert ended.status == [0], ended.err
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the record of a script in one process. The script runs only once."""
    found: dict[str, dict[str, Any]] = {}

    def record(script: str) -> dict[str, Any]:
        if script not in found:
            folder = tmp_path_factory.mktemp("alone") / script
            (found[script],) = records(script, folder, 1, FLATOUT_BUDGET="0", OMP_NUM_THREADS="1")
        return found[script]

    return record


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unchanged_script_trains_as_in_one_process(alone, tmp_path, script, ranks):
    if SCRIPTS[script]:
        imported(SCRIPTS[script])
    reference = alone(script)
    found = records(script, tmp_path / "ranks", ranks, FLATOUT_BUDGET="0")
    for record in found:
        assert record["weights"] == found[0]["weights"]
        assert record["losses"] == found[0]["losses"]
        assert record["class"] == reference["class"]
        assert record["hooks"] == 0
        assert list(record["state"]) == list(reference["state"])
    assert len(set(found[0]["weights"])) == len(found[0]["weights"])  # each epoch has trained
    torch.testing.assert_close(found[0]["losses"], reference["losses"], rtol=1e-5, atol=1e-6)
    for name, value in reference["state"].items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-4, atol=1e-5)
    for epoch, expected in enumerate(reference["samples"]):
        seen = Counter(sample for record in found for sample in record["samples"][epoch])
        stand_ins = sum(seen.values()) - len(expected)
        assert 0 <= stand_ins < ranks
        assert set(seen) == set(expected)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tuned_script_decides_and_trains_alike_on_all_ranks(tmp_path, script):
    if SCRIPTS[script]:
        imported(SCRIPTS[script])
    found = records(script, tmp_path / "ranks", 2, FLATOUT_BUDGET="4")
    assert found[1]["decisions"] == found[0]["decisions"]
    assert found[1]["weights"] == found[0]["weights"]
    assert found[1]["losses"] == found[0]["losses"]
