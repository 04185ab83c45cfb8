"""Plugin for pytest that skips tests without meaning on emulated devices, and slow tests unless ``--all`` is given."""

from __future__ import annotations

import pytest

CUPTI = "the profiler needs CUPTI, which needs a driver"
NCCL = "NCCL is not emulated"
NVML = "NVML is not emulated"
TRITON = "code of Triton and NVRTC is for a GPU"
CUDNN = "cuDNN does not run: torch's CPU kernels take its place"
TF32 = "torch's CPU kernels do not round to TF32"
SIZE = "steps are too small here to run out of memory"
BLOCKS = "the allocator's blocks are large beside the memory of a step here, so its need is estimated too low"

UNSUPPORTED = {
    "test_flags.py::test_a_shape_that_ran_before_is_searched_for_once": CUDNN,
    "test_flags.py::test_products_are_rounded_while_tf32_is_on": TF32,
    "test_graphs.py::test_compiled_training_is_the_plain_training": TRITON,
    "test_graphs.py::test_outputs_of_graphs_outlive_the_next_call": TRITON,
    "test_graphs.py::test_torchscript_trains_like_the_plain_model[bf16-": TRITON,
    "test_memory.py::test_the_fastest_batch_size_is_found_with_one_failure_at_the_most": BLOCKS,
    "test_memory.py::test_the_last_word_has_the_figures": SIZE,
    "test_nccl.py::": NCCL,
    "test_normalize.py::test_it_is_compiled_in_one_graph": TRITON,
    "test_profile.py::test_the_phases_are_the_step_and_the_operators_have_kernels": CUPTI,
    "test_profile.py::test_kernels_of_a_cuda_graph_count_as_work": CUPTI,
    "test_training_loops.py::test_commands_about_the_machine[monitor --once]": NVML,
    "test_training_techniques.py::test_alone[compile=default]": TRITON,
}
"""Reasons, by the beginning of a test's name."""


SLOW = {
    "test_update_path_options.py::test_thousands_of_tensors_equal_one": ("[5000-Adam]", "[5000-SGD]", "[5000-Lion]"),
    "test_update_path_options.py::test_2000_tensors_take_two_launches_and_no_wait": ("-Adam]", "-SGD]", "-Lion]"),
}
"""Tests that take 3 to 10 seconds each, with the ends of their names.

Tests of other rules run the same code between the kernels.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip unsupported and slow tests. Fail if a name matches no test."""
    for name, reason in UNSUPPORTED.items():
        _skip(items, name, ("",), reason)
    for name, ends in SLOW.items():
        if not config.getoption("--all"):
            _skip(items, name, ends, "slow: make test-emulated-all")


def _skip(items: list[pytest.Item], begin: str, ends: tuple[str, ...], reason: str) -> None:
    named = {item: f"{item.path.name}::{item.name}" for item in items}
    skipped = [item for item, name in named.items() if name.startswith(begin) and name.endswith(ends)]
    if not skipped and any(item.path.name == begin.split("::")[0] for item in items):
        raise pytest.UsageError(f"no test begins with {begin}")
    for item in skipped:
        item.add_marker(pytest.mark.skip(reason=reason))
