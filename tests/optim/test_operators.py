"""Operators of the optimizers: schemas, fake implementations, errors, and the states of a bucket."""

from __future__ import annotations

import pytest
import torch

from tests.optim.buckets import COPIED, DEFAULTS, MOVED, NOT_NATIVE, READY, ops, step_once

NUMBERS = DEFAULTS | dict(lrs=[0.1])
SHAPES = [(5,), (2, 3), (0,)]


def tensors(dtype):
    return [torch.rand(shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["unscale_and_check", "unscale_and_check_", "scale_"])
def test_opcheck(name, dtype):
    arguments = (tensors(dtype), torch.tensor(0.5), *((1.0,) if name == "unscale_and_check" else ()))
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_operators_trace_without_a_graph_break():
    def check(g):
        _, norm, factor = ops.unscale_and_check([g], None, 1.0)
        ops.scale_([g], factor)
        return norm

    eager, traced = torch.full((7,), 2.0), torch.full((7,), 2.0)
    torch.testing.assert_close(torch.compile(check, backend="aot_eager", fullgraph=True)(traced), check(eager))
    torch.testing.assert_close(traced, eager)


def test_lr_tensor_and_device_scalars_win():
    p, g = torch.ones(3), torch.ones(3)
    for dtype in (torch.float32, torch.float64):
        p.fill_(1)
        step_once(
            "sgd", [p], [g], [], [], [], [], [], [], [0.0, 0.0, 0.0],
            lr=100.0, lr_tensors=[torch.tensor(0.5, dtype=dtype)], grad_factor=torch.tensor(0.5, dtype=dtype),
        )  # fmt: skip
        assert torch.equal(p, torch.full((3,), 0.75))


def test_each_group_has_its_numbers():
    weights = [torch.ones(3) for _ in range(3)]
    number = ops.make_bucket("sgd", weights, [], [], [], [], [], [], [63, 0, 63])
    assert ops.set_grads(number, [torch.ones(3) for _ in weights], []) == READY
    numbers = dict(lrs=[0.25, *62 * [0.0], 100.0], weight_decays=[1.0, *63 * [0.0]])
    ops.step_bucket_(
        number, [0.0, 0.0, 0.0], **DEFAULTS | numbers | dict(lr_tensors=[*63 * [None], torch.tensor(0.125)])
    )
    assert [weight.unique().item() for weight in weights] == [0.875, 0.5, 0.875]
    ops.free_bucket(number)


@pytest.mark.parametrize("groups", [[0], [0, 64], [-1, 0]])
def test_groups_fit_the_weights_and_the_kernels(groups):
    with pytest.raises(RuntimeError, match="groups"):
        ops.make_bucket("sgd", [torch.ones(3), torch.ones(3)], [], [], [], [], [], [], groups)


def one_step(
    rule="sgd", weights=None, grads=None, states=(), absmaxes=(), counts=(), averages=(), lows=(),
    options=(0.0, 0.0, 0.0), **kw
):  # fmt: skip
    step_once(
        rule,
        [torch.ones(4)] if weights is None else weights,
        [torch.ones(4)] if grads is None else grads,
        list(states), list(absmaxes), list(counts), list(averages), list(lows), [], list(options), lr=0.1, **kw
    )  # fmt: skip


BAD = [
    (dict(grads=[torch.ones(4), torch.ones(4)]), r"grads.*\(1\).* 2"),
    (dict(weights=[torch.ones(4).int()]), "weights.*float32"),
    (dict(weights=[torch.ones(4, 4)[:, ::2]]), r"weights\[0\]"),
    (dict(weights=[torch.ones(1).expand(4)]), r"weights\[0\]"),
    (dict(weights=[], grads=[], states=[torch.ones(4)]), "weights"),
    (dict(weights=[torch.ones(4), torch.ones(4).double()]), r"weights\[1\].*weights\[0\]"),
    (dict(states=[torch.ones(5)]), r"states\[0\].*weights\[0\]"),
    (dict(states=[torch.ones(4)] * 4), "states.* 3"),
    (dict(states=[torch.ones(4).long()]), "states.* Long"),
    (dict(states=[torch.ones(4, dtype=torch.int16)]), "states.* Short"),
    (dict(states=[torch.ones(4, dtype=torch.uint8)]), r"absmaxes.*\(1\).* 0"),
    (
        dict(states=[torch.ones(4, dtype=torch.uint8)], absmaxes=[torch.ones(2)]),
        r"absmaxes\[0\].*weights\[0\]",
    ),
    (
        dict(weights=[torch.ones(4).double()], states=[torch.ones(4, dtype=torch.uint8)], absmaxes=[torch.ones(1)]),
        "states.* Double.* Byte",
    ),
    (
        dict(rule="adam", states=[torch.ones(4, dtype=torch.uint8), torch.ones(4)], absmaxes=[torch.ones(1)] * 2),
        "states.*uint8",
    ),
    (dict(states=[torch.ones(4)], absmaxes=[torch.ones(1)]), r"absmaxes.*\(0\).* 1"),
    (dict(states=[torch.ones(4), torch.ones(4)]), "2 states"),
    (dict(counts=[torch.zeros((), dtype=torch.int64)]), r"steps\[0\]"),
    (dict(averages=[torch.ones(4).half()]), "averages"),
    (dict(lows=[torch.ones(4)]), "lows.*int16"),
    (dict(lows=[torch.ones(4, dtype=torch.int16)]), "weights.*int16.*bfloat16"),
    (dict(rule="adamax"), "rule.* adamax"),
    (dict(options=(1.0,)), "options.* 3.* 1"),
    (dict(states=[torch.ones(4).bfloat16()], lows=[torch.ones(4).half()]), "float16.*bfloat16"),
    (dict(weights=[torch.ones(4).bfloat16()], states=[torch.ones(4).half()]), "float16.*bfloat16"),
    (dict(seed=1), "steps.*seed"),
    (dict(seed=1, counts=[torch.zeros(())]), "seed.*bfloat16"),
    (dict(lr_tensors=[torch.ones(2)]), "lr_tensors.* 2"),
    (dict(lr_tensors=[None, None]), r"lr_tensors.*\(1\), got 2"),
    (dict(grad_factor=torch.ones(2)), "grad_factor.* 2"),
    (dict(found_inf=torch.ones((), dtype=torch.float64)), "found_inf.*float32"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[f"{i} {m}" for i, (_, m) in enumerate(BAD)])
def test_errors_name_the_argument_that_is_wrong(arguments, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        one_step(**arguments)


def test_weights_that_share_memory_are_refused():
    base = torch.ones(10)
    with pytest.raises(RuntimeError, match="share memory"):
        one_step(weights=[base[:6], base[5:]], grads=[torch.ones(6), torch.ones(5)])
    one_step(weights=[base[:5], base[5:]], grads=[torch.ones(5), torch.ones(5)])
    with pytest.raises(RuntimeError, match=r"max_norm.* -1"):
        ops.unscale_and_check([base], None, -1.0)


@pytest.fixture
def bucket():
    weights = [torch.ones(4, 6), torch.ones(3)]
    states = [torch.zeros(4, 6), torch.zeros(3)]
    number = ops.make_bucket("sgd", weights, states, [], [], [], [], [])
    yield number, weights, states
    ops.free_bucket(number)


def momentum_step(number, **kw):
    ops.step_bucket_(number, [0.9, 0.0, 0.0], **(NUMBERS | kw))


def test_a_bucket_steps_what_gradients_were_set_for(bucket):
    number, (p, q), (a, b) = bucket
    grads = [torch.ones(3)]  # keep the tensor, because the bucket holds only its address
    assert ops.set_grads(number, grads, [1]) == READY
    found_inf, norm, _ = ops.check_buckets([number], torch.tensor(0.5), 1.0)
    assert (found_inf, norm) == (0, pytest.approx(0.75**0.5))
    momentum_step(number)
    assert (p == 1).all()
    assert torch.allclose(q, torch.tensor(0.9))
    assert (a == 0).all()
    assert (b == 1).all()
    momentum_step(number)  # the step has used the gradients
    assert torch.allclose(q, torch.tensor(0.9))


def test_a_bucket_without_gradients_has_the_norm_zero(bucket):
    found_inf, norm, factor = ops.check_buckets([bucket[0]], torch.tensor(0.5), 1.0)
    assert (found_inf, norm, factor) == (0, 0, 0.5)
    assert {found_inf.dtype, norm.dtype, factor.dtype} == {torch.float32}


def test_a_bucket_notices_what_has_changed(bucket):
    number, (p, q), (a, _) = bucket
    grads = [torch.ones(4, 6), torch.ones(3)]
    assert ops.set_grads(number, [torch.ones(6, 4), grads[1]], []) == NOT_NATIVE
    assert ops.set_grads(number, [torch.ones(4, 6), torch.ones(5)], []) == NOT_NATIVE
    assert ops.set_grads(number, [grads[0].double(), grads[1].double()], []) == NOT_NATIVE
    assert ops.set_grads(number, [grads[0].int(), grads[1].int()], []) == NOT_NATIVE
    assert ops.set_grads(number, [grads[0], grads[1].half()], []) == NOT_NATIVE
    assert ops.set_grads(number, [torch._neg_view(grads[0]), grads[1]], []) == NOT_NATIVE
    assert ops.set_grads(number, [grads[0].to_sparse(), grads[1]], []) == NOT_NATIVE
    assert ops.set_grads(number, grads, []) == READY
    with pytest.raises(RuntimeError, match="which"):
        ops.set_grads(number, grads, [0, 2])
    a.data = torch.zeros(4, 6)
    assert ops.set_grads(number, grads, []) == MOVED
    assert ops.set_grads(number, grads[1:], [1]) == READY, "that one has not moved"
    momentum_step(number)
    assert torch.allclose(q, torch.tensor(0.9))
    assert (p == 1).all(), "what had moved was not touched"


@pytest.mark.parametrize("which", [[], [0]])
def test_only_gradients_with_other_strides_are_copied(bucket, which):
    number, (p, _), _ = bucket
    lengthwise = torch.arange(24.0).view(6, 4)
    grads = [lengthwise.t(), torch.ones(3)][: 1 if which else 2]
    assert ops.set_grads(number, grads, which) == COPIED
    lengthwise.zero_()
    if not which:
        grads[1].zero_()  # is read in place
    assert ops.check_buckets([number], None, None)[1] == pytest.approx(torch.arange(24.0).norm().item())
    momentum_step(number)
    torch.testing.assert_close(p, 1 - 0.1 * torch.arange(24.0).view(6, 4).t())


def test_a_bucket_of_one_16_bit_dtype_takes_no_gradients_of_the_other():
    number = ops.make_bucket("sgd", [torch.ones(5)], [], [], [], [], [torch.ones(5).bfloat16()], [])
    assert ops.set_grads(number, [torch.ones(5).half()], []) == NOT_NATIVE
    assert ops.set_grads(number, [torch.ones(5).bfloat16()], []) == READY
    ops.free_bucket(number)


def test_gradients_that_share_memory_are_found(bucket):
    number = bucket[0]
    base = torch.ones(27)
    assert ops.set_grads(number, [base[:24].view(4, 6), base[24:]], []) == READY
    assert ops.grads_are_apart([number])
    assert ops.set_grads(number, [base[:24].view(4, 6), base[23:26]], []) == READY
    assert not ops.grads_are_apart([number])


def test_a_step_that_fails_keeps_no_gradients(bucket):
    number, (p, _), _ = bucket
    grads = [torch.ones(4, 6), torch.ones(3)]
    assert ops.set_grads(number, grads, []) == READY
    with pytest.raises((RuntimeError, ValueError), match=r"options.* 3"):
        ops.step_bucket_(number, [0.9], **NUMBERS)
    with pytest.raises(RuntimeError, match="which"):
        ops.set_grads(number, grads, [0, 2])
    momentum_step(number)
    assert (p == 1).all()


def test_counts_that_share_memory_are_refused():
    count, ones = torch.zeros(()), [torch.ones(2), torch.ones(2)]
    with pytest.raises(RuntimeError, match=r"steps\[0\].*steps\[1\]"):
        ops.make_bucket("adam", ones, [torch.zeros(2) for _ in range(4)], [], [count, count], [], [], [])


@pytest.mark.parametrize("written", [0.0, -0.0])
@pytest.mark.parametrize("remainder", [-32768, -1, 0, 1, 32767])
def test_a_zero_written_over_a_remainder_stays_a_number(written, remainder):
    p = torch.full((20,), written, dtype=torch.bfloat16)
    low = torch.full((20,), remainder, dtype=torch.int16)
    one_step(weights=[p], grads=[torch.zeros_like(p)], lows=[low])
    weight = ((p.view(torch.int16).int() << 16) + low.int()).view(torch.float32)
    assert (weight.abs() < 1e-37).all(), "a denormal at most"


def test_a_freed_bucket_is_an_error():
    number = ops.make_bucket("sgd", [torch.ones(2)], [], [], [], [], [], [])
    ops.free_bucket(number)
    ops.free_bucket(number)
    for call in (lambda: ops.set_grads(number, [torch.ones(2)], []), lambda: ops.check_buckets([number], None, None)):
        with pytest.raises(RuntimeError, match=f"bucket {number}"):
            call()
    with pytest.raises(RuntimeError, match="buckets"):
        ops.check_buckets([], None, None)
