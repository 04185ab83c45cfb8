"""Random bits of stochastic rounding: Philox, with a counter of position, tensor and step."""

from __future__ import annotations

import pytest

from tests.optim.random_bits import PUBLISHED, assert_rounding_is_philox, philox


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_model_gives_the_published_vectors(counter, key, expected):
    assert philox(counter, key) == expected


def test_rounding_on_the_cpu_draws_from_philox():
    assert_rounding_is_philox("cpu")
