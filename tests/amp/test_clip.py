"""clip_grad_norm_ and unscale_and_check_ equal torch, on every kind of gradient."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp as fa

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
NATIVE = [1.0, 2.0, math.inf]
ORDERS = [*NATIVE, 3.0, 0.5, -math.inf]
LAYOUTS = {
    "contiguous": lambda g: g.contiguous(),
    "transposed": lambda g: g.t().contiguous().t(),
    "strided": lambda g: torch.stack([g, g], -1)[..., 0],
}


class Subclass(torch.Tensor):
    """Subclass of Tensor, which native operators must not use, because its memory may have another meaning."""


def parameter(grad: torch.Tensor) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros_like(grad))
    p.grad = grad
    return p


def gradient(shape, dtype, layout="contiguous", seed=0):
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_complex:
        return LAYOUTS[layout](torch.randn(shape, generator=generator).to(dtype))
    parts = (torch.randn(shape, generator=generator) for _ in range(2))
    return LAYOUTS[layout](torch.complex(*parts).to(dtype))


def exact(params):
    """Return the same parameters in double precision. Empty ones are left out, because torch's norms reject them."""
    return [
        parameter(p.grad.to(torch.complex128 if p.grad.is_complex() else torch.float64, copy=True))
        for p in params
        if p.numel()
    ]


def assert_clipped_alike(params, max_norm, order):
    twins = exact(params)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm, order)
    norm = fa.clip_grad_norm_(params, max_norm, order)
    wide = all(p.dtype in (torch.float64, torch.complex128) for p in params)
    assert norm.dtype == (torch.float64 if wide else torch.float32)
    native = order in NATIVE and all(
        type(p.grad) is torch.Tensor and (order == 2 or not p.is_complex()) for p in params
    )
    accuracy = 1e-10 if wide else 2e-6 if native else 1e-3  # torch sums in float32
    torch.testing.assert_close(norm.double(), expected.double(), rtol=accuracy, atol=0)
    for p, q in zip((p for p in params if p.numel()), twins, strict=True):
        bound = max(accuracy, TOLERANCE.get(p.dtype, 0))
        torch.testing.assert_close(p.grad.to(q.dtype), q.grad, rtol=bound, atol=bound * 1e-2)


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (0, 4), (5, 3), (129, 33), (2, 16384)]),
            st.sampled_from(REAL + COMPLEX),
            st.sampled_from(list(LAYOUTS)),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    order=st.sampled_from(ORDERS),
    max_norm=st.sampled_from([0.0, 1e-3, 1.0, 1e9]),
)
def test_any_mix_of_gradients_is_clipped_as_torch_does_in_float64(kinds, order, max_norm):
    params = []
    for seed, (shape, dtype, layout, subclass) in enumerate(kinds):
        grad = gradient(shape, dtype, layout, seed)
        params.append(parameter(grad.as_subclass(Subclass) if subclass else grad))
    if any(p.numel() for p in params):
        assert_clipped_alike(params, max_norm, order)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
def test_nonfinite_gradients_spread_as_in_torch(dtype, order, bad):
    grads = [gradient((7, 3), dtype), gradient((5, 5), dtype)]
    grads[1][2, 1] = bad
    ours, theirs = ([parameter(g.clone()) for g in grads] for _ in range(2))
    a, b = (f(p, 1.0, order) for f, p in ((fa.clip_grad_norm_, ours), (torch.nn.utils.clip_grad_norm_, theirs)))
    torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-2, atol=0, equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        same = p.grad.isfinite() == q.grad.isfinite()
        # torch multiplies a complex gradient by a real number as two complex numbers: inf x 0 is NaN there.
        assert same.all() or dtype.is_complex


@pytest.mark.parametrize("order", [1, 2.0, "inf", 3.0])
def test_an_error_about_the_norm_is_torchs_word_for_word_and_changes_nothing(order):
    messages = []
    for clip in (fa.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        params = [parameter(torch.ones(3)), parameter(torch.tensor([1.0, math.nan]))]
        with pytest.raises(RuntimeError) as error:
            clip(params, 0.1, order, error_if_nonfinite=True)
        messages.append(str(error.value))
        assert (params[0].grad == 1).all()
    assert messages[0] == messages[1]


def test_arguments_are_torchs():
    p = parameter(torch.full((4,), 3.0))
    without = torch.nn.Parameter(torch.ones(2))
    assert fa.clip_grad_norm_(p, 1e9) == 6
    assert fa.clip_grad_norm_((q for q in (without, p)), max_norm=torch.tensor(3.0), foreach=False) == 6
    torch.testing.assert_close(p.grad, torch.full((4,), 1.5))
    for nothing in ([], [without]):
        result = fa.clip_grad_norm_(nothing, 1.0)
        assert (result, result.dtype) == (0, torch.float32)
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        fa.clip_grad_norm_((q for q in ()), 1.0)
    assert caught[0].filename == __file__
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_norm.* {max_norm}"):
            fa.clip_grad_norm_(p, max_norm)


def test_only_empty_gradients():
    params = [parameter(torch.ones(0)), parameter(torch.ones(0, 3, dtype=torch.float64))]
    for order in ORDERS:
        norm = fa.clip_grad_norm_(params, 1.0, order)
        assert (norm, norm.dtype) == (0, torch.float32)
    found_inf, norm = fa.unscale_and_check_(params, 0.5)
    assert (found_inf, norm) == (0, 0)


def test_sixteen_bits_neither_overflow_nor_round_the_norm():
    half, bfloat = torch.full((3000,), 1000.0, dtype=torch.float16), torch.ones(7000, dtype=torch.bfloat16)
    for order, large, many in ((1.0, 3e6, 7000), (2.0, 1000 * 3000**0.5, 7000**0.5), (math.inf, 1000, 1)):
        assert fa.clip_grad_norm_(parameter(half), 1e9, order).item() == pytest.approx(large, rel=1e-6)
        assert fa.clip_grad_norm_(parameter(bfloat), 1e9, order).item() == pytest.approx(many, rel=1e-6)


@pytest.mark.parametrize("order", NATIVE)
def test_the_norm_does_not_depend_on_threads(order):
    generator = torch.Generator().manual_seed(0)
    params = [parameter(torch.randn(n, generator=generator)) for n in (100_001, 3, 700_000, 16_384)]
    threads = torch.get_num_threads()
    try:
        norms = set()
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            norms.add(fa.clip_grad_norm_(params, 1e9, order).item())
    finally:
        torch.set_num_threads(threads)
    assert len(norms) == 1


def sharing():
    """Gradients that share memory: the same gradient twice, overlapping views, a complex gradient and its parts."""
    g = torch.arange(1.0, 11.0)
    yield "twice", [g, g]
    g = torch.arange(1.0, 11.0)
    yield "overlapping", [g[:7], torch.ones(3), g[4:]]
    g = torch.randn(5, dtype=torch.complex64)
    yield "real parts", [g, torch.view_as_real(g)]
    g = torch.ones(40_000)
    yield "inside", [g, g[100:200]]


@pytest.mark.parametrize("which", range(4), ids=[name for name, _ in sharing()])
def test_gradients_that_share_memory_are_rewritten_one_after_the_other(which):
    ours, theirs, scaled, expected = (list(sharing())[which][1] for _ in range(4))
    for a, *rest in zip(ours, theirs, scaled, expected, strict=True):
        for b in rest:
            b.copy_(a)
    # torch's own loop: its list operations race over shared memory on some devices
    norm = torch.nn.utils.clip_grad_norm_([parameter(g) for g in theirs], 0.5, foreach=False)
    torch.testing.assert_close(fa.clip_grad_norm_([parameter(g) for g in ours], 0.5), norm)
    torch.testing.assert_close(ours, theirs)
    found_inf, norm = fa.unscale_and_check_(scaled, 0.5)
    for g in expected:
        g.mul_(0.5)
    torch.testing.assert_close(scaled, expected)
    assert found_inf == 0
    assert norm.item() == pytest.approx(sum(g.abs().square().sum().item() for g in expected) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("beside", [torch.float32, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
def test_an_expanded_gradient_is_refused_before_anything_changes(dtype, beside, kind):
    for swap in (False, True):
        grads = [torch.full((3,), 2.0, dtype=beside), torch.full((1,), 2.0, dtype=dtype).expand(5).as_subclass(kind)]
        grads = grads[::-1] if swap else grads
        params = [parameter(g) for g in grads]
        with pytest.raises(RuntimeError, match=r"gradient \d .*expand"):
            fa.clip_grad_norm_(params, 0.1)
        with pytest.raises(RuntimeError, match=r"gradient \d .*expand"):
            fa.unscale_and_check_(grads, 0.5)
        assert all((g == 2).all() for g in grads)
    result = fa.clip_grad_norm_(parameter(torch.ones(0, 1).expand(0, 5)), 0.1)
    assert result == 0, "nothing in several places"


def test_a_gradient_that_waits_to_be_negated_or_conjugated():
    """torch keeps some negations and conjugations as a bit. The memory then holds the original number."""
    z = torch.randn(33, dtype=torch.complex64)
    for lazy in (z.conj().imag, z.conj()):
        assert lazy.is_neg() or lazy.is_conj()
        plain = parameter(torch.resolve_conj(torch.resolve_neg(lazy)).clone())
        ours = parameter(lazy)
        torch.testing.assert_close(fa.clip_grad_norm_(ours, 0.5), fa.clip_grad_norm_(plain, 0.5))
        torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sparse_gradients_count_once_per_index(dtype):
    indices, values = [[0, 1, 0], [2, 0, 2]], torch.tensor([3.0, 4.0, 3.0], dtype=dtype)
    sparse = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    p, dense = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype)), parameter(sparse.to_dense())
    p.grad = sparse
    for order in (1.0, 2.0, math.inf):
        torch.testing.assert_close(fa.clip_grad_norm_(p, 2.0, order), fa.clip_grad_norm_(dense, 2.0, order))
        torch.testing.assert_close(p.grad.to_dense(), dense.grad)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_norm_of_distributed_tensors_is_one_as_in_torch(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    for order in (1.0, 2.0, math.inf, 3.0):
        grads = [torch.arange(6.0), torch.ones(2, 3)]
        ours = [parameter(distribute_tensor(g, mesh, [Shard(0)])) for g in grads]
        theirs = [parameter(g.clone()) for g in grads]
        norm = fa.clip_grad_norm_(ours, 0.5, order)
        torch.testing.assert_close(norm.full_tensor(), torch.nn.utils.clip_grad_norm_(theirs, 0.5, order))
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    ours[0].grad.to_local()[3] = math.inf
    assert fa.unscale_and_check_(ours, 0.5)[0] == 1


def test_unscale_and_check_takes_parameters_or_gradients():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 4.0)
    assert fa.unscale_and_check_([p, torch.nn.Parameter(torch.ones(2))], torch.tensor(0.5))[0] == 0
    assert (p.grad == 2).all()
    assert torch.equal(p.detach(), torch.ones(3))
    version = p.grad._version
    found_inf, norm = fa.unscale_and_check_(p.grad, None)
    assert (p.grad == 2).all()
    assert norm.item() == pytest.approx(12**0.5)
    assert p.grad._version > version, "autograd hears of it"
    strided = torch.full((4, 4), 2.0)[:, ::2]
    assert fa.unscale_and_check_(strided, 0.5)[1].item() == pytest.approx(8**0.5)
    assert (strided == 1).all()
    big = torch.tensor([sys.float_info.max], dtype=torch.float64)
    found_inf, norm = fa.unscale_and_check_(big, None)
    assert found_inf == 0, "finite, although its square is not"


def test_unscale_and_check_over_all_dtypes_at_once():
    grads = [torch.full((5,), 4.0, dtype=dtype) for dtype in REAL + COMPLEX]
    grads.append(torch.full((5,), 4.0).as_subclass(Subclass))
    found_inf, norm = fa.unscale_and_check_(grads, 0.5)
    assert (found_inf, norm.dtype) == (0, torch.float32)
    assert norm.item() == pytest.approx((len(grads) * 5 * 2.0**2) ** 0.5)
    assert all((g == 2).all() for g in grads)
    for i in range(len(grads)):
        bad = [g.clone() for g in grads]
        bad[i][3] = math.nan
        assert fa.unscale_and_check_(bad, 0.5)[0] == 1


def test_the_operator_refuses_what_it_cannot_do():
    ops, g = torch.ops.flatout, torch.ones(3)
    with pytest.raises(RuntimeError, match=r"norm_type.* 3"):
        ops.unscale_and_check([g], None, None, 3.0)
    with pytest.raises(RuntimeError, match=r"grads\[0\].*grads\[2\]"):
        ops.unscale_and_check_([g, torch.ones(2), g[1:]], torch.tensor(0.5))
    with pytest.raises(RuntimeError, match=r"grads\[1\].*grads\[0\]"):
        ops.scale_([g[1:2], g], torch.tensor(0.5))
    with pytest.raises(RuntimeError, match=r"grads\[1\]"):
        ops.scale_([g, torch.ones(2, 2)[:, 0]], torch.tensor(0.5))
    assert (g == 1).all()
