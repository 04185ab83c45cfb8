"""GPUs through NVML: figures, names of the functions, and cleanup after any failure."""

import ast
import dataclasses
import importlib.util
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor import GpuSample, nvml
from flatout.monitor.nvml import Gpus
from tests.monitor.fake_nvml import A100, ERRORS, FUNCTIONS, H100, MIG, T4, FakeNvml
from tests.monitor.harness import System
from tests.monitor.monitor_sample import h100
from tests.reasons import missing


def second(fake: FakeNvml) -> tuple[tuple[GpuSample, ...], str | None]:
    """Return the second sample, because GPM needs two."""
    gpus = Gpus()
    gpus.sample()
    found = gpus.sample()
    gpus.close()
    assert (fake.open, fake.gpm_samples) == (0, set())
    return found


def test_everything_of_an_h100(install) -> None:
    (gpu,), no_gpu = second(install())
    assert no_gpu is None
    assert gpu == dataclasses.replace(h100(), uuid=H100.uuid, memory_total_bytes=85_520_809_984, power_watts=648.312)


def test_activity_needs_two_samples(install) -> None:
    fake = install()
    gpus = Gpus()
    ((gpu,), _) = gpus.sample()
    assert missing(gpu.gpm) == {"first-sample"}
    assert (gpu.tensor_active_percent, gpu.util_percent) == (None, 98.0)
    assert len(fake.gpm_samples) == 1
    gpus.close()


def test_activity_is_that_since_the_previous_sample(install) -> None:
    fake = install()
    gpus = Gpus()
    for _ in range(3):
        gpus.sample()  # the fake refuses samples in the wrong order
        assert len(fake.gpm_samples) == 1
    gpus.close()
    assert not fake.gpm_samples


def test_activity_begins_again_after_an_error(install) -> None:
    fake = install()
    gpus = Gpus()
    gpus.sample()
    fake.failures["nvmlGpmMetricsGet"] = "Unknown"
    assert missing(gpus.sample()[0][0].gpm) == {"gpm-fails", "unknown-error"}
    assert not fake.gpm_samples
    fake.failures.clear()
    assert missing(gpus.sample()[0][0].gpm) == {"first-sample"}
    assert gpus.sample()[0][0].tensor_active_percent == 47.8


def test_figures_that_older_gpus_lack_have_a_reason(install) -> None:
    (a100, t4), _ = second(install(boards=(A100, T4), memory_v2=False))
    assert missing(a100.gpm) == missing(t4.gpm) == {"before-hopper"}
    assert "power_limit_watts" not in a100.missing
    assert missing(t4.missing["power_limit_watts"]) == {"not-supported"}
    assert a100.memory_used_bytes == A100.memory_used + 500_000_000
    assert (a100.throttle, t4.throttle) == ((), ("idle", "heat (driver)"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("LibraryNotFound", "no-driver-library"),
        ("DriverNotLoaded", "driver-not-loaded"),
        ("LibRmVersionMismatch", "versions-differ"),
    ],
)
def test_without_the_library_or_the_driver_there_is_a_reason(install, error: str, code: str) -> None:
    found, no_gpu = second(install(failures={"nvmlInit": error}))
    assert found == ()
    assert missing(no_gpu) == {"nvml-unusable", code}


def test_without_a_gpu_or_the_package_there_is_a_reason(system: System) -> None:
    found, no_gpu = second(system.nvml(boards=()))
    assert (found, missing(no_gpu)) == ((), {"no-gpu"})
    system.without_nvml()
    found, no_gpu = Gpus().sample()
    assert (found, missing(no_gpu)) == ((), {"nvml-not-installed"})


def test_a_lost_gpu_leaves_the_others(install) -> None:
    fake = install(boards=(A100, A100))
    calls = iter([False, True] * 99)
    fake.before = lambda name: (
        fake.failures.update({name: "GpuIsLost"})
        if name == "nvmlDeviceGetHandleByIndex" and next(calls)
        else fake.failures.clear()
    )
    (first, lost), _ = second(fake)
    assert first.util_percent == 91.0
    assert lost == GpuSample(1, 1, gpm=lost.gpm, missing={"handle": lost.missing["handle"]})
    assert (missing(lost.gpm), missing(lost.missing["handle"])) == ({"gpu-unreachable"}, {"gpu-lost"})


def test_nvml_is_opened_again_after_another_library_shut_it_down(install) -> None:
    fake = install()
    gpus = Gpus()
    gpus.sample()
    fake.open = 0
    assert missing(gpus.sample()[1]) == {"nvml-cannot-count", "nvml-closed"}
    assert gpus.sample()[0][0].util_percent == 98.0
    gpus.close()


def test_an_old_driver_knows_throttle_reasons_by_their_old_name(install) -> None:
    (gpu,), _ = second(install(failures={"nvmlDeviceGetCurrentClocksEventReasons": "FunctionNotFound"}))
    assert gpu.throttle == ("power limit",)


def test_an_unknown_throttle_reason_keeps_its_number(install) -> None:
    (gpu,), _ = second(install(boards=(dataclasses.replace(H100, throttle=0x8000_0000_0000_0001),)))
    assert len(gpu.throttle) == 2
    assert "0x8000000000000000" in gpu.throttle[1]


@given(failures=st.dictionaries(st.sampled_from(FUNCTIONS), st.sampled_from(sorted(ERRORS.values()))))
def test_any_functions_may_fail_with_any_error(failures: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        System(patch).nvml(boards=(H100, A100, T4, MIG), failures=failures)
        if len(failures) % 2:
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, (0, *MIG.mig_devices))))
        gpus = Gpus()
        for _ in range(3):
            found, no_gpu = gpus.sample()
            assert bool(found) == (no_gpu is None)
            for gpu in found:
                unread = {
                    field.name
                    for field in dataclasses.fields(gpu)
                    if getattr(gpu, field.name) is None and not field.name.endswith("active_percent")
                }
                assert unread <= set(gpu.missing) or "handle" in gpu.missing
                assert gpu.gpm
        gpus.close()


@pytest.mark.parametrize(
    ("visible", "order", "indices"),
    [
        (None, None, [(0, 0), (1, 1)]),
        ("1,0", None, [(1, 0), (0, 1)]),
        ("1, 7, 0", None, [(1, 0)]),
        (A100.uuid[:12], None, [(0, 0)]),
        ("GPU-", None, None),
        ("²", None, None),  # a digit to str.isdigit, no number to int
        ("9" * 5000, None, None),
        ("-1", None, None),
        ("", None, None),
        ("0,0", None, None),
        (MIG.mig_devices[0], None, [(1, 0)]),
        ("1", "PCI_BUS_ID", [(1, 0)]),
    ],
)
def test_cuda_visible_devices(install, setenv, visible: str | None, order: str | None, indices: list | None) -> None:
    one = dataclasses.replace(MIG, name=A100.name)
    fake = install(boards=(A100, one))
    setenv(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    found, no_gpu = second(fake)
    if indices is None:
        assert (found, missing(no_gpu)) == ((), {"cuda-hidden"})
        assert repr(visible) in no_gpu
    else:
        assert [(gpu.index, gpu.cuda_index) for gpu in found] == indices


def test_numbers_of_unlike_gpus_are_not_guessed(install, setenv) -> None:
    unlike = install(boards=(T4, A100))
    setenv(CUDA_VISIBLE_DEVICES="0")
    found, _ = second(unlike)
    assert [(gpu.index, gpu.cuda_index) for gpu in found] == [(0, None), (1, None)]
    assert all(missing(gpu.missing["cuda_index"]) == {"cuda-order-unknown"} for gpu in found)
    setenv(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    found, _ = second(unlike)
    assert [(gpu.name, gpu.cuda_index) for gpu in found] == [(A100.name, 0)]


def test_a_mig_device_has_its_own_memory_and_its_gpus_power(install, setenv) -> None:
    fake = install(boards=(MIG,))
    setenv(CUDA_VISIBLE_DEVICES=MIG.mig_devices[0])
    (gpu,), _ = second(fake)
    assert (gpu.uuid, gpu.index, gpu.power_watts) == (MIG.mig_devices[0], 0, 648.312)
    assert gpu.util_percent is None
    assert gpu.tensor_active_percent == 47.8


def test_a_lost_mig_device_keeps_its_uuid(install, setenv) -> None:
    fake = install(boards=(MIG,), failures={"nvmlDeviceGetHandleByUUID": "GpuIsLost"})
    setenv(CUDA_VISIBLE_DEVICES=MIG.mig_devices[0])
    (gpu,), _ = second(fake)
    assert (gpu.uuid, gpu.index, gpu.cuda_index) == (MIG.mig_devices[0], -1, 0)
    assert missing(gpu.missing["handle"]) == {"gpu-lost"}


def test_every_name_of_nvml_is_in_the_real_module() -> None:
    real = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    tree = ast.parse(Path(nvml.__file__).read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith(("nvml", "NVML", "c_nvml"))
    } - {"nvmlReturn"}  # a field of a metric
    assert len(used) > 20
    assert not [name for name in used if not hasattr(FakeNvml(), name)]
    if real is None:
        pytest.skip("nvidia-ml-py is not installed")
    assert not [name for name in used if not hasattr(real, name)]
    assert not [name for name in ERRORS.values() if not hasattr(real, f"NVMLError_{name}")]
    fields = {name for name, *_ in real.c_nvmlGpmMetricsGet_t._fields_}
    assert (
        fields
        == {"version", "numMetrics", "sample1", "sample2", "metrics"}
        == set(vars(FakeNvml().c_nvmlGpmMetricsGet_t()))
    )
    assert {"metricId", "nvmlReturn", "value"} <= {name for name, *_ in real.c_nvmlGpmMetric_t._fields_}
    constants = [name for name in vars(FakeNvml) if name.startswith("NVML") or name == "nvmlMemory_v2"]
    constants.remove("NVMLError_FunctionNotFound")  # a class
    assert {name: getattr(FakeNvml, name) for name in constants} == {name: getattr(real, name) for name in constants}


def test_a_forked_child_opens_nvml_for_itself(system: System) -> None:
    fake = system.nvml()
    gpus = Gpus()
    gpus.sample()
    with system.forked():
        assert missing(gpus.sample()[0][0].gpm) == {"first-sample"}
    assert fake.open == 2


def test_a_forked_child_closes_nothing_of_its_parent(system: System) -> None:
    fake = system.nvml()
    gpus = Gpus()
    gpus.sample()
    with system.forked():
        gpus.close()
    assert (fake.open, len(fake.gpm_samples)) == (1, 1)


def test_nvml_is_reopened_after_the_driver_fails_to_count_gpus(install) -> None:
    fake = install()
    gpus = Gpus()
    gpus.sample()
    fake.failures["nvmlDeviceGetCount"] = "Unknown"
    for _ in range(3):
        found, no_gpu = gpus.sample()
        assert (found, missing(no_gpu)) == ((), {"nvml-cannot-count", "unknown-error"})
        assert (fake.open, fake.gpm_samples) == (0, set())
    fake.failures.clear()
    assert gpus.sample()[0][0].util_percent == 98.0
    gpus.close()
    assert fake.open == 0


@pytest.mark.parametrize(("code", "value"), [(3, 12.5), (999, 12.5), (0, math.nan), (0, math.inf)])
def test_a_metric_that_fails_by_itself_is_unknown(install, code: int, value: float) -> None:
    tensor_cores = FakeNvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
    ((gpu,), _) = second(install(metrics={tensor_cores: (code, value)}))
    assert (gpu.tensor_active_percent, gpu.sm_active_percent) == (None, 93.1)


def test_a_metric_that_the_gpu_does_not_have_is_left_out(install) -> None:
    ((gpu,), _) = second(install(boards=(dataclasses.replace(H100, gpm={5: 47.8}),)))
    assert (gpu.tensor_active_percent, gpu.dram_active_percent, gpu.sm_active_percent) == (47.8, None, None)
