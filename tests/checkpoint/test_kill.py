"""``kill -9`` at any moment: every restart goes on, and training ends with the bits of one that nobody killed."""

import multiprocessing
import random
import time

import pytest

from flatout.checkpoint import read
from tests.checkpoint.test_file import equal
from tests.checkpoint.training import KINDS, train_and_tell

KILLS = 100


def start(kind, folder):
    process = multiprocessing.get_context("forkserver").Process(target=train_and_tell, args=(kind, folder))
    process.start()
    return process


def finished(process):
    process.join(120)
    return process.exitcode == 0


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    kinds = [*KINDS]
    expected, seconds = {}, {}
    assert finished(start(kinds[0], tmp_path / "the first starts the server"))
    for kind in kinds:
        begun = time.perf_counter()
        assert finished(start(kind, tmp_path / kind))
        seconds[kind] = time.perf_counter() - begun
        expected[kind] = read(tmp_path / kind / "result.pt")
    moments = random.Random(0)
    kills = trainings = 0
    while kills < KILLS:
        kind = kinds[trainings % len(kinds)]
        folder = tmp_path / f"{kind} {trainings}"
        trainings += 1
        for _ in range(4):
            process = start(kind, folder)
            time.sleep(moments.uniform(0, seconds[kind]))
            process.kill()
            process.join()
            kills += process.exitcode == -9
        assert finished(start(kind, folder))
        found = read(folder / "result.pt")
        assert found["history"] == expected[kind]["history"]
        assert equal(found["state"]["job"], expected[kind]["state"]["job"])
        assert equal(found["state"]["random"], expected[kind]["state"]["random"])
