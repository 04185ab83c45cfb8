"""``kill -9`` at any moment. Every restart resumes, and the result is bit-equal to uninterrupted training."""

import multiprocessing
import random
import time

import pytest

from flatout.training.checkpoint import read
from tests.training.checkpoint.test_file import equal
from tests.training.checkpoint.training import KINDS, train_and_tell

KILLS = 30
"""Number of kills without ``--jobs``."""


def start(kind, folder):
    process = multiprocessing.get_context("forkserver").Process(target=train_and_tell, args=(kind, folder))
    process.start()
    return process


def finished(process):
    process.join(120)
    return process.exitcode == 0


def steps_saved(folder):
    return max((int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.pt")), default=0)


def kill(process, folder, step, seconds):
    """Kill the process ``seconds`` after it has saved the checkpoint of ``step``, unless the process has ended."""
    while process.is_alive() and steps_saved(folder) < step:
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.join()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, request):
    kinds = [*KINDS]
    expected, steps = {}, {}
    for kind in kinds:
        assert finished(start(kind, tmp_path / kind))
        expected[kind], steps[kind] = read(tmp_path / kind / "result.pt"), steps_saved(tmp_path / kind)
    moments = random.Random(0)
    kills = trainings = 0
    while kills < (request.config.getoption("--jobs") or KILLS):
        kind = kinds[trainings % len(kinds)]
        folder = tmp_path / f"{kind} {trainings}"
        trainings += 1
        for step in sorted(moments.choices(range(steps[kind]), k=4)):
            process = start(kind, folder)
            kill(process, folder, step, moments.choice([0, 0.003, 0.03, 0.3]) * moments.random())
            kills += process.exitcode == -9
        assert finished(start(kind, folder))
        found = read(folder / "result.pt")
        assert found["history"] == expected[kind]["history"]
        assert equal(found["state"]["job"], expected[kind]["state"]["job"])
        assert equal(found["state"]["random"], expected[kind]["state"]["random"])
