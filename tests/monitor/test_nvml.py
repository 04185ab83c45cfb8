"""GPUs through NVML: figures, names of the functions, and cleanup after any failure."""

import ast
import dataclasses
import importlib.util
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor import GpuSample, Sampler, nvml
from tests.monitor.fake_nvml import A100, ERRORS, FUNCTIONS, H100, MIG, T4, FakeNvml
from tests.monitor.harness import System, gpus
from tests.monitor.monitor_sample import h100
from tests.reasons import missing


def second(
    fake: FakeNvml, environment: dict[str, str] | None = None, *, dcgm: bool = False
) -> tuple[tuple[GpuSample, ...], str | None]:
    """Return the second sample, because GPM needs two."""
    looker = gpus(dcgm=dcgm)
    looker.sample(environment or {})
    found = looker.sample(environment or {})
    looker.close()
    assert (fake.open, fake.gpm_samples) == (0, set())
    return found


def test_everything_of_an_h100(install) -> None:
    (gpu,), no_gpu = second(install())
    assert no_gpu is None
    assert gpu == dataclasses.replace(h100(), uuid=H100.uuid, memory_total_bytes=85_520_809_984, power_watts=648.312)


def test_activity_needs_two_samples(install) -> None:
    fake = install()
    looker = gpus()
    ((gpu,), _) = looker.sample({})
    assert missing(gpu.gpm) == {"first-sample"}
    assert (gpu.tensor_active_percent, gpu.util_percent) == (None, 98.0)
    assert len(fake.gpm_samples) == 2
    looker.close()


def test_figures_that_older_gpus_lack_have_a_reason(install) -> None:
    (a100, t4), _ = second(install(boards=(A100, T4), memory_v2=False))
    assert missing(a100.gpm) == missing(t4.gpm) == {"before-hopper", "dcgm-not-asked"}
    assert "power_limit_watts" not in a100.missing
    assert missing(t4.missing["power_limit_watts"]) == missing(t4.missing["mig"]) == {"not-supported"}
    assert (a100.pcie_rx_bytes_per_second, a100.pcie_tx_bytes_per_second) == (1200 * 1024.0, 300 * 1024.0)
    assert a100.memory_used_bytes == A100.memory_used + 500_000_000
    assert (a100.throttle, t4.throttle) == ((), ("idle", "heat (driver)"))


def test_dcgm_reports_activity_of_gpus_before_hopper(system: System) -> None:
    dcgm = system.dcgm()
    ((a100, t4), _) = second(system.nvml(boards=(A100, T4)), dcgm=True)
    assert not dcgm.open
    assert dcgm.options["updateFrequency"] == 1_000_000  # microseconds
    assert (a100.gpm, a100.tensor_active_percent, a100.sm_active_percent) == ("DCGM", 50.0, 75.0)
    assert a100.dram_active_percent is None
    assert missing(t4.gpm) == {"before-hopper", "dcgm-lacks-gpu"}
    assert t4.tensor_active_percent is None


def test_dcgm_is_not_called_unless_requested(system: System) -> None:
    dcgm = system.dcgm(failures={"Init": "DCGM was asked"})
    ((gpu,), _) = second(system.nvml(boards=(A100,)))
    assert missing(gpu.gpm) == {"before-hopper", "dcgm-not-asked"}
    assert (dcgm.open, dcgm.asked) == (0, [])
    (gpu,) = Sampler(dcgm=True).take().gpus
    assert missing(gpu.gpm) == {"before-hopper", "dcgm-failed"}
    assert gpu.gpm.endswith("DCGM was asked")


def test_dcgm_without_its_bindings(system: System) -> None:
    system.without("DcgmReader")
    ((gpu,), _) = second(system.nvml(boards=(A100,)), dcgm=True)
    assert missing(gpu.gpm) == {"before-hopper", "dcgm-not-importable"}


def test_dcgm_is_not_called_again_after_its_host_engine_is_gone(system: System) -> None:
    dcgm = system.dcgm(values={})  # the bindings log the lost connection, and would reconnect at the next call
    ((gpu,), _) = second(system.nvml(boards=(A100,)), dcgm=True)
    assert missing(gpu.gpm) == {"before-hopper", "dcgm-silent"}
    assert dcgm.asked == ["Init", "GetLatestGpuValuesAsFieldIdDict", "Shutdown"]
    assert not dcgm.open


def test_nothing_stays_open_after_dcgm_fails_to_shut_down(system: System) -> None:
    dcgm = system.dcgm(failures={"Shutdown": "gone"})
    second(system.nvml(boards=(A100,)), dcgm=True)  # checks that nothing stays open
    assert dcgm.asked[-1] == "Shutdown"


def test_a_forked_child_does_not_use_its_parents_dcgm(system: System) -> None:
    dcgm, fake = system.dcgm(), system.nvml(boards=(A100,))
    looker = gpus(dcgm=True)
    looker.sample({})
    with system.forked():
        ((gpu,), _) = looker.sample({})
        assert missing(gpu.gpm) == {"before-hopper", "dcgm-elsewhere"}
        looker.close()
        assert dcgm.open == 1
    assert fake.open == 1  # opened by the parent


def test_dcgm_is_initialized_once_after_a_failure(system: System) -> None:
    dcgm = system.dcgm(failures={"Init": "no host engine"})
    ((gpu,), _) = second(system.nvml(boards=(A100,)), dcgm=True)
    assert missing(gpu.gpm) == {"before-hopper", "dcgm-failed"}
    assert gpu.gpm.endswith("no host engine")
    assert dcgm.asked.count("Init") == 1
    assert not dcgm.open


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
    system.without("pynvml")
    found, no_gpu = gpus().sample({})
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
    looker = gpus()
    looker.sample({})
    fake.open = 0
    assert missing(looker.sample({})[1]) == {"nvml-cannot-count", "nvml-reopened"}
    assert looker.sample({})[0][0].util_percent == 98.0
    looker.close()


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
        System(patch, Path()).nvml(boards=(H100, A100, T4, MIG), failures=failures)
        looker = gpus()
        for _ in range(3):
            found, no_gpu = looker.sample(
                {"CUDA_VISIBLE_DEVICES": ",".join(map(str, (0, *MIG.mig_devices)))} if len(failures) % 2 else {}
            )
            assert bool(found) == (no_gpu is None)
            for gpu in found:
                unread = {
                    field.name
                    for field in dataclasses.fields(gpu)
                    if getattr(gpu, field.name) is None
                    and not field.name.endswith(("active_percent", "occupancy_percent"))
                }
                assert unread <= set(gpu.missing) or "handle" in gpu.missing
                assert gpu.gpm
        looker.close()


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
def test_cuda_visible_devices(install, visible: str | None, order: str | None, indices: list | None) -> None:
    one = dataclasses.replace(MIG, name=A100.name)
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    environment |= {"CUDA_DEVICE_ORDER": order} if order else {}
    found, no_gpu = second(install(boards=(A100, one)), environment)
    if indices is None:
        assert (found, missing(no_gpu)) == ((), {"cuda-hidden"})
        assert repr(visible) in no_gpu
    else:
        assert [(gpu.index, gpu.cuda_index) for gpu in found] == indices


def test_numbers_of_unlike_gpus_are_not_guessed(install) -> None:
    unlike = install(boards=(T4, A100))
    found, _ = second(unlike, {"CUDA_VISIBLE_DEVICES": "0"})
    assert [(gpu.index, gpu.cuda_index) for gpu in found] == [(0, None), (1, None)]
    assert all(missing(gpu.missing["cuda_index"]) == {"cuda-order-unknown"} for gpu in found)
    found, _ = second(unlike, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(gpu.name, gpu.cuda_index) for gpu in found] == [(A100.name, 0)]


def test_a_mig_device_has_its_own_memory_and_its_gpus_power(install) -> None:
    (gpu,), _ = second(install(boards=(MIG,)), {"CUDA_VISIBLE_DEVICES": MIG.mig_devices[0]})
    assert (gpu.uuid, gpu.mig, gpu.index, gpu.power_watts) == (MIG.mig_devices[0], True, 0, 648.312)
    assert gpu.util_percent is None
    assert gpu.tensor_active_percent == 47.8


def test_every_name_of_nvml_is_in_the_real_module() -> None:
    real = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    tree = ast.parse(Path(nvml.__file__).read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith(("nvml", "NVML", "c_nvml"))
    } - {"nvmlReturn"}  # a field of a metric
    assert len(used) > 25
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
    assert {name: getattr(FakeNvml, name) for name in constants} == {name: getattr(real, name) for name in constants}


def test_a_forked_child_opens_nvml_for_itself(system: System) -> None:
    fake = system.nvml()
    looker = gpus()
    looker.sample({})
    with system.forked():
        assert missing(looker.sample({})[0][0].gpm) == {"first-sample"}
    assert fake.open == 2


def test_a_forked_child_closes_nothing_of_its_parent(system: System) -> None:
    fake = system.nvml()
    looker = gpus()
    looker.sample({})
    with system.forked():
        looker.close()
    assert (fake.open, len(fake.gpm_samples)) == (1, 2)


def test_nvml_is_reopened_after_the_driver_fails_to_count_gpus(install) -> None:
    fake = install()
    looker = gpus()
    looker.sample({})
    fake.failures["nvmlDeviceGetCount"] = "Unknown"
    for _ in range(3):
        found, no_gpu = looker.sample({})
        assert (found, missing(no_gpu)) == ((), {"nvml-cannot-count"})
        assert (fake.open, fake.gpm_samples) == (0, set())
    fake.failures.clear()
    assert looker.sample({})[0][0].util_percent == 98.0
    looker.close()
    assert fake.open == 0


def test_a_whole_gpu_with_mig_enabled_has_its_own_reason(install) -> None:
    ((gpu,), _) = second(install(boards=(MIG,), failures={"nvmlGpmSampleGet": "NotSupported"}))
    assert missing(gpu.gpm) == {"whole-mig", "dcgm-not-asked"}
    assert gpu.power_watts == 648.312


@pytest.mark.parametrize(("code", "value"), [(3, 12.5), (999, 12.5), (0, math.nan), (0, math.inf)])
def test_a_metric_that_fails_by_itself_is_unknown(install, code: int, value: float) -> None:
    tensor_cores = FakeNvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
    ((gpu,), _) = second(install(metrics={tensor_cores: (code, value)}))
    assert (gpu.tensor_active_percent, gpu.sm_active_percent) == (None, 93.1)


def test_a_metric_that_the_gpu_does_not_have_is_left_out(install) -> None:
    ((gpu,), _) = second(install(boards=(dataclasses.replace(H100, gpm={5: 47.8}),)))
    assert (gpu.tensor_active_percent, gpu.dram_active_percent, gpu.sm_active_percent) == (47.8, None, None)
    assert gpu.pcie_rx_bytes_per_second == 1200 * 1024.0  # from the older counter
