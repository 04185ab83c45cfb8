"""Kernel resources assigned by nvcc, compared with the committed table."""

from __future__ import annotations

import pytest

from flatout import native
from tests.native import resource_table
from tests.native.resource_table import ARCHITECTURE, TABLE, Kernel

VERSION, EXPECTED = resource_table.read(TABLE.read_text())


@pytest.fixture(scope="module")
def tool() -> str:
    found = resource_table.cuobjdump()
    if not native.BUILT_WITH_CUDA:
        pytest.skip("this build has no CUDA kernels")
    if found is None:
        pytest.skip("needs cuobjdump and nvdisasm, from a CUDA toolkit or from triton")
    if resource_table.compiler(found) != VERSION:
        pytest.skip(f"the table is for code of nvcc {VERSION} for {ARCHITECTURE}")
    return found


@pytest.mark.slow
def test_no_kernel_needs_more_than_the_table_says(tool: str) -> None:
    found = resource_table.kernels(tool)
    assert set(found) == set(EXPECTED), "python -m tests.native.resource_table --write"
    for name, kernel in found.items():
        expected = EXPECTED[name]
        assert kernel.threads == expected.threads, name
        assert kernel.registers <= expected.registers, name
        assert kernel.stack <= expected.stack, name
        assert kernel.occupancy >= expected.occupancy, name
        assert kernel.load >= expected.load, name
        assert kernel.store >= expected.store, name


def test_profilers_find_the_lines_of_the_kernels(tool: str) -> None:
    assert ".debug_line" in resource_table.dump(tool, "-elf")


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("step_kernel", True, True),
        ("scale_kernel", True, True),
        ("check_kernel", True, False),
        ("norms_kernel", True, False),
        ("group_kernel", False, True),
        ("pack_kernel", False, True),
    ],
)
def test_vector_kernels_move_16_bytes_at_a_time(kernel: str, loads: bool, stores: bool) -> None:
    found = [resources for name, resources in EXPECTED.items() if name.startswith(kernel)]
    assert found
    assert all(resources.load == 128 for resources in found if loads)
    assert all(resources.store == 128 for resources in found if stores)


def test_blocks_of_a_step_share_a_multiprocessor() -> None:
    found = {name: resources for name, resources in EXPECTED.items() if name.startswith("step_kernel")}
    assert found
    assert all(resources.blocks >= 2 for resources in found.values())


@pytest.mark.parametrize("kernel", ["float, (Kind)0", "bf16, (Kind)0", "bf16, (Kind)1", "bf16, (Kind)2"])
def test_common_adam_steps_hide_the_start_of_a_block_and_spill_nothing(kernel: str) -> None:
    dtype, kind = kernel.split(", ")
    resources = EXPECTED[f"step_kernel<{dtype}, AdamRule<float, false>, {kind}, AdamConfig>"]
    assert resources.blocks >= 4
    assert resources.stack == 0


def test_a_table_is_read_as_it_was_written() -> None:
    kernels = {"step_kernel<float, Rule<float, true> >": Kernel(512, 40, 75, 0, 128, 64)}
    assert resource_table.read(resource_table.written("13.0.88", kernels)) == ("13.0.88", kernels)
