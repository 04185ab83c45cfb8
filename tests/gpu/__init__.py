"""Tests that need a GPU or emulated devices."""

import pytest

pytest.register_assert_rewrite("tests.gpu.trainings")
