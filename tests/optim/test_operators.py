"""The operators as torch sees them: schemas, fakes, tracing."""

from __future__ import annotations

import pytest
import torch

import flatout.optim  # noqa: F401  (loads the operators)

ops = torch.ops.flatout
STEP = {"lr_tensor": None, "weight_decay": 0.1, "maximize": False}


def tensors(dtype, n=3):
    return [torch.rand(s, dtype=torch.float32).to(dtype) for s in [(5,), (2, 3), (0,)][:n]]


def adamw(dtype, **kw):
    lists = [tensors(dtype) for _ in range(4)]
    options = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decoupled=True, **STEP)
    return (*lists, [], [torch.zeros(()) for _ in range(3)]), options | {
        "grad_factor": None,
        "found_inf": None,
    } | kw


def sgd(dtype, **kw):
    options = dict(lr=0.1, momentum=0.9, dampening=0.1, nesterov=False, **STEP)
    lists = (tensors(dtype), tensors(dtype), tensors(dtype), [torch.zeros(()) for _ in range(3)])
    return lists, options | {"grad_factor": torch.tensor(0.5), "found_inf": torch.tensor(0.0)} | kw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["unscale_and_check", "unscale_and_check_", "scale_", "adamw_", "sgd_"])
def test_opcheck(name, dtype):
    args, kwargs = {
        "unscale_and_check": lambda: ((tensors(dtype), torch.tensor(0.5), 1.0), {}),
        "unscale_and_check_": lambda: ((tensors(dtype), torch.tensor(0.5)), {}),
        "scale_": lambda: ((tensors(dtype), torch.tensor(0.5)), {}),
        "adamw_": lambda: adamw(dtype),
        "sgd_": lambda: sgd(dtype),
    }[name]()
    torch.library.opcheck(getattr(ops, name).default, args, kwargs)


def test_operators_trace_without_a_graph_break():
    def one_update(p, g, buffer):
        found_inf, norm, factor = ops.unscale_and_check([g], None, 1.0)
        ops.sgd_(
            [p], [g], [buffer], [], lr=0.1, momentum=0.9, dampening=0.0, nesterov=False, **STEP,
            grad_factor=factor, found_inf=found_inf,
        )  # fmt: skip
        return norm

    eager, traced = ([torch.ones(7), torch.full((7,), 2.0), torch.zeros(7)] for _ in range(2))
    expected = one_update(*eager)
    norm = torch.compile(one_update, backend="aot_eager", fullgraph=True)(*traced)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(traced, eager)


def test_lr_tensor_and_device_scalars_win():
    p, g = torch.ones(3), torch.ones(3)
    options = dict(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
    for dtype in (torch.float32, torch.float64):
        p.fill_(1)
        ops.sgd_(
            [p], [g], [], [], lr=100.0, lr_tensor=torch.tensor(0.5, dtype=dtype), **options,
            grad_factor=torch.tensor(0.5, dtype=dtype), found_inf=None,
        )  # fmt: skip
        assert torch.equal(p, torch.full((3,), 0.75))
