"""Numbers in words, the same wherever they are shown."""

from __future__ import annotations

import math

import pytest

from flatout import words
from flatout.mfu.reading import Reading


@pytest.mark.parametrize(
    ("part", "digits", "said"),
    [
        (0.412, None, "41 %"),
        (0.0994, None, "9.9 %"),
        (0.0996, None, "10 %"),
        (1.0, None, "100 %"),
        (0.0, None, "0.0 %"),
        (0.41, 1, "41.0 %"),
        (None, None, ""),
    ],
)
def test_share(part: float | None, digits: int | None, said: str) -> None:
    assert words.share(part, digits) == said


@pytest.mark.parametrize(
    ("value", "said"), [(12_340.4, "12,340"), (9.87, "9.9"), (2.0, "2"), (0.25, "0.25"), (0, "0"), (math.inf, "?")]
)
def test_count(value: float, said: str) -> None:
    assert words.count(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (12.34 * 2**10, "12.3 KiB"),
        (310 * 2**20, "310 MiB"),
        (1.21 * 2**30, "1.21 GiB"),
        (4000 * 2**40, "4000 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_size_of(value: float, said: str) -> None:
    assert words.size_of(value) == said


def test_capital() -> None:
    assert words.capital("the GPU idles") == "The GPU idles"
    assert words.capital("") == ""


def test_large_rates_and_long_steps_are_told_in_plain_numbers() -> None:
    reading = Reading(3, 9, 9, 4.5, 1.5, 1_234_567.0, 45.4, 1.5e12, 0.5, 0.5, 0.25, None)
    told = "3 steps, 1,500 ms a step, 1,234,567 samples/s, 45 tokens/s, 1.5 TFLOP/s, MFU 50.0 %, stall 25.0 %"
    assert str(reading) == told
