"""Options of flatout's optimizers on a GPU: the CPU suite's checks, and errors that only a GPU can make."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import flatout.optim as fo
from flatout import native
from flatout.amp import GradScaler, clip_grad_norm_
from flatout.optim import update
from tests.gpu.trace import traced
from tests.optim.bounds import away_from_zero
from tests.optim.cases import BRAIN, CODES, FLOAT, HALF, Case, Run, Step, bits, cases, weight_of
from tests.optim.rules import NAMES, RULES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not native.BUILT_WITH_CUDA, reason="this build has no CUDA kernels"),
]
EVERYTHING: list[tuple[torch.dtype, dict[str, Any]]] = [
    (FLOAT, {}),
    (FLOAT, {"moment_dtype": BRAIN, "stochastic_rounding": True, "ema_decay": 0.9, "low_precision_copy": BRAIN}),
    (BRAIN, {"master_weights": "float32", "ema_decay": 0.9}),
    (BRAIN, {"master_weights": "remainder", "moment_dtype": BRAIN}),
    (BRAIN, {"stochastic_rounding": True, "seed": 5}),
    (HALF, {"master_weights": "float32", "ema_decay": 0.5}),
    (FLOAT, {"moment_dtype": CODES, "ema_decay": 0.9, "low_precision_copy": BRAIN}),
    (BRAIN, {"moment_dtype": CODES, "master_weights": "remainder"}),
    (BRAIN, {"moment_dtype": CODES, "stochastic_rounding": True, "seed": 5}),
]
storages = pytest.mark.parametrize(
    ("dtype", "additions"), EVERYTHING, ids=lambda v: ",".join(v) if isinstance(v, dict) else str(v)
)


def parameters(sizes: list[int], dtype: torch.dtype = FLOAT, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to("cuda", dtype)) for n in sizes]


def set_grads(params: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to("cuda", p.dtype)


# ---- the CPU suite's checks --------------------------------------------------------------------------------


@settings(max_examples=150)
@given(cases())
def test_every_step_equals_the_reference(case):
    Run(case, checked=True, device="cuda")


@settings(max_examples=30)
@given(cases())
def test_the_same_bits_every_time(case):
    assert Run(case, device="cuda").result == Run(case, device="cuda").result


@settings(max_examples=30)
@given(cases())
def test_a_state_dict_in_the_middle_changes_nothing(case):
    assert Run(case, reload_after=0, device="cuda").result == Run(case, device="cuda").result


# Small sizes with every kind of storage. compute-sanitizer runs one rule.
@pytest.mark.parametrize("name", [pytest.param(NAMES[0], marks=pytest.mark.sanitize), *NAMES[1:]])
@storages
def test_every_storage_at_odd_sizes_and_offsets(name, dtype, additions):
    options = {"lr": 0.1, "weight_decay": 0.1, "maximize": False, **RULES[name].with_state[-1]}
    shapes = [(1,), (0,), (16_385,), (7, 9), (2, 3, 4, 5)]
    layouts = ["contiguous", "offset", "offset", "transposed", "channels_last"]
    tensors = tuple((shape, dtype, layout) for shape, layout in zip(shapes, layouts, strict=True))
    steps = (Step(1, 8.0, "tensor", 0.5), Step(2, 8.0, "tensor", 0.5, bad=float("nan")), Step(3, grad_layout="offset"))
    Run(Case(name, tensors, options, additions, steps), checked=True, device="cuda")


# ---- against the CPU, bit for bit --------------------------------------------------------------------------


def exact_steps(device: str, additions: dict[str, Any], momentum: float) -> list[torch.Tensor]:
    """Run SGD on numbers of few bits, so that every float32 intermediate is exact on any device and in any order."""
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter((torch.randint(128, 256, (n,), generator=generator) / 128.0).to(device, BRAIN))
        for n in (100_003, 0, 5, 16_384)
    ]
    optimizer = fo.SGD(params, lr=2.0**-3, momentum=momentum, **additions)
    for _ in range(3):
        for p in params:
            p.grad = (torch.randint(-64, 64, p.shape, generator=generator) / 1024.0).to(device, BRAIN)
        optimizer.step()
    results = [p.detach().cpu() for p in params]
    for p in params:
        kept = (
            optimizer.state[p].get(key) for key in ("momentum_buffer", "momentum_buffer_absmax", "master", "remainder")
        )
        results += [tensor.cpu() for tensor in kept if tensor is not None]
    return results


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    "additions",
    [
        {"stochastic_rounding": True, "seed": 11},
        {"stochastic_rounding": True, "seed": 12, "moment_dtype": BRAIN},
        {"stochastic_rounding": True, "seed": 13, "moment_dtype": CODES},
        {"master_weights": "remainder", "moment_dtype": CODES},
        {"master_weights": "float32"},
        {"master_weights": "remainder"},
    ],
    ids=",".join,
)
def test_stochastic_rounding_and_masters_are_bit_equal_to_the_cpus(additions, momentum):
    """The random bits depend on seed, element, tensor and step, but not on the thread."""
    here, there = exact_steps("cpu", additions, momentum), exact_steps("cuda", additions, momentum)
    assert len(here) == len(there)
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum().item()} of {a.numel()} differ"
    assert any(a.numel() and a.unique().numel() > 100 for a in here), "or nothing was rounded"


def random_steps(device: str, name: str, dtype: torch.dtype, additions: dict[str, Any]) -> list[Any]:
    """Return the bits of parameters and states after three steps. CPU loops and kernels split the work differently."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters([100_003, 0, 5, 16_384], dtype)]
    optimizer = getattr(fo, name)(
        params, **{"lr": 1e-2, "weight_decay": 0.1, **RULES[name].with_state[-1], **additions}
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(1 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return bits(optimizer, params)


@pytest.mark.parametrize("name", NAMES)
@storages
def test_steps_have_the_bits_of_the_cpus(name, dtype, additions):
    """No compiler contracts multiply and add. The rules call the fused operation explicitly."""
    assert random_steps("cuda", name, dtype, additions) == random_steps("cpu", name, dtype, additions)


# ---- thousands of tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [2000, 5000])
def test_thousands_of_tensors_equal_one(name, count):
    """Tables are split over launches and blocks. No tensor at a boundary may be dropped or stepped twice."""
    sizes = [1 + (i * 37) % 700 for i in range(count)]
    [whole] = parameters([sum(sizes)])
    pieces = [torch.nn.Parameter(piece.clone()) for piece in whole.detach().split(sizes)]
    one, many = (getattr(fo, name)(params, lr=1e-2, **RULES[name].options) for params in ([whole], pieces))
    for step in range(3):
        set_grads([whole], 1 + step)
        for piece, grad in zip(pieces, whole.grad.split(sizes), strict=True):
            piece.grad = grad.clone()
        # The limit is too high to clip. Norms of other sums differ in their last bit.
        norms = [update(optimizer, max_grad_norm=1e9).grad_norm.item() for optimizer in (one, many)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert torch.equal(torch.cat([p.detach() for p in pieces]), whole.detach())


@pytest.mark.parametrize("name", NAMES)
@storages
def test_2000_tensors_take_two_launches_and_no_wait(name, dtype, additions):
    """One launch checks, and one steps. The step reads everything except gradients from a table on the device."""
    smallest = 4096 if additions.get("moment_dtype") == torch.uint8 else 64  # smallest size of 8-bit moments
    params = parameters([smallest + i % 9 for i in range(2000)], dtype)
    optimizer = getattr(fo, name)(params, **additions)
    inv_scale = torch.tensor(0.5, device="cuda")

    def one() -> None:
        update(optimizer, inv_scale=inv_scale, max_grad_norm=1.0)

    for step in range(2):  # the second step has new gradients, as after zero_grad
        set_grads(params, step)
        one()
    set_grads(params, 9)
    trace = traced(one)
    assert trace.waits == []
    assert len(trace.kernels) == 2, trace.kernels


def stepped(device: str, plan: list[list[int]]) -> list[torch.Tensor]:
    """Return parameters after steps. The plan names the parameters with gradients in each step."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n).to(device)) for n in (5, 20_000, 0, 300, 40_001)]
    optimizer = fo.SGD(params, lr=0.25, momentum=0.5)
    for having in plan:
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i) if i in having else None
        optimizer.step()
    return [p.detach().cpu() for p in params]


def test_a_table_is_for_its_tensors():
    everything = [0, 1, 2, 3, 4]
    plan = [everything, everything, [1, 3], [1, 4], [2], everything]
    for here, there in zip(stepped("cuda", plan), stepped("cpu", plan), strict=True):
        assert torch.equal(here, there)  # updates are exact: sums of powers of two


def zeros_in_freed_memory() -> list[torch.Tensor]:
    """Allocate zeros in all small freed blocks of the current stream.

    A step that reads its table there changes nothing.
    """
    return [torch.zeros(200, dtype=torch.uint8, device="cuda") for _ in range(1000)]


def test_a_table_is_for_its_stream():
    """The optimizer frees the table, and the stream that wrote the table may reuse the memory at once."""
    params = parameters([7, 900])
    optimizer = fo.SGD(params, lr=1.0)
    for p in params:
        p.grad = p.detach().clone()  # the first step leaves 0, the second -p
    before = [p.detach().clone() for p in params]
    optimizer.step()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        optimizer.step()
    optimizer.release()
    taken = zeros_in_freed_memory()
    torch.cuda.synchronize()
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p.detach(), -b)
    assert len(taken) == 1000  # keep it alive until here


def test_a_graph_keeps_a_separate_table():
    """Capture before and between eager steps of one stream, and replay after the optimizer has freed its tables."""
    params = [torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in (7, 900)]
    assert native.has_cuda_kernels(params[0].device.index)
    optimizer = fo.SGD(params, lr=torch.tensor(1.0, device="cuda"))
    for p in params:
        p.grad = torch.ones_like(p)
    graphs, stream = [torch.cuda.CUDAGraph() for _ in range(2)], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graphs[0], stream=stream):  # the very first step
        optimizer.step()
    with torch.cuda.stream(stream):
        optimizer.step()
    with torch.cuda.graph(graphs[1], stream=stream):
        optimizer.step()
    with torch.cuda.stream(stream):
        optimizer.step()
        optimizer.release()
        taken = zeros_in_freed_memory()
    torch.cuda.current_stream().wait_stream(stream)
    for graph in (*graphs, *reversed(graphs)):
        graph.replay()
    assert all((p == -6).all() for p in params)
    assert len(taken) == 1000  # keep it alive until here


def test_a_whole_scaler_step_waits_for_nothing():
    params = parameters([100_000, 3, 0, 17])
    optimizer, scaler = fo.AdamW(params, ema_decay=0.9, low_precision_copy=BRAIN), GradScaler("cuda")

    def one() -> None:
        scaler.step(optimizer, max_grad_norm=1.0)
        scaler.update()
        assert scaler.last_step_skipped.is_cuda

    for step in range(2):
        scaler.scale(torch.ones((), device="cuda"))
        set_grads(params, step, 65536.0)
        one()
    set_grads(params, 9, 65536.0)
    trace = traced(one)
    assert trace.waits == []
    set_grads(params, 10, 65536.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_trace_sees_waits_and_kernels():
    """The tests above rely on this trace."""
    x = torch.ones(1000, device="cuda")
    assert traced(lambda: x.sum().item()).waits
    assert traced(torch.cuda.synchronize).waits
    assert len(traced(lambda: (x.add_(1), x.mul_(2))).kernels) == 2


def test_the_eager_form_waits_for_nothing():
    params = parameters([100_000, 3])
    optimizer, scaler = fo.AdamW(params), GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))

    def one() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for step in range(2):
        set_grads(params, step, 65536.0)
        one()
    set_grads(params, 9, 65536.0)
    assert traced(one).waits == []


# ---- CUDA graphs -------------------------------------------------------------------------------------------


def on_a_side_stream(run: Any) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("name", NAMES)
@storages
def test_replays_equal_eager_steps(name, dtype, additions):
    """The sequence has warm-up, capture, replays with a skipped step, an eager step and more replays.

    All are bit-equal.
    """
    sizes = [1000, 0, 16_385, 3]
    lrs = [torch.tensor(0.1, device="cuda") for _ in range(2)]
    (ours, graphed), (theirs, eager) = (
        (params, getattr(fo, name)(params, lr=lr, **RULES[name].varied, **additions))
        for params, lr in zip((parameters(sizes, dtype), parameters(sizes, dtype)), lrs, strict=True)
    )
    inv_scale = torch.tensor(0.5, device="cuda")
    for params in (ours, theirs):
        set_grads(params, 0)
    static = [p.grad for p in ours]

    def fill(seed: int, bad: bool = False) -> None:
        set_grads(theirs, seed)
        if bad:
            theirs[2].grad[77] = float("inf")
        for g, p in zip(static, theirs, strict=True):
            g.copy_(p.grad)

    def one(optimizer: Any) -> None:
        update(optimizer, inv_scale=inv_scale, max_grad_norm=1.0)

    on_a_side_stream(lambda: one(graphed))
    one(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(graphed)
    for step in range(6):
        fill(1 + step, bad=step == 1)
        for lr in lrs:
            lr.fill_(0.1 / (1 + step))
        if step == 3:  # between replays, as in a manual step
            for p, g in zip(ours, static, strict=True):
                p.grad = g
            one(graphed)
        else:
            graph.replay()
        one(eager)
    assert bits(graphed, ours) == bits(eager, theirs)


def test_the_scale_is_updated_inside_a_graph():
    """The replay unscales, checks, clips, steps and updates the scale.

    The scale halves after an infinity, and grows again.
    """
    p = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer, scaler = fo.SGD([p], lr=1.0), GradScaler("cuda", init_scale=4.0, growth_interval=2)
    scaler.scale(torch.ones((), device="cuda"))

    def one() -> None:
        scaler.step(optimizer, max_grad_norm=1e9)
        scaler.update()

    on_a_side_stream(one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    scales = [scaler.get_scale()]
    for bad in (False, True, False, False):
        p.grad.fill_(float("inf") if bad else 1.0)
        graph.replay()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 4.0, 4.0, 8.0]
    torch.testing.assert_close(p.detach(), torch.full_like(p, -(1 / 4 + 1 / 4 + 1 / 4 + 1 / 4)))


# ---- gradients of any origin -------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
@pytest.mark.parametrize("shift", [1, 3])
def test_gradients_that_are_views_of_a_misaligned_buffer(dtype, shift):
    """DDP's ``gradient_as_bucket_view`` makes such views: odd sizes in one flat buffer, without gaps."""
    sizes = [3, 1000, 0, 16_385, 7]
    ours, theirs = parameters(sizes, dtype), parameters(sizes, dtype)
    a, b = (fo.AdamW(params, lr=1e-2, master_weights="float32") for params in (ours, theirs))
    flat = torch.zeros(shift + sum(sizes), dtype=dtype, device="cuda")
    views = flat[shift:].split(sizes)
    for step in range(3):
        set_grads(theirs, step)
        for p, q, view in zip(ours, theirs, views, strict=True):
            p.grad = view.copy_(q.grad)
        for optimizer in (a, b):
            update(optimizer, inv_scale=0.5, max_grad_norm=1e9)
    assert bits(a, ours) == bits(b, theirs)


def test_gradients_that_come_and_go():
    ours, theirs = parameters([100, 3, 5000]), parameters([100, 3, 5000])
    optimizer, reference = fo.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step in range(5):
        set_grads(ours, step), set_grads(theirs, step)
        ours[step % 3].grad = theirs[step % 3].grad = None
        optimizer.step(), reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_freed_right_after_the_step_are_still_read():
    """``zero_grad`` frees gradients, and the next allocation takes their memory before the kernels have run."""
    params = parameters([1 << 20] * 4)
    before = [p.detach().clone() for p in params]
    optimizer = fo.SGD(params, lr=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    torch.cuda._sleep(50_000_000)
    update(optimizer, max_grad_norm=1e9)
    optimizer.zero_grad()
    noise = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), b - 1, rtol=0, atol=1e-6)
    assert noise[0].isnan().all()


# ---- streams -----------------------------------------------------------------------------------------------


def test_optimizers_on_several_streams_do_not_meet():
    """Each optimizer steps in its own stream, all at the same time. Later the optimizers change streams."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    ours = [parameters([1 << 20, 3, 5000], seed=i) for i in range(4)]
    theirs = [parameters([1 << 20, 3, 5000], seed=i) for i in range(4)]
    optimizers = [fo.AdamW(params, lr=1e-2) for params in ours]
    references = [fo.AdamW(params, lr=1e-2) for params in theirs]
    for params, twins in zip(ours, theirs, strict=True):
        set_grads(params, 1), set_grads(twins, 1)
    torch.cuda.synchronize()
    for turn in range(6):
        for i, optimizer in enumerate(optimizers):
            stream, previous = streams[(i + turn) % 4], streams[(i + turn - 1) % 4]
            stream.wait_stream(previous)  # the previous step of this optimizer ran there
            with torch.cuda.stream(stream):
                update(optimizer, max_grad_norm=1.0)
    torch.cuda.synchronize()
    for _ in range(6):
        for reference in references:
            update(reference, max_grad_norm=1.0)
    for optimizer, reference, params, twins in zip(optimizers, references, ours, theirs, strict=True):
        assert bits(optimizer, params) == bits(reference, twins)


# ---- saving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("location", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_a_checkpoint_of_torchs_from_any_device_goes_on(dtype, location, flags):
    """torch left fused step counts on the device of the checkpoint, or cast them (pytorch #103256, #124133)."""
    p, q = parameters([1000], dtype)[0], parameters([1000], dtype)[0]
    source = torch.optim.AdamW([q], lr=1e-2, **flags)
    set_grads([q], 0)
    source.step()
    file = io.BytesIO()
    torch.save([q.detach(), source.state_dict()], file)
    file.seek(0)
    weights, saved = torch.load(file, map_location=location, weights_only=True)
    with torch.no_grad():
        p.copy_(weights)
    optimizer = fo.AdamW([p], lr=1e-2, **flags)
    optimizer.load_state_dict(saved)
    set_grads([p], 1), set_grads([q], 1)
    optimizer.step(), source.step()
    bound = 1e-5 if dtype == FLOAT else 2e-2
    torch.testing.assert_close(p, q, rtol=bound, atol=bound)
    ours, theirs = optimizer.state_dict()["state"][0]["step"], source.state_dict()["state"][0]["step"]
    assert ours == theirs == 2
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype), "where torch has it"
    other = torch.optim.AdamW([q], lr=1e-2, **flags)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.step()


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_masters_survive_a_checkpoint_read_on_the_cpu(masters):
    [p] = parameters([5000], BRAIN)
    optimizer = fo.AdamW([p], lr=1e-4, master_weights=masters, ema_decay=0.9)
    for step in range(3):
        set_grads([p], step)
        optimizer.step()
    file = io.BytesIO()
    torch.save([p.detach(), optimizer.state_dict()], file)
    file.seek(0)
    weights, saved = torch.load(file, map_location="cpu", weights_only=True)
    q = torch.nn.Parameter(weights.cuda())
    other = fo.AdamW([q], lr=1e-4, master_weights=masters, ema_decay=0.9)
    other.load_state_dict(saved)
    for params, one in (([p], optimizer), ([q], other)):
        set_grads(params, 7)
        one.step()
    assert bits(optimizer, [p]) == bits(other, [q])
    assert torch.equal(away_from_zero(weight_of(other, q)), q.detach().cpu()) or masters == "float32"


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_bfloat16_gradients_are_unscaled(dtype):
    """torch's kernel refuses them (pytorch #127176)."""
    p = torch.nn.Parameter(torch.ones(1001, device="cuda", dtype=dtype))
    optimizer, scaler = fo.SGD([p], lr=0.5), GradScaler("cuda", init_scale=4.0)
    for eager in (True, False):
        p.grad = None
        scaler.scale(p.sum()).backward()
        if eager:
            scaler.unscale_(optimizer)
            assert (p.grad == 1).all()
        scaler.step(optimizer)
        scaler.update()
    assert (p == 0).all()


def test_averages_are_swapped_in_and_out():
    params = parameters([1000, 3, 0], BRAIN)
    optimizer = fo.AdamW(params, lr=0.1, ema_decay=0.5, master_weights="remainder")
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    before = bits(optimizer, params)
    with optimizer.ema.swap():
        for p in params:
            assert torch.equal(p, optimizer.state[p]["ema"].to(BRAIN))
    assert bits(optimizer, params) == before


# Last, because a failed capture may leave torch in an unusual state.
def test_a_capture_of_the_first_step_is_right_or_refused_in_words():
    """A capture must not create state, because each replay would create the state again."""
    ours, theirs = parameters([1000]), parameters([1000])
    graphed, eager = fo.AdamW(ours, lr=0.1), fo.AdamW(theirs, lr=0.1)
    set_grads(ours, 0)
    set_grads(theirs, 0)
    before = ours[0].detach().clone()
    graph = torch.cuda.CUDAGraph()
    refusal = ""
    try:
        with torch.cuda.graph(graph):
            graphed.step()
    except RuntimeError as error:
        refusal = str(error)
    if refusal:
        assert "captur" in refusal
        assert torch.equal(ours[0], before)
        return
    for _ in range(3):
        graph.replay()
        eager.step()
    torch.testing.assert_close(ours, theirs)
