"""torch's process-wide flags on a GPU: benchmarked algorithms, TF32 products, and attention kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.mfu.peaks import TF32_CAPABILITY
from flatout.report.model import Row
from flatout.techniques.candidate import ChangeCandidate
from flatout.techniques.cudnn_benchmark import benchmark_candidate
from flatout.techniques.sdpa_backend import KERNELS, _Attention, attention_candidate
from flatout.techniques.tf32 import tf32_on
from flatout.training.tolerance import compute_dtype
from tests.gpu.trace import traced
from tests.helpers import snapshot
from tests.jobs import only

OTHERS = {"compile": False, "precision": False, "fused_optimizer": False, "channels_last": False}


@pytest.fixture(autouse=True)
def flags_come_back() -> Iterator[None]:
    """Set torch's defaults for products, and restore cuDNN's flags after the test."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "none"
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 4)).cuda()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 3 * 256)
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(attended.transpose(1, 2).flatten(2).mean(1))


def rows_of(run: flatout.Run) -> dict[str, Row]:
    return {row.technique: row for row in run.report.rows}


def test_a_shape_that_ran_before_is_searched_for_once() -> None:
    """torch keeps the algorithm of a known shape, so the flag alone would not start a search (pytorch #45372)."""
    model, x = convolutional(), torch.randn(16, 3, 32, 32, device="cuda")

    def step() -> None:
        model(x).sum().backward()

    for _ in range(2):
        step()
    usual = len(traced(step).kernels)
    switch = benchmark_candidate()
    switch.enable()
    first, second = (len(traced(step).kernels) for _ in range(2))
    switch.disable()
    assert first > usual + 10
    assert second < first - 10


def test_products_are_rounded_while_tf32_is_on() -> None:
    if torch.cuda.get_device_capability() < TF32_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(2))
    exact = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b).double() - exact).abs().mean() / exact.abs().mean())

    switch = ChangeCandidate("tf32", True, tf32_on)
    errors = [error()]
    switch.enable()
    errors.append(error())
    switch.disable()
    errors.append(error())
    assert max(errors[0], errors[2]) < 1e-5 < errors[1] < 5e-3


def test_convolutions_have_a_tf32_setting_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() < TF32_CAPABILITY:
        pytest.skip("needs compute capability 8.0")
    dense, model = nn.Linear(2, 2).cuda(), convolutional().cuda()
    assert compute_dtype(dense) is torch.float32
    assert compute_dtype(model) == "tf32"
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))]
    run = flatout.optimize(
        model, batches, torch.optim.SGD(model.parameters(), 0.01), functional.cross_entropy, budget=0
    )
    assert run.verdict.peak.endswith("in tf32")
    run.undo()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert compute_dtype(model) is torch.float32


def test_bf16_is_compared_with_the_masks_of_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 4))
    batches = [(torch.randn(32, 64), torch.randint(0, 4, (32,))) for _ in range(6)]
    opt = torch.optim.SGD(model.parameters(), 0.01)
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=only("precision"), budget=20)
    (trial,) = rows_of(run)["precision"].trials
    run.undo()
    assert trial.output_difference is not None
    assert 0 < trial.output_difference < 0.05


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_that_is_asked_first_attends_alike(kernel: str) -> None:
    torch.manual_seed(0)
    model = Attending().cuda().bfloat16()
    x = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)
    with _Attention() as seen:
        expected = model(x)
    if kernel not in seen.used | seen.others | {"math"}:
        pytest.skip(f"this GPU's {kernel} kernel does not serve: {sorted(seen.used | seen.others)} do")
    switch = attention_candidate(kernel, "cuda")
    switch.enable()
    with _Attention() as asked:
        got = model(x)
        got.sum().backward()
    switch.disable()
    assert asked.used == ({kernel} if kernel != "math" else set())
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


def test_what_the_kernel_cannot_serve_goes_elsewhere() -> None:
    switch = attention_candidate("flash", "cuda")
    switch.enable()
    q = torch.randn(2, 4, 32, 64, device="cuda")  # flash attention supports 16 bits only
    attended = functional.scaled_dot_product_attention(q, q, q)
    switch.disable()
    torch.testing.assert_close(attended, functional.scaled_dot_product_attention(q, q, q), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("attending", [False, True])
def test_trials_leave_no_trace_and_undo_gives_everything_back(attending: bool) -> None:
    torch.manual_seed(0)
    model = Attending().cuda() if attending else convolutional()
    shape = (16, 128, 256) if attending else (16, 3, 32, 32)
    batches = [(torch.randn(shape), torch.randint(0, 4, (16,))) for _ in range(6)]
    opt = torch.optim.SGD(model.parameters(), 0.01)
    before = snapshot(model, opt)
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=OTHERS, budget=60)
    rows = rows_of(run)
    assert rows["sdpa_backend"].status in (("kept", "rejected") if attending else ("not applicable",))
    assert rows["cudnn_benchmark"].status in (("not applicable",) if attending else ("kept", "rejected"))
    assert rows["tf32"].trials or torch.cuda.get_device_capability() < TF32_CAPABILITY
    assert all(not trial.failure for row in rows.values() for trial in row.trials)
    for batch in run.loader:
        run.step(batch)
    run.undo()
    assert snapshot(model)["flags"] == before["flags"]


def test_varying_shapes_end_the_search_and_are_advised_about() -> None:
    model = convolutional()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    batches = [(torch.randn(4, 3, 16 + i, 16 + i), torch.randint(0, 4, (4,))) for i in range(12)]
    force = OTHERS | {"cudnn_benchmark": True}
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=force, budget=20)
    assert torch.backends.cudnn.benchmark
    assert rows_of(run)["allocator"].status in ("advice", "not applicable")  # the second if it is set
    with pytest.warns(RuntimeWarning, match="torch.backends.cudnn.benchmark is off"):
        losses = [run.step(batch) for batch in run.loader]
    assert len(losses) == 12
    assert not torch.backends.cudnn.benchmark
    run.undo()
    assert not torch.backends.cudnn.deterministic
