"""Log of tuning on stderr: ``FLATOUT_LOG``."""

from __future__ import annotations

import logging

import pytest

from flatout.tuning.pairs import Noise, PairedTrial
from flatout.tuning.stopwatch import Block
from tests.helpers import run_script


def block(seconds: float) -> Block:
    return Block((seconds,), seconds, 0)


SCRIPT = """
import logging, sys
sys.stderr.write("begin\\n")
import flatout
logging.getLogger("flatout.tuning").debug("fine")
logging.getLogger("flatout.tuning").info("coarse")
"""


@pytest.mark.parametrize(
    ("wanted", "shown"), [("", []), ("debug", ["fine", "coarse"]), ("INFO", ["coarse"]), ("warning", [])]
)
def test_the_variable_names_the_level(wanted: str, shown: list[str]) -> None:
    lines = run_script(SCRIPT, FLATOUT_LOG=wanted).stderr.partition("begin\n")[2].splitlines()
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("flatout.tuning: ")] == shown


def test_an_unknown_level_is_named_on_one_line() -> None:
    lines = run_script(SCRIPT, FLATOUT_LOG="loud").stderr.partition("begin\n")[2].splitlines()
    assert [("loud" in line, "debug" in line) for line in lines] == [(True, True)]


def test_each_pair_and_the_noise_floor_are_a_record(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "flatout.trials")
    monkeypatch.setattr(logging.getLogger("flatout.trials"), "disabled", False)
    pairs = [(block(1.0), block(1.01)), (block(1.02), block(1.0))]
    trial = PairedTrial(Noise.of(pairs, one_thread=False))
    before = len(caplog.records)
    for pair in pairs:
        trial.add(pair)
    assert (before, len(caplog.records)) == (1, 3)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
