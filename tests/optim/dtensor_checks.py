"""Checks that :mod:`tests.optim.test_dtensor` runs on four ranks. Plain tensors on every rank are the reference."""

from __future__ import annotations

import copy
import functools
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import flatout.amp as fa
import flatout.optim as fo
from flatout.optim import update
from tests.helpers import bits
from tests.optim.harness import only_native
from tests.optim.rules import RULES

F32, BF16 = torch.float32, torch.bfloat16
WORLD = 4
PLACEMENTS = {
    "sharded": ((WORLD,), [Shard(0)]),
    "replicated": ((WORLD,), [Replicate()]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "both ways": ((2, 2), [Shard(0), Shard(1)]),
}
SHAPES = [(5, 7), (3, 2), (1, 4), (64, 3), (8, 8)]
"""Shapes with uneven parts, with empty parts on one or three ranks, and with even parts, on four ranks."""
ADDITIONS = [
    (F32, {}),
    (F32, {"moment_dtype": BF16, "low_precision_copy": BF16, "ema_decay": 0.9}),
    (BF16, {"master_weights": "float32", "ema_decay": 0.9}),
    (BF16, {"master_weights": "remainder", "moment_dtype": BF16, "ema_decay": 0.9}),
    (torch.float64, {"ema_decay": 0.5}),
    (torch.complex64, {}),
]


@functools.cache
def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])


def spread(tensor, place):
    """Return a tensor that all ranks hold, as a DTensor."""
    shape, placements = PLACEMENTS[place]
    return distribute_tensor(tensor.detach().clone(), mesh_of(shape), placements, src_data_rank=None)


def assert_spread(distributed, tensor, place):
    """Check that values are bit-equal, and that placements are torch's."""
    expected = spread(tensor, place)
    assert type(distributed) is DTensor
    assert (distributed.device_mesh, distributed.placements) == (expected.device_mesh, expected.placements)
    assert (distributed.shape, distributed.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(distributed.to_local(), expected.to_local())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(distributed):
    """Return the index of this rank's part of a tensor, and the number of parts."""
    part, parts = 0, 1
    for dim, placement in enumerate(distributed.placements):
        if placement.is_shard():
            size = distributed.device_mesh.size(dim)
            part, parts = part * size + distributed.device_mesh.get_local_rank(dim), parts * size
    return part, parts


def everywhere(value):
    """Gather a value of each rank."""
    found = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def distributed(params, place):
    return [torch.nn.Parameter(spread(p, place)) for p in params]


def set_grads(plain, spread_out, place, seed):
    generator = torch.Generator().manual_seed(seed)
    for p, d in zip(plain, spread_out, strict=True):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        d.grad = spread(p.grad, place)


def twins(name, place, dtype=F32, **options):
    plain = parameters(dtype)
    spread_out = distributed(plain, place)
    made = [getattr(fo, name)(params, **{"lr": 1e-2, **options}) for params in (plain, spread_out)]
    return (*made, plain, spread_out)


def assert_twins(ours, theirs, place):
    """Check that parameters and states over DTensors equal those over plain tensors."""
    for d, p in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert_spread(d.detach(), p, place)
        assert ours.state[d].keys() == theirs.state[p].keys()
        for key, value in theirs.state[p].items():
            if key == "step":
                assert type(ours.state[d][key]) is torch.Tensor
                assert ours.state[d][key] == value
            else:
                assert_spread(ours.state[d][key], value, place)


# ---- steps -------------------------------------------------------------------------------------------------


def steps_are_those_of_plain_tensors(name, place):
    for dtype, additions in ADDITIONS:
        theirs, ours, plain, spread_out = twins(name, place, dtype, **RULES[name].varied, **additions)
        with only_native():
            for step in range(3):
                set_grads(plain, spread_out, place, step)
                for optimizer, params in ((theirs, plain), (ours, spread_out)):
                    if step == 1:
                        params[0].grad = None
                    found = update(optimizer, inv_scale=torch.tensor(0.5), max_grad_norm=1e6)
                    assert found.found_inf == 0
        assert_twins(ours, theirs, place)


def states_are_torchs(name, place):
    options = RULES[name].varied
    plain = parameters(F32)
    ours, theirs = distributed(plain, place), distributed(plain, place)
    optimizer, reference = getattr(fo, name)(ours, **options), getattr(torch.optim, name)(theirs, **options)
    for step in range(3):
        for params, one in ((ours, optimizer), (theirs, reference)):
            set_grads(plain, params, place, step)
            one.step()
    for p, q in zip(theirs, ours, strict=True):
        torch.testing.assert_close(q.to_local(), p.to_local(), rtol=3e-6, atol=3e-6)
        saved, expected = (o.state_dict()["state"] for o in (optimizer, reference))
        for index, entry in expected.items():
            assert saved[index].keys() == entry.keys()
            for key, value in entry.items():
                kept = saved[index][key]
                assert type(kept) is type(value)
                if isinstance(value, DTensor):
                    assert (kept.placements, kept.device_mesh) == (value.placements, value.device_mesh)
                    kept, value = kept.to_local(), value.to_local()
                torch.testing.assert_close(kept, value, rtol=3e-6, atol=3e-6)


def fused_and_back(name, place):
    plain = parameters(F32)
    ours = distributed(plain, place)
    optimizer = getattr(torch.optim, name)(ours, **RULES[name].varied)
    assert fo.why_not_fusable(optimizer) is None
    reference = getattr(fo, name)(plain, **RULES[name].varied)
    for step in range(4):
        set_grads(plain, ours, place, step)
        if step == 1:
            fo.fuse(optimizer, ema_decay=0.5)
            with only_native():
                optimizer.step()
            assert_spread_state(optimizer, "ema")
        elif step == 3:
            fo.unfuse(optimizer)
            assert type(optimizer) is getattr(torch.optim, name)
            optimizer.step()
        else:
            optimizer.step()
        reference.step()
    for p, d in zip(plain, ours, strict=True):
        torch.testing.assert_close(d.to_local(), spread(p, place).to_local(), rtol=3e-6, atol=3e-6)
        assert "ema" not in optimizer.state[d]


def assert_spread_state(optimizer, key):
    for p, entry in optimizer.state.items():
        assert entry[key].placements == p.placements


def memory_may_be_replaced(place):
    """fully_shard replaces the memory of a DTensor when a module is moved or loaded."""
    theirs, ours, plain, spread_out = twins("AdamW", place, BF16, master_weights="float32")
    with only_native():
        for step in range(3):
            set_grads(plain, spread_out, place, step)
            for p, d in zip(plain, spread_out, strict=True):
                d._local_tensor = d._local_tensor.clone()
                with torch.no_grad():
                    if step == 1:
                        p.mul_(3), d.mul_(3)
            theirs.step(), ours.step()
    assert_twins(ours, theirs, place)


def autograd_hears_of_it(place):
    _, ours, plain, spread_out = twins("SGD", place)
    set_grads(plain, spread_out, place, 0)
    versions = [p._version for p in spread_out]
    ours.step()
    assert all(p._version > version for p, version in zip(spread_out, versions, strict=True))
    versions = [p.grad._version for p in spread_out]
    fa.clip_grad_norm_(spread_out, 0.1)
    assert all(p.grad._version > version for p, version in zip(spread_out, versions, strict=True))


# ---- checks over all ranks ---------------------------------------------------------------------------------


def norms_are_of_all_parts_once(place):
    for dtype in (F32, BF16, torch.float64, torch.complex64):
        for order in (1.0, 2.0, math.inf, 3.0):
            _, ours, plain, spread_out = twins("SGD", place, dtype)
            set_grads(plain, spread_out, place, 0)
            before = [p.grad.clone() for p in spread_out]
            wide = torch.promote_types(dtype, torch.float64)
            expected = torch.nn.utils.get_total_norm([p.grad.to(wide) for p in plain], order)
            if order == 2:
                found = update(ours, max_grad_norm=0.5)
                assert found.grad_norm.item() == pytest.approx(expected.item(), rel=1e-5)
                assert len(set(map(bits, everywhere(found.grad_norm)))) == 1
                assert all(
                    torch.equal(p.grad.to_local(), b.to_local()) for p, b in zip(spread_out, before, strict=True)
                )
            norm = fa.clip_grad_norm_(spread_out, 0.5, order)
            torchs = torch.nn.utils.get_total_norm(before)  # for order inf, torch fails on empty parts
            assert (type(norm), norm.device_mesh) == (type(torchs), torchs.device_mesh)
            for read in (norm, norm.full_tensor(), norm.to_local()):
                assert read.item() == pytest.approx(expected.item(), rel=1e-5)
            assert len(set(map(bits, everywhere(norm.to_local())))) == 1
            for p, grad in zip(spread_out, before, strict=True):
                clipped = (grad.to_local() * (0.5 / expected.item())).to(dtype)
                torch.testing.assert_close(p.grad.to_local(), clipped, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-7)


def plain_tensors_beside_count_once(place):
    for order in (1.0, 2.0, math.inf, 3.0):
        plain = parameters(F32)
        mixed = [
            q if i % 2 else p for i, (p, q) in enumerate(zip(parameters(F32), distributed(plain, place), strict=True))
        ]
        theirs, ours = fo.AdamW(plain, ema_decay=0.9), fo.AdamW(mixed, ema_decay=0.9)
        set_grads(plain, distributed(plain, place), place, 0)
        for p, q in zip(plain, mixed, strict=True):
            q.grad = spread(p.grad, place) if type(q) is DTensor else p.grad.clone()
        expected = update(theirs, max_grad_norm=1e6).grad_norm
        with only_native():
            assert update(ours, max_grad_norm=1e6).grad_norm.item() == pytest.approx(expected.item())
        for p, q in zip(plain, mixed, strict=True):
            assert torch.equal(
                q.to_local() if type(q) is DTensor else q, spread(p, place).to_local() if type(q) is DTensor else p
            )
        norm = fa.clip_grad_norm_(mixed, 0.5, order)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain, 0.5, order))
        for p, q in zip(plain, mixed, strict=True):
            if type(q) is DTensor:
                torch.testing.assert_close(q.grad.to_local(), spread(p.grad, place).to_local())
            else:
                torch.testing.assert_close(q.grad, p.grad)


def one_infinity_stops_all_ranks(place, form):
    for bad in range(3):
        theirs, ours, plain, spread_out = twins("AdamW", place, ema_decay=0.5)
        scalers = [fa.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(3):
            set_grads(plain, spread_out, place, step)
            if step == bad:
                # One part of the fourth parameter is bad. The other ranks cannot see this part.
                plain[3].grad[50, 2] = math.inf
                spread_out[3].grad = spread(plain[3].grad, place)
            for optimizer, scaler, params in ((theirs, scalers[0], plain), (ours, scalers[1], spread_out)):
                scaler.scale(torch.zeros(()))
                with only_native():
                    if form == "eager":
                        scaler.unscale_(optimizer)
                        fa.clip_grad_norm_(params, 1e6)
                        scaler.step(optimizer)
                    else:
                        scaler.step(optimizer, max_grad_norm=1e6)
                assert everywhere(scaler.last_step_skipped.item()) == [step == bad] * WORLD
                scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_twins(ours, theirs, place)


def torchs_scaler_agrees(place):
    _, ours, plain, spread_out = twins("AdamW", place)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    set_grads(plain, spread_out, place, 0)
    spread_out[3].grad = spread(plain[3].grad.index_fill(0, torch.tensor([50]), math.nan), place)
    scaler.scale(torch.zeros(()))
    with only_native():
        scaler.step(ours)
    scaler.update()
    assert everywhere(scaler.get_scale()) == [4.0] * WORLD
    for p, d in zip(plain, spread_out, strict=True):
        assert_spread(d.detach(), p, place)


# ---- random bits -------------------------------------------------------------------------------------------


def random_bits_are_of_the_part(place):
    def run(seed):
        p = torch.nn.Parameter(spread(torch.ones(8, 512, dtype=BF16), place))
        optimizer = fo.SGD([p], lr=2.0**-9, stochastic_rounding=True, seed=seed)
        with only_native():
            for _ in range(4):
                p.grad = spread(torch.ones(8, 512, dtype=BF16), place)
                optimizer.step()
        return bits(p.to_local())

    one, again, other = run(1), run(1), run(2)
    assert one == again
    assert one != other
    parts = everywhere(one)
    expected = {"sharded": 4, "replicated": 1, "hybrid": 2, "both ways": 4}[place]
    assert len(set(parts)) == expected
    if place == "hybrid":
        assert parts[0] == parts[2], "replicas stay replicas"
        assert parts[1] == parts[3]


# ---- averages, saving --------------------------------------------------------------------------------------


def averages_are_swapped_and_copied(place):
    theirs, ours, plain, spread_out = twins("AdamW", place, ema_decay=0.5, low_precision_copy=BF16)
    for step in range(3):
        set_grads(plain, spread_out, place, step)
        theirs.step(), ours.step()
    targets, reference = distributed(plain, place), parameters(F32)
    ours.ema.copy_to(targets), theirs.ema.copy_to(reference)
    for p, d in zip(reference, targets, strict=True):
        assert_spread(d.detach(), p, place)
    before = [bits(p.to_local()) for p in spread_out]
    with ours.ema.swap():
        for p, d in zip(reference, spread_out, strict=True):
            assert_spread(d.detach(), p, place)
            assert torch.equal(ours.state[d]["copy"].to_local(), d.to_local().to(BF16))
    assert [bits(p.to_local()) for p in spread_out] == before
    other = fo.AdamW(distributed(plain, place), ema_decay=0.9)
    other.ema.load_state_dict(ours.ema.state_dict())
    assert_spread_state(other, "ema")
    for p, q in zip(spread_out, other.param_groups[0]["params"], strict=True):
        assert torch.equal(other.state[q]["ema"].to_local(), ours.state[p]["ema"].to_local())
        copied = ours.copy_of(p)
        assert copied is ours.copy_of(p)
        assert torch.equal(copied.to_local(), p.to_local().to(BF16))


def saved_and_loaded(place):
    for dtype, additions in ADDITIONS:
        theirs, ours, plain, spread_out = twins("AdamW", place, dtype, **additions)
        for step in range(4):
            if step == 2:
                file = io.BytesIO()
                torch.save(ours.state_dict(), file)
                spread_out = [torch.nn.Parameter(d.detach().clone()) for d in spread_out]
                ours = fo.AdamW(spread_out, lr=1e-2, **additions)
                ours.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
            set_grads(plain, spread_out, place, step)
            theirs.step(), ours.step()
        for p in plain:
            theirs.state[p].pop("copy", None)
        for d in spread_out:
            ours.state[d].pop("copy", None)
        assert_twins(ours, theirs, place)


# ---- unsupported by the kernels ----------------------------------------------------------------------------


def other_gradients_are_torchs():
    line = mesh_of((WORLD,))
    for make in (
        lambda: torch.full((4, 4), 2.0),
        lambda: distribute_tensor(torch.full((4, 4), 2.0), mesh_of((2, 2)), [Replicate()] * 2, src_data_rank=None),
    ):
        for begun in (False, True):
            p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), line, [Replicate()], src_data_rank=None))
            optimizer = fo.SGD([p], lr=0.5, ema_decay=0.5)
            if begun:
                p.grad = torch.zeros_like(p)
                optimizer.step()
            p.grad = make()
            with pytest.raises(RuntimeError, match="ema_decay"):
                optimizer.step()
            assert (p.to_local() == 1).all()
            assert begun or not optimizer.state, "nothing is begun before it is refused"
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False))
    assert not fo.bucket.takes(p, None)
    p.grad = torch.zeros_like(p)
    fo.SGD([p], lr=0.5).step()


def partial_gradients_are_summed_once():
    """Sequence parallelism leaves partial gradients on replicated parameters. torch's step sums them at each use."""
    line = mesh_of((WORLD,))
    theirs, ours, plain, spread_out = twins("AdamW", "replicated", ema_decay=0.5, lr=1e-3)
    with only_native():
        for step in range(3):
            for p, d in zip(plain, spread_out, strict=True):
                # Sums of small integers are exact.
                parts = torch.randint(-8, 9, (WORLD, *p.shape), generator=torch.Generator().manual_seed(step)).float()
                p.grad = parts.sum(0)
                d.grad = DTensor.from_local(parts[dist.get_rank()], line, [Partial()], run_check=False)
            looks = [update(optimizer, inv_scale=torch.tensor(1.0), max_grad_norm=1e9) for optimizer in (theirs, ours)]
            assert looks[0] == looks[1]
            assert all(d.grad.placements == (Partial(),) for d in spread_out), "gradients are read only"
    assert_twins(ours, theirs, "replicated")
    assert fa.clip_grad_norm_(spread_out, 1e9).item() == pytest.approx(looks[0].grad_norm.item())


def state_of_other_placements_is_spread_anew():
    """The state was saved for other placements, or by a plain model."""
    whole = torch.arange(32.0).reshape(8, 4)
    for place in ((2, 2), [Shard(0), Replicate()]), ((WORLD,), [Shard(0)]), ((WORLD,), [Replicate()]):
        mesh = mesh_of(place[0])
        others = [[Replicate()] * mesh.ndim, [*[Replicate()] * (mesh.ndim - 1), Shard(1)], None]
        others += [[Replicate(), Shard(0)]] if mesh.ndim == 2 else []
        for other in others:
            p = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, place[1], src_data_rank=None))
            optimizer = fo.SGD([p], lr=1.0, momentum=0.5, ema_decay=0.5)
            p.grad = torch.zeros_like(p)
            optimizer.step()
            saved = optimizer.state_dict()
            mine = whole.clone()  # an optimizer keeps the loaded tensors, as in torch
            loaded = distribute_tensor(mine, mesh, other, src_data_rank=None) if other else mine
            saved["state"][0]["momentum_buffer"] = loaded
            optimizer.ema.load_state_dict({"averages": {0: loaded}})
            saved["state"][0]["ema"] = optimizer.state_dict()["state"][0]["ema"]
            optimizer.load_state_dict(saved)
            optimizer.step()
            assert torch.equal(p.full_tensor(), -0.5 * whole)
            assert torch.equal(optimizer.state[p]["momentum_buffer"].full_tensor(), 0.5 * whole)
            assert torch.equal(optimizer.state[p]["ema"].full_tensor(), 0.25 * whole)


def masters_follow_what_is_written(place):
    """The writes go through the DTensor, or into the local part, as torch.distributed.checkpoint does."""
    p = torch.nn.Parameter(spread(torch.ones(8, 8, dtype=BF16), place))
    optimizer = fo.SGD([p], lr=1.0, master_weights="float32")
    for value, write in enumerate((lambda v: p.fill_(v), lambda v: p.to_local().fill_(v)), start=5):
        p.grad = torch.zeros_like(p)
        optimizer.step()
        with torch.no_grad():
            write(float(value))
        optimizer.step()
        assert (p.full_tensor() == value).all()


def a_nan_is_in_every_norm(place):
    p = torch.nn.Parameter(spread(torch.ones(8, 8), place))
    own, parts = part_of(p.detach())
    for part in range(WORLD):
        for order in (1.0, 2.0, math.inf):
            p.grad = torch.ones_like(p)
            if part % parts == own:
                p.grad.to_local().fill_(math.nan)
            norm = fa.clip_grad_norm_([p], 1.0, order)
            assert (norm.full_tensor() if isinstance(norm, DTensor) else norm).isnan()


def ranks_outside_a_mesh_have_nothing_to_say():
    from torch.distributed.device_mesh import DeviceMesh

    p = torch.nn.Parameter(
        distribute_tensor(torch.ones(6, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
    )
    q = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = fo.AdamW([p, q], lr=0.1, ema_decay=0.5), fa.GradScaler("cpu", init_scale=8.0)
    for form in ("lazy", "eager"):
        for x in (p, q):
            x.grad = torch.full_like(x, 8.0)
        scaler.scale(torch.ones(()))
        if form == "eager":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8
    assert torch.allclose(q, torch.full_like(q, 0.8), atol=0.01)
    assert (p in optimizer.state) == (dist.get_rank() < 2)


# ---- models ------------------------------------------------------------------------------------------------


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def sharded(model, shape):
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh_of(shape))
    return fully_shard(model, mesh=mesh_of(shape))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 7, generator=generator), torch.randn(8, 3, generator=generator)


def train(model, optimizer, scaler, steps, mine=slice(None)):
    for step in steps:
        x, y = batch(step)
        loss = (model(x[mine]) - y[mine]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_grad_norm=0.5)
        scaler.update()
        optimizer.zero_grad()


def a_sharded_model_trains_as_a_plain_one(shape, additions):
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    plain, ours = model(), sharded(model(), shape)
    kept = [fo.AdamW(m.parameters(), lr=1e-2, **additions) for m in (plain, ours)]
    scalers = [fa.GradScaler("cpu", init_scale=64.0) for _ in kept]
    train(plain, kept[0], scalers[0], range(4))
    with only_native():
        train(ours, kept[1], scalers[1], range(4), mine)
    for p, d in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(d.full_tensor(), p.detach(), rtol=1e-4, atol=1e-5)
        for key, value in kept[0].state[p].items():
            if key not in ("step", "copy"):
                torch.testing.assert_close(kept[1].state[d][key].full_tensor(), value, rtol=1e-2, atol=1e-4)

    # Save and load as torch.distributed.checkpoint does: by name, in parts and as a whole.
    weights, scale = copy.deepcopy((ours.state_dict(), scalers[1].state_dict()))
    choices = [dcp.StateDictOptions(full_state_dict=whole) for whole in (False, True)]
    saved = [copy.deepcopy(dcp.get_optimizer_state_dict(ours, kept[1], options=choice)) for choice in choices]
    train(ours, kept[1], scalers[1], range(4, 6), mine)
    for state, choice in zip(saved, choices, strict=True):
        again = sharded(model(1), shape)
        again.load_state_dict(weights)
        optimizer, scaler = fo.AdamW(again.parameters(), lr=1e-2, **additions), fa.GradScaler("cpu")
        dcp.set_optimizer_state_dict(again, optimizer, state, options=choice)
        scaler.load_state_dict(scale)
        with only_native():
            train(again, optimizer, scaler, range(4, 6), mine)
        for p, q in zip(ours.parameters(), again.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
            for key, value in kept[1].state[p].items():
                assert torch.equal(local(value), local(optimizer.state[q][key]))


def tensor_parallel_with_sequences():
    """Replicated norms have Partial gradients. Matrices are sharded in either dimension."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    line = mesh_of((WORLD,))
    plain, ours = Block(), Block()
    parallelize_module(
        ours,
        line,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    kept = [fo.AdamW(m.parameters(), lr=1e-2, ema_decay=0.9) for m in (plain, ours)]
    rank = dist.get_rank()
    for step in range(3):
        x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
        plain(x).square().sum().backward()
        ours(x[:, 2 * rank : 2 * rank + 2]).square().sum().backward()
        assert ours.norm.weight.grad.placements == (Partial(),)
        expected = update(kept[0], max_grad_norm=0.5).grad_norm
        with only_native():
            assert update(kept[1], max_grad_norm=0.5).grad_norm.item() == pytest.approx(expected.item(), rel=1e-4)
        for optimizer in kept:
            optimizer.zero_grad()
    for p, d in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(d.full_tensor(), p.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept[1].state[d]["ema"].full_tensor(), kept[0].state[p]["ema"], rtol=1e-4, atol=1e-5)
