"""CUDA kernels compared with CPU kernels and torch. Without a GPU the tests skip with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import flatout.optim as fo
from flatout import native
from flatout.amp import GradScaler, clip_grad_norm_, unscale_and_check_
from flatout.optim import update
from tests.chunks import DTYPES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not native.BUILT_WITH_CUDA, reason="this build has no CUDA kernels"),
]
SIZES = [1, 3, 0, 35, 16383, 16384, 16385, 100_003, 0]
OPTIMIZERS = [
    ("AdamW", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


def values(dtype: torch.dtype, seed: int, offset: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n + offset, generator=generator).to(dtype)[offset:] for n in SIZES]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3}.get(dtype, 2e-2)


def test_the_kernels_are_there():
    assert native.has_cuda_kernels(), "compiled in, but the driver or the architecture does not fit"


# compute-sanitizer runs float32 only, because test_rewriting_forms covers the alignments of the other dtypes.
@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.sanitize), *DTYPES[1:]], ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
@pytest.mark.parametrize("offset", [0, 1])
def test_cuda_equals_cpu(name, options, dtype, offset):
    results = []
    for device in ("cpu", "cuda"):
        # Only the parameters have an offset, so the streams are misaligned differently.
        storages = [
            torch.empty(v.numel() + offset, dtype=dtype, device=device)[offset:].copy_(v) for v in values(dtype, 0)
        ]
        params = [torch.nn.Parameter(s) for s in storages]
        optimizer = getattr(fo, name)(params, lr=1e-2, **options)
        norms = []
        for step in range(4):
            for p, g in zip(params, values(dtype, 1 + step), strict=True):
                p.grad = (g * 8).to(device)
            if step == 1:
                params[-2].grad[77] = float("nan")
            result = update(optimizer, inv_scale=torch.tensor(1 / 8, device=device), max_grad_norm=1.0 if step else 1e9)
            assert result.found_inf.item() == (step == 1)
            norms.append(result.grad_norm.cpu())
        results.append((params, optimizer.state_dict()["state"], norms))
    (a, a_state, a_norms), (b, b_state, b_norms) = results
    bound = tolerance(dtype)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=bound, atol=bound)
    for i in a_state:
        for key, value in a_state[i].items():
            torch.testing.assert_close(b_state[i][key].cpu(), value, rtol=bound, atol=bound)
    torch.testing.assert_close(b_norms, a_norms, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("form", ["lazy", "eager"])
def test_scaler_history_equals_torchs(name, form):
    def run(optim, scaler, clip):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 65), torch.nn.ReLU(), torch.nn.Linear(65, 7)).cuda()
        optimizer = getattr(optim, name)(model.parameters(), lr=1e-3)
        history = []
        for step in range(12):
            x = torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean() * (float("inf") if step == 5 else 1)
            scaler.scale(loss).backward()
            if form == "eager" or clip is torch.nn.utils.clip_grad_norm_:
                scaler.unscale_(optimizer)
                clip(model.parameters(), 0.1)
                scaler.step(optimizer)
            else:
                scaler.step(optimizer, max_grad_norm=0.1)
            scaler.update()
            history.append(scaler.get_scale())
        return history, [p.detach() for p in model.parameters()]

    expected = run(torch.optim, torch.amp.GradScaler("cuda"), torch.nn.utils.clip_grad_norm_)
    result = run(fo, GradScaler("cuda"), clip_grad_norm_)
    assert result[0] == expected[0]
    torch.testing.assert_close(result[1], expected[1], rtol=1e-4, atol=1e-5)


def test_no_synchronisation():
    params = [torch.nn.Parameter(torch.ones(n, device="cuda")) for n in (3, 100_000)]
    optimizer, scaler = fo.AdamW(params), GradScaler("cuda")

    def one() -> None:
        scaler.scale(sum(p.sum() for p in params)).backward()
        scaler.step(optimizer, max_grad_norm=1.0)
        scaler.update()
        assert scaler.last_step_skipped.is_cuda

    one()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_betas_on_the_device_are_torchs():
    """torch's class takes the step. flatout would read the betas on the host, and would wait in every step."""
    p, q = (torch.nn.Parameter(torch.ones(100, device="cuda")) for _ in range(2))
    betas = tuple(torch.tensor(beta, device="cuda") for beta in (0.8, 0.9))
    options = dict(lr=0.1, capturable=True, foreach=False)
    optimizer, reference = fo.AdamW([p], betas=betas, **options), torch.optim.AdamW([q], betas=(0.8, 0.9), **options)
    for step in range(4):
        p.grad, q.grad = (torch.full_like(x, 1.0 + step) for x in (p, q))
        optimizer.step(), reference.step()
    torch.testing.assert_close(p, q)


def test_a_norm_over_both_devices_is_read_after_it_has_arrived():
    """Results meet on the device of the first gradient. A non-blocking copy to the CPU would be read too early."""
    here, there = torch.ones(4), torch.ones(4, device="cuda")
    for _ in range(5):
        torch.cuda._sleep(20_000_000)
        there.mul_(2)
        assert unscale_and_check_([here, there], None)[1].item() == pytest.approx(
            (4 + there.square().sum().item()) ** 0.5
        )


def test_the_norm_is_the_same_every_time_and_right():
    grads = [torch.randn(n, device="cuda") for n in (5_000_003, 1, 70_000)] + [torch.randn(7, device="cuda")] * 3000
    norms = {torch.ops.flatout.unscale_and_check(grads, None, 1.0)[1].item() for _ in range(5)}
    assert len(norms) == 1
    exact = sum(g.double().square().sum() for g in grads).sqrt().item()
    assert norms.pop() == pytest.approx(exact, rel=1e-6)


@pytest.mark.sanitize
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_one_check_of_all_dtypes_and_orders(order):
    """Several launches share one result, which the last block computes."""
    grads = [g for seed, dtype in enumerate(DTYPES) for g in values(dtype, seed)]
    for bad in (None, math.inf, math.nan):
        if bad is not None:
            grads[-2][77] = bad
        here = torch.ops.flatout.unscale_and_check(grads, torch.tensor(0.5), 1.0, order)
        there = torch.ops.flatout.unscale_and_check(
            [g.cuda() for g in grads], torch.tensor(0.5, device="cuda"), 1.0, order
        )
        torch.testing.assert_close([t.cpu() for t in there], list(here), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.sanitize
def test_a_check_of_nothing_concludes_too():
    found_inf, norm, factor = torch.ops.flatout.unscale_and_check(
        [torch.ones(0, device="cuda")] * 3, torch.tensor(0.5, device="cuda"), 1.0
    )
    assert (found_inf.item(), norm.item(), factor.item()) == (0, 0, 0.5)


def test_checks_on_several_streams_at_once_do_not_meet():
    lists = [[torch.full((300_000 + i,), 1.0 + i, device="cuda"), torch.ones(5, device="cuda")] for i in range(4)]
    expected = [torch.ops.flatout.unscale_and_check(grads, None, None)[1].item() for grads in lists]
    streams = [torch.cuda.Stream() for _ in lists]
    torch.cuda.synchronize()
    norms = []
    for _ in range(50):
        for stream, grads in zip(streams, lists, strict=True):
            with torch.cuda.stream(stream):
                norms.append(torch.ops.flatout.unscale_and_check(grads, None, None)[1])
    torch.cuda.synchronize()
    assert [norm.item() for norm in norms] == expected * 50


def test_a_check_in_a_cuda_graph_concludes_in_every_replay():
    grads = [torch.ones(100_000, device="cuda"), torch.ones(7, device="cuda", dtype=torch.bfloat16)]
    torch.ops.flatout.unscale_and_check(grads, None, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found_inf, norm, _ = torch.ops.flatout.unscale_and_check(grads, None, 1.0)
    for value in (2.0, math.inf, 3.0):
        for g in grads:
            g.fill_(value)
        graph.replay()
        assert found_inf.item() == (value == math.inf)
        assert norm.item() == pytest.approx(value * 100_007**0.5, rel=1e-6)


def test_a_scaler_over_both_devices_finds_an_infinity_on_either():
    for bad in ("cpu", "cuda"):
        params = [torch.nn.Parameter(torch.ones(5, device=device)) for device in ("cuda", "cpu")]
        for optimizer in (fo.SGD(params, lr=1.0), torch.optim.SGD(params, lr=1.0)):
            scaler = GradScaler("cuda", init_scale=4.0)
            scaler.scale(torch.ones((), device="cuda"))
            for unscale_first in (True, False):
                for p in params:
                    p.grad = torch.full_like(p, math.inf if p.device.type == bad else 4.0)
                if unscale_first:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                assert scaler.last_step_skipped.item()
                scaler.update()
            assert scaler.get_scale() == 1
            assert all((p == 1).all() for p in params)


def test_thousands_of_tensors_need_several_launches():
    params = [torch.nn.Parameter(torch.ones(1 + i % 50, device="cuda")) for i in range(5000)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = fo.AdamW(params, lr=0.5, weight_decay=0.0)
    result = update(optimizer, max_grad_norm=1e9)
    assert result.grad_norm.item() == pytest.approx(sum(p.numel() for p in params) ** 0.5, rel=1e-6)
    flat = torch.cat([p.detach() for p in params])
    torch.testing.assert_close(flat, torch.full_like(flat, 0.5))
    assert all(s["step"].item() == 1 for s in optimizer.state.values())


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run a step on a side stream, and return a graph of the next one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_an_update_in_a_cuda_graph():
    p, q = (torch.nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(2))
    lr = torch.tensor(0.1, device="cuda")
    graphed, eager = fo.AdamW([p], lr=lr), fo.AdamW([q], lr=lr)
    inv_scale = torch.tensor(0.5, device="cuda")
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)

    def one(optimizer):
        update(optimizer, inv_scale=inv_scale, max_grad_norm=1.0)

    graph = captured(lambda: one(graphed))
    one(eager)
    for step in range(4):
        value = float("inf") if step == 2 else 1.0 + step
        p.grad.fill_(value), q.grad.fill_(value)
        lr.fill_(0.1 / (1 + step))
        graph.replay()
        one(eager)
    torch.testing.assert_close(p, q)
    assert graphed.state[p]["step"].item() == 4


def test_each_group_in_a_cuda_graph_reads_its_own_learning_rate():
    params = [torch.nn.Parameter(torch.zeros(100, device="cuda")) for _ in range(3)]
    rates = [torch.tensor(rate, device="cuda") for rate in (0.5, 0.25)]
    groups = [{"params": p, "lr": lr} for p, lr in zip(params, [*rates, 0.125], strict=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = fo.SGD(groups)
    with pytest.warns(RuntimeWarning, match=r"repeats lr=0\.125"):
        graph = captured(optimizer.step)
    rates[1].fill_(2.0)
    graph.replay()
    assert [p.unique().item() for p in params] == [-1.0, -2.25, -0.25]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion"])
def test_a_graph_with_a_learning_rate_of_the_host_is_refused_as_in_torch(name):
    """A schedule would have no effect on replays."""
    p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = getattr(fo, name)([p], lr=0.1)
    with pytest.raises(RuntimeError, match=r"for an instance of .* but param_groups' capturable is False"):
        captured(optimizer.step)
    optimizer.param_groups[0]["capturable"] = True
    graph, before = captured(optimizer.step), p.detach().clone()
    graph.replay()
    assert not torch.equal(p, before)


def test_a_graph_of_sgd_warns_of_its_constants():
    """torch.optim.SGD has no option ``capturable``, and is captured with its numbers."""
    p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    p.grad = torch.ones_like(p)
    with pytest.warns(RuntimeWarning, match="repeats lr=0.25"):
        captured(fo.SGD([p], lr=0.25).step).replay()
    assert (p == 0.5).all()


@pytest.mark.parametrize("master_weights", ["float32", "remainder"])
def test_replays_see_what_is_written_to_16_bit_parameters(master_weights):
    p, q = (torch.nn.Parameter(torch.ones(1000, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
    options = {"lr": torch.tensor(0.1, device="cuda"), "master_weights": master_weights}
    graphed, eager = fo.AdamW([p], **options), fo.AdamW([q], **options)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    graph = captured(graphed.step)
    eager.step()
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                p[::2] = q[::2] = 4.0
        graph.replay()
        eager.step()
    assert (p[::2] > 3).all()
    assert torch.equal(p, q)


def test_a_graph_that_reads_the_scale_sees_every_new_one():
    """Capture the backward, but not the update, as in torch's notes on CUDA graphs."""
    p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer, scaler = fo.SGD([p], lr=1.0), GradScaler("cuda", init_scale=8.0, growth_interval=1)
    for _ in range(3):  # before a capture, an update may move the scale in memory
        p.grad = scaler.scale(torch.ones_like(p))
        scaler.step(optimizer)
        scaler.update()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scaler.scale(p.sum()).backward()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale(p.sum()).backward()
    for _ in range(4):
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0 * 2**7
    assert (p == 1 - 7).all()


def test_a_captured_update_changes_the_scale_in_every_replay():
    p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = fo.SGD([p], lr=torch.tensor(1.0, device="cuda"))
    scaler = GradScaler("cuda", init_scale=8.0, growth_interval=2)
    p.grad = torch.full_like(p, 4.0)

    def one() -> None:
        scaler.step(optimizer, max_grad_norm=math.inf)
        scaler.update()

    scaler.scale(torch.ones((), device="cuda"))
    graph = captured(one)
    assert scaler.keeps_scale_in_place
    scales, skips = [], []
    for value in (4.0, math.inf, 4.0, 4.0):
        p.grad.fill_(value)
        graph.replay()
        scales.append(scaler.get_scale())
        skips.append(scaler.last_step_skipped.item())
    assert scales == [16, 8, 8, 16]
    assert skips == [False, True, False, False]


@pytest.mark.sanitize
def test_rewriting_forms():
    for dtype in DTYPES:
        g = torch.full((100_001,), 8.0, dtype=dtype, device="cuda")[1:]
        found_inf, norm = unscale_and_check_(g, 0.25)
        assert found_inf.item() == 0
        assert norm.item() == pytest.approx(2 * 100_000**0.5, rel=1e-6)
        assert (g == 2).all()
        p = torch.nn.Parameter(torch.zeros_like(g))
        p.grad = g
        clip_grad_norm_(p, 2 * 100_000**0.5 / 4)
        # clip_grad_norm_ adds 1e-6 to the norm against division by 0, which shows in float64.
        torch.testing.assert_close(p.grad, torch.full_like(p, 0.5), rtol=1e-6, atol=0)


@pytest.mark.sanitize
def test_every_half_and_bfloat16_converts_as_torch_does():
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.uint16)
    factor = torch.tensor(1.0009765625, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        expected = (bits.view(dtype).float() * factor).to(dtype)
        scaled = bits.clone().view(dtype)
        torch.ops.flatout.scale_([scaled], factor)
        torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)


def test_fuse_moves_step_counts_and_unfuse_brings_them_back():
    p = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.AdamW([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    fo.fuse(optimizer)
    optimizer.step()
    assert optimizer.state[p]["step"].is_cuda
    fo.unfuse(optimizer)
    assert optimizer.state[p]["step"].device.type == "cpu"
    assert optimizer.state[p]["step"] == 3
    optimizer.step()


def test_a_side_stream_is_respected():
    p = torch.nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    optimizer = fo.SGD([p], lr=1.0)
    p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        p.grad.fill_(1.0)
        update(optimizer, max_grad_norm=1e9)
    stream.synchronize()
    assert (p == -1).all()
