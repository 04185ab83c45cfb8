"""Steps that torch's classes refuse, and parameters that are listed twice. flatout's results are defined."""

from __future__ import annotations

import copy

import pytest
import torch

import flatout.optim as fo
from tests.optim.helpers import assert_same, parameters, set_grads, twins
from tests.optim.rules import NAMES, RULES


def make(name, params, **options):
    return getattr(fo, name)(params, lr=0.1, **RULES[name].options, **options)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_another_dtype_than_the_parameter(name, grad_dtype):
    """``grad_dtype`` exists since torch 2.10. The step equals one with the gradient in the parameter's dtype."""
    ours, expected = parameters(torch.float32), parameters(torch.float32)
    optimizers = make(name, ours), make(name, expected)
    for step in range(3):
        set_grads(expected, step)
        for p, q in zip(ours, expected, strict=True):
            q.grad = q.grad.to(grad_dtype).float()
            if hasattr(p, "grad_dtype"):
                p.grad_dtype = None
                p.grad = q.grad.to(grad_dtype)
            else:
                p.grad = None
                p.grad = q.grad
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, expected, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_conjugate_gradients(name, dtype):
    results = []
    for resolve in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 33).to(dtype))
        optimizer = make(name, [p])
        for step in range(3):
            g = torch.randn(33, dtype=dtype, generator=torch.Generator().manual_seed(step)).conj()
            p.grad = g.resolve_conj() if resolve else g
            assert p.grad.is_conj() != resolve
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_amsgrad_switched_on_in_mid_run_starts_its_maximum_there(name):
    reference, optimizer, theirs, ours = twins(name, torch.float32)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["amsgrad"] = reference.param_groups[0]["amsgrad"] = True
            for p in theirs:  # torch's class raises KeyError for this entry
                reference.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)
        set_grads(theirs, step), set_grads(ours, step)
        reference.step(), optimizer.step()
    assert_same(theirs, ours, torch.float32)
    assert_same(*([o.state[p]["max_exp_avg_sq"] for p in ps] for o, ps in ((reference, theirs), (optimizer, ours))),
                torch.float32)  # fmt: skip


@pytest.mark.parametrize("after", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_changes_its_dtype_between_steps_takes_its_state_along(name, after):
    """The expected state comes from loading into a new optimizer of the changed model."""
    model = torch.nn.Linear(7, 5)
    optimizer = make(name, model.parameters())
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    twin = copy.deepcopy(model).to(after)
    expected = make(name, twin.parameters())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.to(after)
    for step in (1, 2):
        for changed, stepped in ((model, optimizer), (twin, expected)):
            set_grads(list(changed.parameters()), step)
            stepped.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.dtype == after
        assert all(v.dtype == after for k, v in optimizer.state[p].items() if k != "step")


@pytest.mark.parametrize("extra", [{}, {"ema_decay": 0.5}, {"low_precision_copy": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_after_one_under_inference_mode(name, extra):
    """State that is created under inference mode is ordinary state, which other code may write."""
    results = []
    for inference in (True, False):
        params = parameters(torch.float32)
        optimizer = make(name, params, **extra)
        for step in range(3):
            set_grads(params, step)
            with torch.inference_mode(inference and step != 1):
                optimizer.step()
                if "low_precision_copy" in extra:
                    optimizer.copy_of(params[0])
        assert not any(v.is_inference() for entry in optimizer.state.values() for v in entry.values())
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("options", [{}, {"dampening": 0.3}, {"nesterov": True}], ids=str)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_sgd_with_momentum_and_a_parameter_listed_twice(options):
    """torch's loop initializes the buffer once for each mention."""
    results = []
    for module, more in ((torch.optim, {"foreach": False}), (fo, {})):
        p, q, late = parameters(torch.float32, [(33,), (5, 7), (3,)])
        optimizer = module.SGD([p, q, p, late, late], lr=0.1, momentum=0.9, **options, **more)
        for step in range(4):
            set_grads([p, q, late], step)
            if step < 2:
                late.grad = None
            optimizer.step()
        results.append([p, q, late, *(optimizer.state[x]["momentum_buffer"] for x in (p, q, late))])
    assert_same(*results, torch.float32)
