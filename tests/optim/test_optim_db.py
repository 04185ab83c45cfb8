"""torch's table of optimizer inputs (``common_optimizers.optim_db``), compared with torch's for-loop implementation.

Every generator of each class of flatout runs, including the generators for GPUs. Inputs for GPUs differ in
``capturable``, and in rates and betas that are tensors. torch refuses ``capturable`` on a CPU, while flatout accepts
this option on any device. flatout must refuse the ``differentiable`` variants. Two kinds of input do not apply:
scheduler inputs, and ``metadata_for_sparse`` (learning rates for a convergence test). torch has no Lion, so Lion is
compared with the paper's rule in float64.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from inspect import signature
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

import flatout.optim as fo
from tests.optim.bounds import Near, assert_rounded_once
from tests.optim.helpers import parameters, set_grads
from tests.optim.rules import IN_TORCH, RULES

LOW = [torch.float16, torch.bfloat16]


def load_table() -> Any:
    """Load ``common_optimizers`` with a fake of torch's internal test framework.

    The real framework takes seconds to import, needs a package, and prevents changes of ``torch.backends`` flags. The
    table uses the framework only for decorators.
    """
    package = "torch.testing._internal."
    stand_ins = {
        package + name: MagicMock() for name in ("common_device_type", "common_methods_invocations", "common_utils")
    }
    stand_ins[package + "common_utils"]._TestParametrizer = object
    spec = importlib.util.find_spec(package + "common_optimizers")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


TABLE = load_table()
INFO = {info.name: info for info in TABLE.optim_db if info.name in IN_TORCH}


def inputs(dtype: torch.dtype | None = None) -> list[Any]:
    """Return class name and keyword arguments of every generator and device, each once."""
    found = {}
    for name in IN_TORCH:
        for device in ("cpu", "mps", "cuda"):
            for entry in INFO[name].optim_inputs_func(device, dtype):
                found.setdefault((name, repr(entry.kwargs)), (name, entry.kwargs, entry.desc))
    return [pytest.param(name, kwargs, id=f"{name}-{desc}") for name, kwargs, desc in found.values()]


def flagged() -> list[Any]:
    """Return every input without flags, and with each of the mutually exclusive flags."""
    return [
        pytest.param(name, {**entry.kwargs, **flags}, id="-".join((name, entry.desc, *flags)))
        for name in IN_TORCH
        for entry in INFO[name].optim_inputs_func("cpu")
        for flags in ({}, *({flag: True} for flag in INFO[name].supported_impls))
    ]


def typed(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``kwargs`` with float64 tensors for float64 parameters.

    torch's loop divides a float32 rate by the bias correction in float32, with an error of 6e-8 in all later values.
    """
    if dtype != torch.float64:
        return copy.deepcopy(kwargs)
    convert = lambda x: tuple(map(convert, x)) if isinstance(x, tuple) else x.double() if torch.is_tensor(x) else x  # noqa: E731
    return {key: convert(value) for key, value in kwargs.items()}


def for_loop(name: str, params: Any, kwargs: dict[str, Any]) -> torch.optim.Optimizer:
    """Return torch's reference, without ``capturable`` on a CPU. This option does not change the numbers."""
    options = {**kwargs, "foreach": False, "fused": False, "differentiable": False}
    return getattr(torch.optim, name)(params, **options | ({"capturable": False} if "capturable" in kwargs else {}))


def assert_same_after(steps: int, name: str, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    theirs, ours = parameters(dtype), parameters(dtype)
    expected = for_loop(name, theirs, typed(kwargs, dtype))
    optimizer = getattr(fo, name)(ours, **typed(kwargs, dtype))
    for step in range(1, steps + 1):
        # Size 0.1, because around 1 terms cancel, and float32 roundings of torch's loop are then 2e-7.
        set_grads(theirs, step, 0.1), set_grads(ours, step, 0.1)
        expected.step(), optimizer.step()
    tolerance = dict(rtol=2e-6, atol=1e-7) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, **tolerance)
    a, b = expected.state_dict()["state"], optimizer.state_dict()["state"]
    assert {i: set(state) for i, state in b.items()} == {i: set(state) for i, state in a.items()}
    for i, state in a.items():
        for key, value in state.items():
            torch.testing.assert_close(b[i][key], value, **tolerance, msg=lambda m, at=(i, key): f"{at}: {m}")


def test_the_table_has_what_is_expected_of_it():
    assert set(INFO) == set(IN_TORCH)
    assert len(inputs()) >= 30, "5 and 5 + 1 inputs of Adam and AdamW, twice, and 9 of SGD"
    assert {"foreach", "fused", "differentiable"} <= {flag for case in flagged() for flag in case.values[1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "kwargs"), inputs())
def test_ten_steps_equal_torchs_loop(name, kwargs, dtype):
    assert_same_after(10, name, kwargs, dtype)


@pytest.mark.parametrize(("name", "kwargs"), flagged())
def test_flags_make_no_difference_or_are_refused(name, kwargs):
    if kwargs.get("differentiable"):
        with pytest.raises(ValueError, match=rf"differentiable.*{name}.* True"):
            getattr(fo, name)(parameters(torch.float32), **kwargs)
        return
    refusal = refused(lambda: getattr(torch.optim, name)(parameters(torch.float32), **copy.deepcopy(kwargs)))
    if refusal is not None:  # a rate in a tensor, which torch's foreach rejects
        ours = refused(lambda: getattr(fo, name)(parameters(torch.float32), **kwargs))
        assert (type(ours), str(ours)) == (type(refusal), str(refusal))
        return
    assert_same_after(3, name, kwargs, torch.float32)


def refused(make: Any) -> Exception | None:
    try:
        make()
    except (ValueError, RuntimeError) as error:
        return error
    return None


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["first_step", "later_step"])
@pytest.mark.parametrize(("name", "kwargs"), inputs(torch.float16))
def test_one_step_is_rounded_once(name, kwargs, warm, dtype):
    """Parameters and state in 16 bits equal the float64 step from the same start, rounded once."""
    ours = parameters(dtype)
    optimizer = getattr(fo, name)(ours, **copy.deepcopy(kwargs))
    if warm:
        set_grads(ours, 2), optimizer.step()
    start = [p.detach().double() for p in ours]
    states = [[s.double() for s in tensors] for tensors in state_tensors(optimizer, name)]
    set_grads(ours, 1)
    exact = [torch.nn.Parameter(p.clone()) for p in start]
    twin = for_loop(name, exact, typed(kwargs, torch.float64))
    saved = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict({**saved, "param_groups": twin.state_dict()["param_groups"]})
    for state in twin.state.values():  # loading has cast the tensor to float64, as torch does: exact
        assert all(v.dtype == torch.float64 for k, v in state.items() if k != "step" and v is not None)
    for a, b in zip(exact, ours, strict=True):
        a.grad = b.grad.double()
    twin.step(), optimizer.step()
    options = rule_options(optimizer.param_groups[0], name)
    sign = -1 if optimizer.param_groups[0]["maximize"] else 1
    for i, (p, q) in enumerate(zip(ours, exact, strict=True)):
        began = states[i] if states else [torch.zeros_like(start[i])] * 3
        weight, grad, *near_states = (Near(t) for t in (start[i], sign * p.grad.double(), *began))
        bound, bound_states = RULES[name].reference(weight, grad, near_states, 1 + warm, **options)
        # The value is torch's, and the bound is flatout's.
        assert_rounded_once(p.detach(), Near(q.detach(), bound.error), f"parameter {i}")
        torch.testing.assert_close(bound.value, q.detach(), rtol=1e-12, atol=1e-12)
        for key, moment in zip(RULES[name].states(options), bound_states, strict=True):
            assert_rounded_once(optimizer.state[p][key], Near(twin.state[q][key], moment.error), f"{key} {i}")
            assert optimizer.state[p][key].dtype == dtype, "torch's dtype for them"


def state_tensors(optimizer: torch.optim.Optimizer, name: str) -> list[list[torch.Tensor]]:
    keys = RULES[name].states(optimizer.param_groups[0])
    return [[s[key] for key in keys if s.get(key) is not None] for s in optimizer.state.values()]


def rule_options(group: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options of a param group that the float64 rule needs, as numbers."""
    number = lambda x: x.item() if isinstance(x, torch.Tensor) else x  # noqa: E731
    keys = signature(RULES[name].reference).parameters.keys() & group.keys()
    options = {key: number(group[key]) for key in keys}
    if "betas" in options:
        options["betas"] = tuple(map(number, options["betas"]))
    return options


@pytest.mark.parametrize(("name", "limit"), [("AdamW", 2), ("Adam", 1)])
def test_one_float32_step_is_within_units_in_the_last_place(name, limit):
    """AdamW has a limit of 2, because AdamW rounds twice, as torch does: after the decay and after the update.

    Only weights of at least ten times their update are compared. Smaller weights also show the rounding of the update.
    """
    ours = parameters(torch.float32)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    set_grads(ours, 1)
    for a, b in zip(exact, ours, strict=True):
        a.grad = b.grad.double()
    getattr(fo, name)(ours, lr=1e-3).step()
    for_loop(name, exact, {"lr": 1e-3}).step()
    for p, q in zip(ours, exact, strict=True):
        _, exponent = torch.frexp(q.detach())
        units = (p.detach().double() - q.detach()).abs() / torch.exp2(exponent.double() - 24)
        assert (units <= limit)[q.abs() >= 10 * 1e-3].all()


@pytest.mark.parametrize("name", IN_TORCH)
def test_complex_parameters_equal_torchs_loop(name):
    if not INFO[name].supports_complex:
        pytest.fail(f"torch's {name} took complex parameters when this was written")
    for kwargs in (entry.kwargs for entry in INFO[name].optim_inputs_func("cpu", torch.complex64)):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(5, 7, dtype=torch.complex64, generator=generator)
        theirs, ours = (torch.nn.Parameter(start.clone()) for _ in range(2))
        expected, optimizer = for_loop(name, [theirs], kwargs), getattr(fo, name)([ours], **copy.deepcopy(kwargs))
        for _ in range(10):
            theirs.grad = torch.randn(5, 7, dtype=torch.complex64, generator=generator)
            ours.grad = theirs.grad.clone()
            expected.step(), optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
        for key, value in expected.state[theirs].items():
            torch.testing.assert_close(optimizer.state[ours][key], value, rtol=2e-6, atol=1e-7)


def errors() -> list[Any]:
    found = {}
    for name in IN_TORCH:
        for device in ("cpu", "cuda"):
            # The inputs for CUDA allocate a tensor on the device. The inputs test flags, so any device will do.
            with patch.object(torch, "empty", lambda *size, device, dtype: torch.zeros(*size, dtype=dtype)):
                entries = INFO[name].optim_error_inputs_func(device, torch.float32)
            for entry in entries:
                at = f"{name}-{entry.optimizer_error_input.desc}"
                found.setdefault((at, repr(entry.optimizer_error_input.kwargs)), pytest.param(name, entry, id=at))
    return list(found.values())


@pytest.mark.parametrize(("name", "entry"), errors())
def test_errors_are_torchs(name, entry):
    """Invalid constructor arguments raise torch's error type and message."""
    assert entry.error_on == TABLE.OptimizerErrorEnum.CONSTRUCTION_ERROR, "none of these classes errs later"
    arguments = entry.optimizer_error_input
    params = [torch.nn.Parameter(torch.ones(1))] if arguments.params is None else arguments.params
    made = lambda module: getattr(module, name)(copy.deepcopy(params), **copy.deepcopy(arguments.kwargs))  # noqa: E731
    if issubclass(entry.error_type, Warning):
        with pytest.warns(entry.error_type, match=entry.error_regex):
            made(fo)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made(torch.optim)
        except entry.error_type:
            expected: Any = pytest.raises(entry.error_type, match=entry.error_regex)
        else:
            pytest.fail("torch no longer refuses this: look what it does instead")
        if arguments.kwargs.get("differentiable"):  # both refuse it, flatout for another reason
            expected = pytest.raises((entry.error_type, ValueError))
        with expected:
            made(fo)


LION = [
    {},
    {"lr": 1e-2},
    {"weight_decay": 0.1},
    {"betas": (0.8, 0.95), "weight_decay": 0.05},
    {"betas": (0.0, 0.0)},
    {"lr": torch.tensor(3e-3, dtype=torch.float64)},
    {"maximize": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("kwargs", LION, ids=lambda o: ",".join(o) or "default")
def test_lion_equals_the_paper(kwargs, dtype):
    """Each of ten steps starts from the values of the previous step, and is compared with the float64 rule."""
    ours = parameters(dtype)
    optimizer = fo.Lion(ours, **copy.deepcopy(kwargs))
    group = optimizer.param_groups[0]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for step in range(1, 11):
        set_grads(ours, step)
        sign = -1 if group["maximize"] else 1
        expected = []
        for p in ours:
            momentum = optimizer.state[p].get("exp_avg", torch.zeros_like(p)) if p in optimizer.state else p * 0
            tensors = (p.detach().double(), p.grad.double() * sign, momentum.detach().double())
            weight, grad, state = (Near(t, 0, compute) for t in tensors)
            expected.append(RULES["Lion"].reference(weight, grad, [state], 1, **rule_options(group, "Lion")))
        optimizer.step()
        for i, (p, (weight, [momentum])) in enumerate(zip(ours, expected, strict=True)):
            assert_rounded_once(p.detach(), weight, f"parameter {i} at step {step}")
            assert_rounded_once(optimizer.state[p]["exp_avg"], momentum, f"exp_avg {i} at step {step}")


def test_lion_defaults_and_errors():
    p = torch.nn.Parameter(torch.ones(3))
    group = fo.Lion([p]).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.99), 0)
    assert isinstance(fo.Lion([p]), torch.optim.Optimizer)
    for kwargs, message in [
        ({"lr": -1.0}, "lr"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"betas": (0.9, -0.1)}, "beta"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": torch.tensor([0.1, 0.1])}, "lr"),
    ]:
        with pytest.raises(ValueError, match=message):
            fo.Lion([p], **kwargs)
