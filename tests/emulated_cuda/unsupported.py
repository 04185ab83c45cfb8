"""Tests of tests/gpu that have no meaning on emulated devices, with the reason."""

from __future__ import annotations

import pytest

CUPTI = "the profiler needs CUPTI, which needs a driver"
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
    "test_normalize.py::test_it_is_compiled_in_one_graph": TRITON,
    "test_profile.py::test_every_phase_has_kernels_and_the_gaps_are_what_is_left": CUPTI,
    "test_profile.py::test_a_wait_is_found_at_its_line_and_blamed_for_the_gap": CUPTI,
    "test_profile.py::test_a_script_has_its_copies_and_its_syncs": CUPTI,
}
"""Reasons, by the beginning of a test's name."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no meaning. Fail if a name is of no test."""
    files = {item.path.name for item in items}
    for name, reason in UNSUPPORTED.items():
        skipped = [item for item in items if f"{item.path.name}::{item.name}".startswith(name)]
        if name.split("::")[0] in files and not skipped:
            raise pytest.UsageError(f"no test begins with {name}")
        for item in skipped:
            item.add_marker(pytest.mark.skip(reason=reason))
