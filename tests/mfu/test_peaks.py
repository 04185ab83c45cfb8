"""Peaks: values of all rows, real device names and similar ones, the clock, and measured peaks."""

from __future__ import annotations

import json
import math
import platform
import re
import time
import warnings
from unittest import mock

import pytest
import torch

from flatout.mfu import clock_peak_flops, measured_peak_flops, peak_flops, peaks
from tests.clock import simulated_time
from tests.mfu.harness import SimulatedProducts, forgotten_warnings

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2

# Independent copy: dense TFLOPS, and the boost clock (MHz) of tensor cores where NVIDIA publishes one.
SHEETS = {
    # name as in nvidia-smi: (fp16, bf16, tf32, fp32, fp8, fp4, clock)
    "Tesla V100-SXM2-16GB": (125, None, None, 15.7, None, None, 1530),
    "Tesla V100-PCIE-32GB": (112, None, None, 14, None, None, 1370),
    "Tesla V100S-PCIE-32GB": (130, None, None, 16.4, None, None, 1597),
    "Tesla T4": (65, None, None, 8.1, None, None, 1590),
    "NVIDIA A100-SXM4-40GB": (312, 312, 156, 19.5, None, None, 1410),
    "NVIDIA A800-SXM4-80GB": (312, 312, 156, 19.5, None, None, 1410),
    "NVIDIA A30": (165, 165, 82, 10.3, None, None, 1440),
    "NVIDIA A40": (149.7, 149.7, 74.8, 37.4, None, None, 1740),
    "NVIDIA A10": (125, 125, 62.5, 31.2, None, None, 1695),
    "NVIDIA A10G": (70, 70, 35, 35, None, None, 1710),
    "NVIDIA RTX A6000": (154.8, 154.8, 77.4, 38.7, None, None, 1800),
    "NVIDIA GeForce RTX 3090": (71.2, 71.2, 35.6, 35.6, None, None, 1695),
    "NVIDIA L4": (121, 121, 60, 30.3, 242.5, None, 2040),
    "NVIDIA L20": (119.5, 119.5, 59.8, 59.8, 239, None, 2520),
    "NVIDIA L40": (181.05, 181.05, 90.5, 90.5, 362, None, 2490),
    "NVIDIA L40S": (362.05, 362.05, 183, 91.6, 733, None, 2490),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1, 728.5, None, 2505),
    "NVIDIA GeForce RTX 4080": (97.5, 97.5, 48.7, 48.7, 194.9, None, 2505),
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6, 330.3, None, 2520),
    "NVIDIA H20": (148, 148, 74, 44, 296, None, None),
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9, 1978.9, None, 1830),
    "NVIDIA H100 PCIe": (756, 756, 378, 51.2, 1513, None, 1620),
    "NVIDIA H100 NVL": (835.5, 835.5, 417.5, 60, 1670.5, None, None),
    "NVIDIA H800": (989.4, 989.4, 494.7, 66.9, 1978.9, None, 1830),
    "NVIDIA H800 PCIe": (756, 756, 378, 51.2, 1513, None, 1620),
    "NVIDIA H200": (989.4, 989.4, 494.7, 66.9, 1978.9, None, 1830),
    "NVIDIA H200 NVL": (835.5, 835.5, 417.5, 60, 1670.5, None, None),
    "NVIDIA GH200 480GB": (989.4, 989.4, 494.7, 66.9, 1978.9, None, 1830),
    "NVIDIA B200": (2250, 2250, 1125, 75, 4500, 9000, None),
    "NVIDIA GB200": (2500, 2500, 1250, 80, 5000, 10000, None),
    "NVIDIA B300 SXM6 AC": (2250, 2250, 1125, 75, 4500, 13125, None),
    "NVIDIA GB300": (2500, 2500, 1250, 80, 5000, 15000, None),
    "NVIDIA GB10": (None, None, None, 31, None, 500, None),
    "NVIDIA GeForce RTX 5080": (112.6, 112.6, 56.3, 56.3, 225.1, 900.4, 2617),
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8, 419, 1676, 2407),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 503.8, 251.9, 126, 1007.6, 2015.2, 2617),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (467.8, 467.8, None, None, 935.6, 1871.2, 2430),
}


@pytest.fixture(autouse=True)
def nothing_warned():
    with forgotten_warnings():
        yield


@pytest.mark.parametrize("name", SHEETS)
def test_every_row_by_value(name):
    *sheet, _ = SHEETS[name]
    for dtype, teraflops in zip((FP16, BF16, "tf32", FP32, FP8, FP4), sheet, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = peak_flops(name, dtype)
        assert (found is None) == (teraflops is None) == bool(caught), dtype
        assert found is None or found == pytest.approx(teraflops * 1e12)


def test_every_row_is_in_this_table():
    assert [peaks.gpu_of(name) for name in SHEETS] == list(peaks.GPUS)


@pytest.mark.parametrize("name", [name for name, sheet in SHEETS.items() if sheet[-1]])
def test_rows_agree_with_their_own_clocks(name):
    """SMs x FLOPs per cycle x rated clock is the published peak. A figure with sparsity would be twice as large."""
    clock = SHEETS[name][-1]
    assert clock_peak_flops(name, FP16, clock_mhz=clock) == pytest.approx(peak_flops(name, FP16), rel=0.01)
    if SHEETS[name][3]:  # the rated clock of CUDA cores differs by up to a sixth
        assert clock_peak_flops(name, FP32, clock_mhz=clock) == pytest.approx(peak_flops(name, FP32), rel=0.16)
    assert clock_peak_flops(name, FP16, clock_mhz=clock / 2) == pytest.approx(
        clock_peak_flops(name, FP16, clock_mhz=clock) / 2
    )


@pytest.mark.parametrize("name", ["NVIDIA H20", "NVIDIA GB10"])
def test_without_rates_per_cycle_there_is_no_peak_at_a_clock(name):
    assert clock_peak_flops(name, FP32, clock_mhz=1000) is None


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Tesla V100-SXM3-32GB", "V100 SXM"),
        ("A100-SXM4-40GB", "A100"),  # drivers before 470 omit "NVIDIA"
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GH200 120GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("A100-SXM-80GB", "A100"),
        ("NVIDIA A800 80GB PCIe", "A800"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_names_as_drivers_print_them(name, row):
    assert peaks.gpu_of(name).name == row


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A800 40GB Active",
        "NVIDIA A16",
        "NVIDIA A10M",
        "NVIDIA L2",
        "NVIDIA T400",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_look_alikes_are_not_guessed(name):
    with pytest.warns(RuntimeWarning, match=re.escape(f"{name} in torch.bfloat16")):
        assert peak_flops(name, BF16) is None


def test_what_is_not_known_is_told_once():
    with pytest.warns(RuntimeWarning, match="NVIDIA A16 in torch.bfloat16"):
        peak_flops("NVIDIA A16", BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_flops("NVIDIA A16", BF16) is None
    with pytest.warns(RuntimeWarning, match="the CPU in torch.float32"):
        assert peak_flops("cpu") is None
    with pytest.warns(RuntimeWarning, match="A16"):
        assert clock_peak_flops("NVIDIA A16", FP16, clock_mhz=1000) is None


class Properties:
    def __init__(self, name: str, sms: int) -> None:
        self.name = name
        self.multi_processor_count = sms


@pytest.mark.parametrize(
    ("name", "sms", "share"), [("NVIDIA H100 80GB HBM3", 132, 1), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 16 / 132)]
)
def test_a_mig_slice_has_a_share_of_the_peak(monkeypatch, name, sms, share):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties(name, sms))
    assert peak_flops("cuda:0", BF16) == peak_flops(0, BF16) == pytest.approx(989.4e12 * share)
    assert clock_peak_flops("cuda", BF16, clock_mhz=1000) == pytest.approx(sms * 4096 * 1e9)


# -- measured on this machine --------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "flatout"))
    monkeypatch.setattr(peaks, "_measured", {})
    return tmp_path / "flatout" / "peaks.json"


@pytest.fixture
def products(cache):
    """Simulate matrix products that take given times."""
    with (
        simulated_time(tick=0.0) as clock,
        mock.patch.object(torch, "matmul", SimulatedProducts(clock)) as products,
    ):
        yield products


def test_the_best_rate_over_sizes_is_the_peak(products):
    products.flops_per_second = {512: 1e12, 1024: 3e12, 2048: 2e12}
    assert measured_peak_flops("cpu") == pytest.approx(3e12)
    assert products.sizes == [512, 1024, 2048]


def test_the_median_product_sets_the_rate_of_a_size(products):
    products.flops_per_second = {512: 1e9, 1024: 1e9, 2048: 1e9}
    products.every_third = 100.0
    assert measured_peak_flops("cpu") == pytest.approx(1e9)


def test_slow_products_in_software_end_the_measurement(products):
    products.flops_per_second = {512: 1e8, 1024: 1e12, 2048: 1e12}  # 2.7 s for the smallest product
    assert measured_peak_flops("cpu", FP16) == pytest.approx(1e8)
    assert products.sizes == [512]


def test_a_size_that_would_take_minutes_is_not_begun(products):
    products.flops_per_second = {512: 2.8e9, 1024: 1e9, 2048: 1e9}  # float16 without hardware for it
    assert measured_peak_flops("cpu", FP16) == pytest.approx(2.8e9)
    assert products.sizes == [512]


@pytest.mark.parametrize("rate", [1e12, 2e10, 2e9])
@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.9, 2.0])
def test_a_measurement_keeps_its_limit_or_is_given_up(seconds, rate, cache, products):
    products.flops_per_second = dict.fromkeys((512, 1024, 2048), rate)
    begun = time.perf_counter()
    found = measured_peak_flops("cpu", seconds=seconds)
    assert time.perf_counter() - begun <= seconds + 0.1
    assert found in (None, pytest.approx(rate))
    assert cache.exists() is (found is not None)
    assert found is not None or seconds < 0.6
    assert seconds > 0.6 or products.sizes == []


def test_measured_once_per_machine(cache, products):
    products.flops_per_second = dict.fromkeys((512, 1024, 2048), 1e12)
    first = measured_peak_flops("cpu")
    (key,) = json.loads(cache.read_text())
    assert f"{platform.node()}, {torch.get_num_threads()} threads | float32 | torch {torch.__version__}" in key
    cache.write_text(json.dumps({key: 42.0}))
    assert measured_peak_flops("cpu") == 42.0
    assert measured_peak_flops("cpu", refresh=True) == pytest.approx(first) == pytest.approx(1e12)
    assert measured_peak_flops("cpu", torch.float64, measure=False) is None
    assert measured_peak_flops("cpu", torch.float64) == pytest.approx(1e12)
    assert len(json.loads(cache.read_text())) == 2
    assert [path.name for path in cache.parent.iterdir()] == ["peaks.json"]


def test_measured_once_per_process_without_a_cache(products, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    products.flops_per_second = dict.fromkeys((512, 1024, 2048), 1e12)
    assert measured_peak_flops("cpu") == measured_peak_flops("cpu") == pytest.approx(1e12)
    assert products.sizes == [512, 1024, 2048]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "b"}', "null"])
def test_a_corrupt_cache_is_overwritten(cache, products, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert measured_peak_flops("cpu") == pytest.approx(1e12)
    assert len(json.loads(cache.read_text())) == 1


@pytest.mark.parametrize("value", ["NaN", "0", "-1", "Infinity"])
def test_an_impossible_rate_in_the_cache_is_measured_again(cache, products, value):
    measured_peak_flops("cpu")
    (key,) = json.loads(cache.read_text())
    cache.write_text(f'{{"{key}": {value}}}')
    assert measured_peak_flops("cpu") == pytest.approx(1e12)


def test_peak_without_a_cache(products, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    assert measured_peak_flops("cpu") == pytest.approx(1e12)


def test_devices_of_other_kinds_are_not_measured(cache):
    assert measured_peak_flops("meta") is None


def test_peak_without_a_cache_folder(cache, products):
    cache.parent.write_text("a file where the folder would be")
    assert measured_peak_flops("cpu") == pytest.approx(1e12)


def test_what_cannot_be_multiplied_has_no_peak(cache):
    assert measured_peak_flops("cpu", torch.bool) is None
    assert not cache.exists()


def test_measuring_draws_no_random_numbers(cache):
    state = torch.get_rng_state()
    assert 0 < measured_peak_flops("cpu", FP32) < math.inf
    assert torch.equal(torch.get_rng_state(), state)
