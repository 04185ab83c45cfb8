"""Random histories of updates. Each step is compared with the float64 reference, on any device.

Each step starts from the values that the library stored after the previous step. Every number therefore has the bound
of a single step (see :mod:`tests.optim.bounds`), for histories of any length.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import flatout.optim as fo
from flatout.optim import update
from tests.optim.bounds import (
    UNIT,
    Near,
    assert_encoded,
    assert_rounded_either_way,
    assert_rounded_once,
    away_from_zero,
    decoded,
    join,
)
from tests.optim.rules import NAMES, RULES

CODES = torch.uint8
FLOAT, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 3, 4, 5), (0, 4), (130, 129)]
LAYOUTS = ["contiguous", "transposed", "channels_last", "strided", "offset"]
NUMBERS = {"betas": [(0.9, 0.999), (0.0, 0.0), (0.5, 0.75)], "eps": [1e-8, 1e-3]}
"""Values of options, drawn for every rule with these options."""


@dataclass(frozen=True)
class Step:
    seed: int
    scale: float = 1.0
    inverse: str = "none"
    """Type of the scale's inverse: "none" (the gradients have no scale), "float" or "tensor"."""
    max_norm: float | None = None
    bad: float | None = None
    """Infinity or NaN in one gradient."""
    missing: frozenset[int] = frozenset()
    """Indices of parameters without a gradient."""
    grad_layout: str = "like"

    @property
    def skipped(self) -> bool:
        return self.bad is not None


@dataclass(frozen=True)
class Case:
    name: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
    """Shape, dtype and layout of each parameter."""
    options: dict[str, Any]
    additions: dict[str, Any]
    steps: tuple[Step, ...]
    seed: int = 0
    second: dict[str, float] = field(default_factory=dict)
    """Options of a second group, which has every second parameter. Without options, there is one group."""

    def optimizer(self, params: list[torch.nn.Parameter]) -> Any:
        groups: Any = params
        if self.second and len(params) > 1:
            groups = [{"params": params[::2]}, {"params": params[1::2], **self.second}]
        return getattr(fo, self.name)(groups, **self.options, **self.additions)

    def masters(self, dtype: torch.dtype) -> str | None:
        kind = self.additions.get("master_weights")
        return kind if dtype == BRAIN or (dtype == HALF and kind == "float32") else None

    def moment_dtype(self, p: torch.Tensor) -> torch.dtype:
        chosen = self.additions.get("moment_dtype") or (FLOAT if self.masters(p.dtype) else p.dtype)
        return FLOAT if chosen == CODES and p.numel() < 4096 else chosen


# ---- drawing cases -----------------------------------------------------------------------------------------


@st.composite
def options_of(draw: Any, name: str) -> dict[str, Any]:
    variant = draw(st.sampled_from(list(RULES[name].variants.values())))
    return {
        "lr": draw(st.sampled_from([1e-3, 0.1])),
        "weight_decay": draw(st.sampled_from([0, 0.1])),
        "maximize": draw(st.booleans()),
        **variant,
        **{key: draw(st.sampled_from(NUMBERS[key])) for key in variant if key in NUMBERS},
    }


@st.composite
def additions_of(draw: Any, dtypes: set[torch.dtype]) -> dict[str, Any]:
    additions: dict[str, Any] = {
        "master_weights": draw(st.sampled_from([None, "float32", *([] if HALF in dtypes else ["remainder"])])),
        "stochastic_rounding": draw(st.booleans()),
        "ema_decay": draw(st.sampled_from([None, 0.9, 0.0])),
    }
    if additions["stochastic_rounding"]:
        additions["seed"] = draw(st.integers(0, 2**31 - 1))
    low = dtypes & {HALF, BRAIN}  # a bucket has one 16-bit dtype
    if DOUBLE not in dtypes and len(low) < 2:
        additions["moment_dtype"] = draw(st.sampled_from([None, FLOAT, CODES, *(low or {HALF, BRAIN})]))
        if additions["moment_dtype"] in (HALF, BRAIN):
            low = {additions["moment_dtype"]}
    if FLOAT in dtypes and len(low) < 2:
        additions["low_precision_copy"] = draw(st.sampled_from([None, *(low or {HALF, BRAIN})]))
    return {key: value for key, value in additions.items() if value}


@st.composite
def steps_of(draw: Any, count: int, half: bool) -> Step:
    scale = draw(st.sampled_from([1.0, 8.0, 3.0] if half else [1.0, 8.0, 3.0, 65536.0]))
    return Step(
        seed=draw(st.integers(1, 1000)),
        scale=scale,
        inverse=draw(st.sampled_from(["float", "tensor"])) if scale != 1 else "none",
        max_norm=draw(st.sampled_from([None, 0.5, 1e6])),
        missing=draw(st.frozensets(st.integers(0, count - 1), max_size=count)),
        grad_layout=draw(st.sampled_from(["like", "like", "contiguous", "offset"])),
    )


@st.composite
def cases(draw: Any, skips: bool = True) -> Case:
    name = draw(st.sampled_from(NAMES))
    dtypes = draw(
        st.sampled_from([[FLOAT], [HALF], [BRAIN], [BRAIN], [DOUBLE], [FLOAT, BRAIN], [FLOAT, DOUBLE, HALF, BRAIN]])
    )
    tensor = st.tuples(st.sampled_from(SHAPES), st.sampled_from(dtypes), st.sampled_from(LAYOUTS))
    tensors = tuple(draw(st.lists(tensor, min_size=1, max_size=4)))
    used = {dtype for _, dtype, _ in tensors}
    steps = draw(st.lists(steps_of(len(tensors), HALF in used), min_size=1, max_size=4))
    if skips and draw(st.booleans()):
        bad = draw(st.sampled_from([math.inf, -math.inf, math.nan]))
        at = draw(st.integers(0, len(steps) - 1))
        steps.insert(at, replace(steps[at], bad=bad, inverse="tensor", missing=frozenset()))
    second = draw(st.sampled_from([{}, {"lr": 0.02, "weight_decay": 0.3}]))
    options, additions = draw(options_of(name)), draw(additions_of(used))
    return Case(name, tensors, options, additions, tuple(steps), draw(st.integers(0, 99)), second)


# ---- making tensors ----------------------------------------------------------------------------------------


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy the values into a layout. A layout that needs other dimensions becomes "contiguous"."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "strided" and values.dim():
        return values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])[..., ::2].copy_(values)
    if layout == "offset":
        return values.new_zeros(values.numel() + 1)[1:].view(values.shape).copy_(values)
    return values.clone(memory_format=torch.contiguous_format)


def parameters(case: Case, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(case.seed)
    drawn = [(torch.randn(s, generator=generator, dtype=DOUBLE).to(d), layout) for s, d, layout in case.tensors]
    return [torch.nn.Parameter(laid_out(values.to(device), layout)) for values, layout in drawn]


def set_grads(params: list[torch.nn.Parameter], step: Step) -> None:
    generator = torch.Generator().manual_seed(step.seed)
    for i, p in enumerate(params):
        values = (torch.randn(p.shape, generator=generator, dtype=DOUBLE) * step.scale).to(p.device, p.dtype)
        p.grad = None if i in step.missing else laid_out(values, step.grad_layout)
        if p.grad is not None and step.grad_layout == "like":
            p.grad = torch.empty_like(p).copy_(values)
    with_elements = [p for p in params if p.grad is not None and p.numel()]
    if step.bad is not None and with_elements:
        p = with_elements[step.seed % len(with_elements)]
        p.grad[tuple((step.seed * 7) % size for size in p.shape)] = step.bad


def take(optimizer: Any, step: Step, device: str) -> Any:
    inverse: Any = None if step.inverse == "none" else 1 / step.scale
    if step.inverse == "tensor":
        inverse = torch.tensor(inverse, device=device)
    return update(optimizer, inv_scale=inverse, max_grad_norm=step.max_norm)


# ---- stored values -----------------------------------------------------------------------------------------


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def weight_of(optimizer: Any, p: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight that the rule updates: the master, the parameter with its remainder, or the parameter."""
    state = optimizer.state.get(p, {})
    if "master" in state:
        return copied(state["master"])
    if "remainder" in state:
        return join(copied(p), copied(state["remainder"]))
    return copied(p)


def moments_of(case: Case, optimizer: Any, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(p, {})

    in_8_bits = case.moment_dtype(p) == CODES

    def moment(key: str) -> torch.Tensor:
        if state.get(key) is None:
            return torch.zeros(p.shape, dtype=DOUBLE if in_8_bits else case.moment_dtype(p))
        if in_8_bits:
            return decoded(copied(state[key]), copied(state[f"{key}_absmax"]), not key.endswith("_sq"))
        return copied(state[key])

    return {key: moment(key) for key in RULES[case.name].states(case.options)}


@dataclass
class Stored:
    """All bits of one parameter and its state."""

    weight: torch.Tensor
    parameter: torch.Tensor
    moments: dict[str, torch.Tensor]
    ema: torch.Tensor
    taken: int = 0

    @classmethod
    def of(cls, case: Case, optimizer: Any, p: torch.nn.Parameter, taken: int) -> Stored:
        weight = weight_of(optimizer, p)
        state = optimizer.state.get(p, {})
        ema = copied(state.get("ema", weight.to(DOUBLE if p.dtype == DOUBLE else FLOAT)))
        return cls(weight, copied(p), moments_of(case, optimizer, p), ema, taken)


def bits(optimizer: Any, params: list[torch.nn.Parameter]) -> list[Any]:
    """Return everything that an update may write, as comparable bytes: parameters, and state as it is saved."""
    # Sorted by parameter and key, independent of the order of creation.
    saved = [(i, sorted(s.items())) for i, s in sorted(optimizer.state_dict()["state"].items())]
    tensors = [p.detach() for p in params] + [v for _, s in saved for _, v in s if torch.is_tensor(v)]
    flat = (torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()) for t in tensors)  # independent of strides
    return [(i, [k for k, _ in s]) for i, s in saved] + [t.view(torch.uint8).numpy().tobytes() for t in flat]


# ---- one step against the reference ------------------------------------------------------------------------


def check(
    case: Case, optimizer: Any, params: list[torch.nn.Parameter], before: list[Stored], step: Step, out: Any
) -> None:
    grads = [copied(p.grad) for p in params if p.grad is not None]
    all_double = bool(grads) and all(g.dtype == DOUBLE for g in grads)
    inverse = 1 / step.scale
    norm = math.sqrt(sum((g.double() * inverse).square().sum().item() for g in grads))
    if out.grad_norm is not None:
        assert out.grad_norm.dtype == (DOUBLE if all_double else FLOAT)
        assert out.grad_norm.item() == pytest.approx(norm, rel=1e-12 if all_double and step.scale != 3 else 1e-6)
        assert out.found_inf.item() == 0
    assert (out.grad_norm is None) == (not grads or (step.max_norm is None and step.inverse != "tensor"))
    coefficient = 1.0 if step.max_norm is None else min(1.0, step.max_norm / (norm + 1e-6))
    precision = DOUBLE if all_double and step.scale != 3 else FLOAT  # 1/3 is passed in float32
    for i, (p, was) in enumerate(zip(params, before, strict=True)):
        if p.grad is None:
            assert torch.equal(weight_of(optimizer, p), was.weight)
            assert torch.equal(copied(p), was.parameter)
            continue
        compute = DOUBLE if p.dtype == DOUBLE else FLOAT
        factor = Near(inverse * coefficient, inverse * coefficient * 4 * UNIT[precision], compute)
        grad = Near(copied(p.grad).double() * (-1 if case.options["maximize"] else 1), 0, compute) * factor
        options = {**case.options, **(case.second if i % 2 else {})}
        del options["maximize"]
        # The numbers of codes are known to two units in the last place.
        unsure = 2.0**-22 if case.moment_dtype(p) == CODES else 0.0
        start = [Near(value.double(), value.double().abs() * unsure, compute) for value in was.moments.values()]
        began = Near(was.weight.double(), 0, compute)
        weight, moments = RULES[case.name].reference(began, grad, start, was.taken + 1, **options)
        check_stored(case, optimizer, p, was, weight, dict(zip(was.moments, moments, strict=True)), f"tensor {i}")


def check_stored(
    case: Case, optimizer: Any, p: Any, was: Stored, weight: Near, moments: dict[str, Near], what: str
) -> None:
    state = {key: copied(value) for key, value in optimizer.state.get(p, {}).items() if torch.is_tensor(value)}
    stochastic = case.additions.get("stochastic_rounding")
    now = weight_of(optimizer, p)
    masters = case.masters(p.dtype)
    if masters == "float32":
        assert state["master"].dtype == FLOAT
        assert torch.equal(copied(p), now.to(p.dtype)), "the parameter is its master, rounded to nearest"
    elif masters == "remainder":
        assert state["remainder"].dtype == torch.int16
        assert torch.equal(copied(p), away_from_zero(now)), "the parameter is its weight, rounded to nearest"
    else:
        assert not state.keys() & {"master", "remainder"}
    rounded = assert_rounded_either_way if stochastic and now.dtype == BRAIN else assert_rounded_once
    rounded(now, weight, f"weight of {what}")
    for key, expected in moments.items():
        assert state[key].dtype == case.moment_dtype(p)
        assert (f"{key}_absmax" in state) == (state[key].dtype == CODES)
        if state[key].dtype == CODES:
            codes, absmax = state[key], state[f"{key}_absmax"]
            assert_encoded(codes, absmax, expected, not key.endswith("_sq"), f"{key} of {what}")
            continue
        rounded = assert_rounded_either_way if stochastic and state[key].dtype == BRAIN else assert_rounded_once
        rounded(state[key], expected, f"{key} of {what}")
    if case.name in ("Adam", "AdamW"):
        assert state["step"].item() == was.taken + 1
    decay = case.additions.get("ema_decay")
    assert ("ema" in state) == (decay is not None)
    if decay is not None:
        assert state["ema"].dtype == weight.dtype
        # The average is of the new weight, before or after its rounding to 16 bits.
        new = Near(now.double(), (now.double() - weight.value).abs() + weight.error, weight.dtype)
        begun = Near(was.ema.double(), 0, weight.dtype)
        assert_rounded_once(state["ema"], begun + (new - begun) * (1 - decay), f"ema of {what}")
    low = case.additions.get("low_precision_copy")
    if low is not None and p.dtype == FLOAT:
        assert torch.equal(copied(state["copy"]), copied(p).to(low)), "the copy is the parameter, rounded to nearest"


@dataclass
class Run:
    """One history of a case. After step ``reload_after`` it saves, loads into a new optimizer and continues."""

    case: Case
    checked: bool = False
    device: str = "cpu"
    reload_after: int | None = None
    without_skipped: bool = False
    params: list[torch.nn.Parameter] = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.params = parameters(self.case, self.device)
        self.optimizer = self.case.optimizer(self.params)
        taken = [0] * len(self.params)
        for i, step in enumerate(self.case.steps):
            if step.skipped and self.without_skipped:
                continue
            set_grads(self.params, step)
            before = [Stored.of(self.case, self.optimizer, p, n) for p, n in zip(self.params, taken, strict=True)]
            grads = [None if p.grad is None else p.grad.clone() for p in self.params]
            out = take(self.optimizer, step, self.device)
            for p, g in zip(self.params, grads, strict=True):
                assert g is None or torch.equal(p.grad.nan_to_num(), g.nan_to_num()), "lazy: gradients as they were"
            # Without elements no gradient holds a bad value.
            skipped = step.skipped and any(p.grad is not None and p.numel() for p in self.params)
            if self.checked and skipped:
                self.check_skipped(before, out)
            elif self.checked:
                check(self.case, self.optimizer, self.params, before, step, out)
            taken = [n + (not skipped and p.grad is not None) for n, p in zip(taken, self.params, strict=True)]
            if i == self.reload_after:
                self.reload()

    def check_skipped(self, before: list[Stored], out: Any) -> None:
        assert out.found_inf.item() == 1
        for p, was in zip(self.params, before, strict=True):
            now = Stored.of(self.case, self.optimizer, p, was.taken)
            assert torch.equal(now.parameter, was.parameter)
            assert torch.equal(now.weight, was.weight)
            assert torch.equal(now.ema, was.ema)
            assert all(torch.equal(now.moments[key], was.moments[key]) for key in was.moments)
            if self.case.name in ("Adam", "AdamW") and p in self.optimizer.state:
                assert self.optimizer.state[p]["step"].item() == was.taken

    def reload(self) -> None:
        file = io.BytesIO()
        torch.save({"parameters": [p.detach() for p in self.params], "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.params = [torch.nn.Parameter(p) for p in saved["parameters"]]
        self.optimizer = self.case.optimizer(self.params)
        self.optimizer.load_state_dict(saved["optimizer"])

    @property
    def result(self) -> list[Any]:
        return bits(self.optimizer, self.params)
