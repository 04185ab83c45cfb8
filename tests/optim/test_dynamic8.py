"""Moments in 8 bits: map, codes, steps, and conversion from and to other dtypes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.optim as fo
from flatout.core.snapshot import Snapshot
from flatout.optim import dynamic8
from flatout.optim.options import EXTRA_STATE
from tests.optim.bounds import SMALLEST_SCALE, decoded, dynamic_map, in_memory_order, nearest_code
from tests.optim.cases import BRAIN, CODES, DOUBLE, FLOAT, HALF, Case, Run, Step
from tests.optim.harness import Calls
from tests.optim.helpers import set_grads
from tests.optim.rules import IN_TORCH, NAMES, RULES

MOMENTS = {True: "exp_avg", False: "exp_avg_sq"}
"""Moment by whether its codes have a sign."""
signs = pytest.mark.parametrize("has_sign", [True, False], ids=["signed", "unsigned"])


def make(name, params, **options):
    return getattr(fo, name)(params, **{"lr": 1e-2, **RULES[name].options, "moment_dtype": torch.uint8, **options})


def parameters(*shapes, dtype=FLOAT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def stepped(optimizer, params, steps):
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def moments_of(optimizer, p):
    return {key: value for key, value in optimizer.state[p].items() if key not in ("step", *EXTRA_STATE)}


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype, key
        assert torch.equal(value, b[key]), key


# ---- the map and its codes ---------------------------------------------------------------------------------


def all_codes(has_sign):
    """Return the number of each code, from the native decoder."""
    return dynamic8.decode(torch.arange(256).to(CODES), torch.ones(1), MOMENTS[has_sign])


@signs
def test_the_map_is_the_papers(has_sign):
    numbers = dynamic_map(has_sign)
    assert numbers.unique().numel() == 256
    torch.testing.assert_close(all_codes(has_sign).double(), numbers, rtol=2.0**-23, atol=0)


@signs
def test_the_map_is_bitsandbytes(has_sign):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.testing.assert_close(all_codes(has_sign), functional.create_dynamic_map(has_sign), rtol=2.0**-21, atol=0)


def encoded(values, has_sign):
    """Encode any number of values. Each block contains a 1, so its absmax is 1."""
    blocks = torch.nn.functional.pad(values.view(-1, 255), (1, 0), value=1.0)
    codes, absmax = dynamic8.encode(blocks, MOMENTS[has_sign])
    assert (absmax == 1).all()
    return codes[:, 1:].flatten()


@signs
def test_every_float_around_halfway_goes_to_the_nearest(has_sign):
    numbers = dynamic_map(has_sign)
    halfway = (numbers[:-1] + numbers[1:]) / 2
    near = [halfway.float()]
    for direction in (-2.0, 2.0):
        at = near[0]
        for _ in range(8):
            at = torch.nextafter(at, torch.full_like(at, direction))
            near.append(at)
    values = torch.cat(near)
    codes = encoded(values, has_sign).long()
    # Within half a unit in the last place of the middle, one float32 product decides. Either neighbor is right.
    distance = (values.double() / halfway.repeat(len(near)) - 1).abs()
    expected, below = nearest_code(values.double(), has_sign), torch.arange(255).repeat(len(near))
    clear = distance > 2.0**-24
    assert clear.float().mean() > 0.85
    assert torch.equal(codes[clear], expected[clear])
    assert ((codes == below) | (codes == below + 1)).all()


@signs
@settings(max_examples=100)
@given(exponent=st.integers(-90, 100), spread=st.integers(0, 12), seed=st.integers(0, 999), count=st.integers(1, 700))
def test_decoded_is_nearest(has_sign, exponent, spread, seed, count):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator).mul(10.0 ** -(torch.rand(count, generator=generator) * spread))
    values = values.mul_(2.0**exponent) if has_sign else values.abs_().mul_(2.0**exponent)
    codes, absmax = dynamic8.encode(values, MOMENTS[has_sign])
    got = dynamic8.decode(codes, absmax, MOMENTS[has_sign])
    scale = torch.nn.functional.pad(values.abs(), (0, -count % 256)).view(-1, 256).amax(1)
    scale = torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), scale)
    assert torch.equal(absmax, scale)
    scale = scale.repeat_interleave(256)[:count].double()
    numbers = dynamic_map(has_sign)
    best = numbers[nearest_code(values.double() / scale, has_sign)] * scale
    slack = torch.maximum(values.abs(), got.abs()) * 2.0**-21
    assert ((got - values).abs() <= (best - values).abs() + slack).all()
    assert ((got - values).abs() <= values.double().abs() * 0.75 + scale * 3.3e-7).all()
    if not has_sign:
        assert (got[values > 0] > 0).all()


def test_a_positive_second_moment_never_becomes_zero():
    """bitsandbytes rounds such a moment to 0, and the update becomes m / eps."""
    values = torch.tensor([1.0, 1.6e-7, 1e-20, 2.0**-149, 0.0]).repeat(60)[:300]
    for scale in (1.0, 2.0**100, 2.0**-60, 2.0**-126, 2.0**-149):
        scaled = values * scale
        codes, absmax = dynamic8.encode(scaled, "exp_avg_sq")
        got = dynamic8.decode(codes, absmax, "exp_avg_sq")
        assert torch.equal(got > 0, scaled > 0)
        assert (got[got > 0] > 2.0**-126).all(), "no denormal, which may be flushed to 0"
        assert (codes[scaled == 0] == 0).all()


@signs
def test_a_block_of_zeros_has_zero_codes(has_sign):
    codes, absmax = dynamic8.encode(torch.zeros(300), MOMENTS[has_sign])
    begun = dynamic8.zeros(torch.zeros(300), MOMENTS[has_sign])
    assert torch.equal(codes, begun[0])
    assert torch.equal(absmax, begun[1])
    assert not absmax.any()
    assert not dynamic8.decode(codes, absmax, MOMENTS[has_sign]).any()


@signs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_nonfinite_moment_affects_only_its_block(has_sign, bad):
    values = torch.rand(1000)
    values[300] = bad
    codes, absmax = dynamic8.encode(values, MOMENTS[has_sign])
    assert absmax.isnan().tolist() == [False, True, False, False]
    got = dynamic8.decode(codes, absmax, MOMENTS[has_sign])
    assert got[256:512].isnan().all()
    assert got[:256].isfinite().all()
    assert got[512:].isfinite().all()


@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT, HALF, BRAIN], ids=str)
def test_blocks_are_in_the_order_of_memory(dtype):
    values = torch.randn(4, 6, 32, 8).to(dtype).contiguous(memory_format=torch.channels_last)
    codes, absmax = dynamic8.encode(values, "exp_avg")
    assert codes.stride() == values.stride()
    flat, flat_absmax = dynamic8.encode(in_memory_order(values), "exp_avg")
    assert torch.equal(in_memory_order(codes), flat)
    assert torch.equal(absmax, flat_absmax)
    got = dynamic8.decode(codes, absmax, "exp_avg")
    assert got.stride() == values.stride()
    torch.testing.assert_close(got.double(), decoded(codes, absmax, True), rtol=2.0**-22, atol=0)


# ---- steps -------------------------------------------------------------------------------------------------

COMPOSITIONS = [
    (FLOAT, {}),
    (FLOAT, {"low_precision_copy": BRAIN, "ema_decay": 0.9}),
    (HALF, {}),
    (HALF, {"master_weights": "float32", "ema_decay": 0.5}),
    (BRAIN, {}),
    (BRAIN, {"stochastic_rounding": True, "seed": 3, "ema_decay": 0.9}),
    (BRAIN, {"master_weights": "float32"}),
    (BRAIN, {"master_weights": "remainder"}),
    (BRAIN, {"master_weights": "remainder", "ema_decay": 0.9, "stochastic_rounding": True}),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("composition", range(len(COMPOSITIONS)))
def test_a_step_is_the_reference_rounded_to_codes(name, composition):
    """The case has sizes around a block, a stage and a chunk, odd layouts, a skipped step, a clip, and all options."""
    dtype, additions = COMPOSITIONS[composition]
    variants, turn = RULES[name].with_state, composition + NAMES.index(name)
    options = {"lr": 0.01, "weight_decay": 0.1, "maximize": bool(turn % 2)} | variants[turn % len(variants)]
    tensors = (
        ((16_384 + 257,), dtype, "offset"),
        ((4096,), dtype, "contiguous"),
        ((4095,), dtype, "contiguous"),
        ((70, 61), dtype, "transposed"),
        ((8, 6, 10, 11), dtype, "channels_last"),
        ((50, 90), dtype, "strided"),
    )
    steps = (
        Step(1, 8.0, "tensor", 0.5),
        Step(2, 8.0, "tensor", 0.5, bad=float("nan")),
        Step(3, missing=frozenset({1, 3}), grad_layout="offset"),
        Step(4, max_norm=1e6, grad_layout="contiguous"),
    )
    case = Case(name, tensors, options, {**additions, "moment_dtype": CODES}, steps)
    run = Run(case, checked=True)
    for p, (shape, _, _) in zip(run.params, tensors, strict=True):
        moments = moments_of(run.optimizer, p)
        assert ({m.dtype for m in moments.values()} == {CODES, FLOAT}) == (torch.Size(shape).numel() >= 4096)
    assert Run(case, reload_after=2).result == run.result


def test_the_state_takes_two_bytes_per_parameter():
    (p,) = parameters((4096,), dtype=BRAIN)
    optimizer = make("AdamW", [p], master_weights="remainder")
    stepped(optimizer, [p], [0])
    state = optimizer.state[p]
    assert sum(value.nbytes for key, value in state.items() if key != "step") == 4096 * (2 + 1 + 1) + 2 * 16 * 4


@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_keep_their_moments(dtype):
    p, q = (torch.nn.Parameter(torch.ones(5000, dtype=dtype)) for _ in range(2))
    ours, plain = make("Adam", [p]), fo.Adam([q], lr=1e-2)
    for optimizer, parameter in ((ours, p), (plain, q)):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    assert torch.equal(p, q)
    same(ours.state[p], plain.state[q])


def test_dtensors_are_refused_before_anything_is_begun(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        p = torch.nn.Parameter(distribute_tensor(torch.ones(5000), dist.init_device_mesh("cpu", (1,)), [Shard(0)]))
        p.grad = torch.ones_like(p)
        optimizer = fo.AdamW([p])
        for refused in (lambda: make("AdamW", [p]), optimizer.step):
            with pytest.raises(ValueError, match=r"moment_dtype.*torch\.uint8.*torch\.bfloat16"):
                refused()
            optimizer.param_groups[0]["moment_dtype"] = torch.uint8
        assert not optimizer.state
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_codes_do_not_depend_on_the_number_of_threads(name):
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            params = parameters((300_001,), (9000,), dtype=BRAIN)
            optimizer = make(name, params, stochastic_rounding=True, seed=5)
            stepped(optimizer, params, range(4))
            results.append([{"p": p.detach(), **optimizer.state[p]} for p in params])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            same(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_gradient_that_is_no_number_shows(bad):
    """A NaN gradient that is not skipped must not leave finite moments.

    The block becomes NaN, and the next step turns its weights into NaN.
    """
    (p,) = parameters((8192,))
    optimizer = make("AdamW", [p])
    set_grads([p], 0)
    p.grad[5000] = bad
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[p][f"{key}_absmax"].isnan().nonzero().tolist() == [[5000 // 256]]
    stepped(optimizer, [p], [1])
    assert p[4864:5120].isnan().all()
    assert p[:4864].isfinite().all()
    assert p[5120:].isfinite().all()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_after(optimizer_of, steps=150):
    """Train a network to copy another one. Return the mean of its last ten losses, and its first loss."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = (
        torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)) for _ in range(2)
    )
    for net in (teacher, student):
        for p in net.parameters():
            p.data = torch.randn(p.shape, generator=generator) * (2.0 / p.shape[-1] ** 0.5 if net is teacher else 0.1)
    optimizer = optimizer_of(student.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = torch.nn.functional.mse_loss(student(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_as_with_moments_in_float32(name, one_thread):
    options = {"lr": {"SGD": 0.3, "Lion": 1e-3}.get(name, 1e-2)}
    exact, begin = loss_after(lambda params: make(name, params, moment_dtype=None, **options))
    codes, _ = loss_after(lambda params: make(name, params, **options))
    assert exact < begin / 4, "it learns"
    assert codes == pytest.approx(exact, rel=0.02)
    assert codes != exact


# ---- saved, loaded, converted ------------------------------------------------------------------------------


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def floats_of(optimizer, p):
    """Return the moments as numbers, decoded from codes."""
    state = optimizer.state[p]
    return {
        key: dynamic8.decode(value, state[f"{key}_absmax"], key) if value.dtype == CODES else value
        for key, value in moments_of(optimizer, p).items()
        if not key.endswith("_absmax")
    }


def encoded_moments(moments):
    """Encode float32 moments as an 8-bit optimizer stores them."""
    result = {}
    for key, value in moments.items():
        result[key], result[f"{key}_absmax"] = dynamic8.encode(value.float(), key)
    return result


@pytest.mark.parametrize("clone", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_round_trip_to_the_bit(name, clone):
    params = [*parameters((70, 80), (12,), dtype=BRAIN), torch.nn.Parameter(torch.randn(8, 6, 10, 11).bfloat16())]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    one = make(name, params, master_weights="remainder")
    stepped(one, params, range(3))
    if clone == "state_dict":
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        two = make(name, others, master_weights="remainder")
        two.load_state_dict(through_a_file(one.state_dict()))
    else:
        two = copy.deepcopy(one) if clone == "deepcopy" else pickle.loads(pickle.dumps(one))
        others = two.param_groups[0]["params"]
    for _ in range(2):
        for p, q in zip(params, others, strict=True):
            same(one.state[p], two.state[q])
            assert torch.equal(p, q)
        stepped(one, params, [7]), stepped(two, others, [7])


@pytest.mark.parametrize("name", IN_TORCH)
def test_a_float_state_is_encoded_when_it_is_loaded(name):
    theirs, ours, mine = (parameters((70, 80), (12,)) for _ in range(3))
    basic = {"lr": 1e-2, **RULES[name].options}
    for source in (getattr(torch.optim, name)(theirs, **basic), getattr(fo, name)(mine, **basic)):
        sources = source.param_groups[0]["params"]
        stepped(source, sources, range(2))
        optimizer = make(name, ours)
        optimizer.load_state_dict(source.state_dict())
        same(moments_of(optimizer, ours[0]), encoded_moments(moments_of(source, sources[0])))
        same(moments_of(optimizer, ours[1]), moments_of(source, sources[1]))
        stepped(optimizer, ours, [2])


@pytest.mark.parametrize("target", [None, FLOAT, BRAIN], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_decoded_where_8_bits_are_not_wanted(name, target):
    """The codes are decoded by loading, and by a changed option of a live group.

    Saved options would take precedence, so the test removes the saved option.
    """
    ours, theirs = parameters((70, 80), (12,)), parameters((70, 80), (12,))
    optimizer = make(name, ours)
    stepped(optimizer, ours, range(2))
    numbers = [floats_of(optimizer, p) for p in ours]
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["moment_dtype"]
    other = make(name, theirs, moment_dtype=target)
    other.load_state_dict(saved)
    optimizer.param_groups[0].update(moment_dtype=target, lr=0.0, betas=(1.0, 1.0), momentum=1.0, dampening=1.0)
    stepped(optimizer, ours, [2])
    for p, q, expected in zip(ours, theirs, numbers, strict=True):
        expected = {key: value.to(target or FLOAT) for key, value in expected.items()}
        same(moments_of(other, q), expected)
        if name != "SGD" or target is None:
            same(moments_of(optimizer, p), expected)
    stepped(other, theirs, [3])


def test_a_live_group_turns_to_8_bits_and_back():
    params = parameters((70, 80), (12,))
    optimizer = make("AdamW", params, moment_dtype=None, lr=0.0, betas=(0.9, 0.99))
    stepped(optimizer, params, range(2))
    before = floats_of(optimizer, params[0])
    optimizer.param_groups[0].update(moment_dtype=torch.uint8, betas=(1.0, 1.0))
    stepped(optimizer, params, [2])
    expected = encoded_moments(before)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], expected["exp_avg_sq"])
    # The map has no -1, so the absmax of a block shrinks if its extreme is negative. Signed codes therefore change.
    assert (optimizer.state[params[0]]["exp_avg"].int() - expected["exp_avg"].int()).abs().max() <= 1
    assert optimizer.state[params[1]]["exp_avg"].dtype == FLOAT
    codes = floats_of(optimizer, params[0])
    optimizer.param_groups[0]["moment_dtype"] = None
    stepped(optimizer, params, [3])
    assert optimizer.state[params[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    same(moments_of(optimizer, params[0]), codes)


def test_other_strides_are_other_blocks():
    p = torch.nn.Parameter(torch.randn(8, 6, 10, 11))
    optimizer = make("Lion", [p], lr=0.0)
    stepped(optimizer, [p], [0])
    before = floats_of(optimizer, p)["exp_avg"]
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    optimizer.param_groups[0]["betas"] = (0.5, 1.0)
    stepped(optimizer, [p], [1])
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    # Two roundings, each by at most half of the widest bin.
    difference = (floats_of(optimizer, p)["exp_avg"] - before).abs().max()
    assert 0 < difference < 2.1 * 0.45 / 64 * before.abs().max()


def test_fuse_and_unfuse():
    params = parameters((70, 80), (12,))
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    stepped(optimizer, params, range(2))
    fo.fuse(optimizer, moment_dtype=torch.uint8)
    stepped(optimizer, params, [2])
    assert optimizer.state[params[0]]["exp_avg"].dtype == CODES
    expected = floats_of(optimizer, params[0])
    assert type(fo.unfuse(optimizer)) is torch.optim.AdamW
    assert optimizer.state[params[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    same(moments_of(optimizer, params[0]), expected)
    stepped(optimizer, params, [3])


def test_a_skipped_first_step_leaves_zeros():
    for name in NAMES:
        (p,) = parameters((5000,))
        before = p.detach().clone()
        optimizer = make(name, [p])
        set_grads([p], 0)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert torch.equal(p, before)
        assert not any(value.any() for value in floats_of(optimizer, p).values())
        published = optimizer.state_dict()["state"]
        fresh = make(name, parameters((5000,)))
        fresh.load_state_dict(copy.deepcopy({**optimizer.state_dict(), "state": published}))
        del optimizer.found_inf
        q = fresh.param_groups[0]["params"][0]
        stepped(optimizer, [p], [1]), stepped(fresh, [q], [1])
        assert torch.equal(p, q)


def test_a_buffer_that_waits_for_its_first_step_is_saved_as_none():
    (p,) = parameters((5000,))
    optimizer = make("SGD", [p], dampening=0.2)
    set_grads([p], 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.state_dict()["state"][0] == {"momentum_buffer": None}


def test_a_snapshot_restores_codes():
    torch.manual_seed(0)
    model = torch.nn.Linear(70, 80)
    optimizer = make("AdamW", model.parameters())
    params = list(model.parameters())
    stepped(optimizer, params, range(2))
    kept = [copy.deepcopy({"p": p.detach(), **optimizer.state[p]}) for p in params]
    state = Snapshot.capture([model], optimizer)
    optimizer.param_groups[0]["moment_dtype"] = None
    stepped(optimizer, params, range(2, 4))
    state.restore()
    for p, expected in zip(params, kept, strict=True):
        same({"p": p.detach(), **optimizer.state[p]}, expected)
    stepped(optimizer, params, [4])
    assert optimizer.state[params[0]]["exp_avg"].dtype == CODES


def test_codes_that_are_not_in_use_are_no_numbers():
    """The momentum is turned off and on again, also with a checkpoint in between."""
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(2))
    optimizers = [fo.SGD([x], lr=0.1, momentum=0.9, moment_dtype=torch.uint8) for x in (p, q)]
    for optimizer, x in zip(optimizers, (p, q), strict=True):
        set_grads([x], 1)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.step()
    loaded = fo.SGD([q], lr=0.1, momentum=0.9)
    loaded.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for optimizer in (optimizers[0], loaded):
        optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.step()
    assert torch.equal(p, q)
    fused = fo.fuse(torch.optim.SGD([q], lr=0.1, momentum=0.9), moment_dtype=torch.uint8)
    fused.step()
    fused.param_groups[0]["momentum"] = 0.0
    state = fo.unfuse(fused).state[q]
    assert state.keys() == {"momentum_buffer"}
    assert state["momentum_buffer"].dtype == FLOAT


@pytest.mark.parametrize("absmax", [None, torch.zeros(3), torch.zeros(20, dtype=torch.float64)], ids=str)
def test_codes_without_their_absmaxes_are_refused(absmax):
    p = torch.nn.Parameter(torch.ones(5000))
    optimizer = fo.AdamW([p], moment_dtype=torch.uint8)
    set_grads([p], 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["exp_avg_absmax"]
    if absmax is not None:
        saved["state"][0]["exp_avg_absmax"] = absmax
    before = {name: value.clone() for name, value in optimizer.state[p].items()}
    with pytest.raises(ValueError, match=r"exp_avg_absmax.*\(20,\)"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(optimizer.state[p][name], value) for name, value in before.items())


def test_parameters_without_codes_share_a_bucket():
    params = [torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (10, 5000)]
    optimizer = fo.AdamW(params, moment_dtype=torch.uint8)
    set_grads(params, 1)
    with Calls() as calls:
        optimizer.step()
    assert len(calls.made()) == 1
