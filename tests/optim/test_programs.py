"""Random programs of calls on optimizers and scalers: after each call, flatout's side equals torch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp as fa
import flatout.optim as fo

SHAPES = [(3,), (), (5, 7), (0,), (4, 3, 2, 2)]
OPTIONS = {
    "AdamW": [{}, {"amsgrad": True}, {"maximize": True}],
    "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True, "weight_decay": 0.1}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True}],
}
EDITS = {
    "lr": [0.0, 0.01, torch.tensor(0.05)],
    "weight_decay": [0.0, 0.2],
    "maximize": [True, False],
    "betas": [(0.0, 0.9), (0.5, 0.99)],
    "momentum": [0.0, 0.5],
    "dampening": [0.0, 0.5],
    "eps": [1e-3],
}
BAD = [*[None] * 6, "inf", "nan"]
FORMS = ["bare", "closure", "plain", "unscaled", "clipped", "unscaled twice", "stepped twice"]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("grads"), st.integers(0, 9), st.integers(1, 255), st.sampled_from(BAD)),
        st.tuples(st.just("step"), st.sampled_from(FORMS)),
        st.tuples(st.just("zero"), st.booleans()),
        st.tuples(st.just("group"), st.sampled_from([0.01, 0.5])),
        st.tuples(st.just("edit"), st.sampled_from(sorted(EDITS)), st.integers(0, 2)),
        st.tuples(st.just("copy"), st.sampled_from(["deepcopy", "pickle", "state_dict", "exchange"])),
        st.tuples(st.just("schedule"), st.booleans()),
        st.tuples(st.just("state"), st.sampled_from(["clear", "scale", "replace", "forget one"])),
        st.tuples(st.just("weights"), st.sampled_from(["write", "data", "transpose", "channels_last"])),
        st.tuples(st.just("dtype"), st.sampled_from([torch.float32, torch.float64])),
        st.tuples(st.just("drop"), st.integers(0, 4)),
    ),
    min_size=3,
    max_size=14,
)  # fmt: skip


class Side:
    """Parameters, optimizer, scaler and scheduler of one library."""

    def __init__(self, module: Any, scaler: Any, name: str, options: dict[str, Any]) -> None:
        self.ours, self.name = module is fo, name
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]
        more = {} if self.ours else {"foreach": False}
        self.optimizer = getattr(module, name)(self.params[:-1], lr=0.1, **options, **more)
        self.scaler = scaler("cpu", init_scale=64.0, growth_interval=2)
        self.scaler.scale(torch.ones(()))
        self.scheduler: Any = None

    def run(self, call: tuple[Any, ...], other: Side) -> type[BaseException] | None:
        try:
            getattr(self, "do_" + call[0])(*call[1:], other)
        except (RuntimeError, ValueError, AssertionError) as error:
            return type(error)
        return None

    def do_grads(self, seed: int, mask: int, bad: str | None, _: Side) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(self.params):
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 64
            if bad is not None and g.numel():
                g.view(-1)[-1] = float(bad)
            p.grad = g if mask >> i & 1 else None

    def do_step(self, form: str, _: Side) -> None:
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if form in ("bare", "closure"):
            self.optimizer.step(*([lambda: torch.ones(())] if form == "closure" else []))
        elif any(p.grad is not None for p in stepped):
            if form.startswith("unscaled") or (form == "clipped" and not self.ours):
                self.scaler.unscale_(self.optimizer)
            if form == "unscaled twice":
                self.scaler.unscale_(self.optimizer)
            if form == "clipped":
                if self.ours:  # the lazy form does not change gradients
                    self.scaler.step(self.optimizer, max_grad_norm=0.5)
                else:
                    kept = [p.grad if p.grad is None else p.grad / self.scaler._scale.reciprocal() for p in stepped]
                    torch.nn.utils.clip_grad_norm_(stepped, 0.5)
                    self.scaler.step(self.optimizer)
                    for p, g in zip(stepped, kept, strict=True):
                        p.grad = g
            else:
                self.scaler.step(self.optimizer)
            if form == "stepped twice":
                self.scaler.step(self.optimizer)
            self.scaler.update()

    def do_zero(self, set_to_none: bool, _: Side) -> None:
        self.optimizer.zero_grad(set_to_none)

    def do_group(self, lr: float, _: Side) -> None:
        self.optimizer.add_param_group({"params": self.params[-1:], "lr": lr})

    def do_edit(self, key: str, which: int, _: Side) -> None:
        if key in self.optimizer.param_groups[-1]:
            value = EDITS[key][which % len(EDITS[key])]
            self.optimizer.param_groups[-1][key] = value.clone() if isinstance(value, torch.Tensor) else value

    def do_copy(self, how: str, other: Side) -> None:
        if how == "state_dict":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif how == "exchange":  # each side loads the other's equal state
            saved = copy.deepcopy(other.optimizer.state_dict())
            for group, mine in zip(saved["param_groups"], self.optimizer.param_groups, strict=True):
                group["foreach"] = mine["foreach"]
            self.optimizer.load_state_dict(saved)
        else:
            self.scheduler = None
            self.optimizer.__dict__.pop("step", None)
            kept = (self.params, self.optimizer, self.scaler)
            kept = copy.deepcopy(kept) if how == "deepcopy" else pickle.loads(pickle.dumps(kept))
            self.params, self.optimizer, self.scaler = kept
            if self.scaler._scale is None:
                self.scaler.scale(torch.ones(()))

    def do_schedule(self, make: bool, _: Side) -> None:
        if make and not any(isinstance(group["lr"], torch.Tensor) for group in self.optimizer.param_groups):
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        elif self.scheduler is not None and len(self.scheduler.base_lrs) == len(self.optimizer.param_groups):
            self.scheduler.step()

    def do_state(self, what: str, _: Side) -> None:
        state = self.optimizer.state
        if what == "clear":
            state.clear()
        for p in list(state)[:1] if what == "forget one" else []:
            del state[p]
        for entry in state.values():
            for key, value in entry.items():
                if key != "step" and value is not None and what != "forget one":
                    value.mul_(0.5)
                    entry[key] = value.clone() if what == "replace" else value

    @torch.no_grad()
    def do_weights(self, what: str, _: Side) -> None:
        for p in self.params:
            if what == "write":
                p.mul_(0.9)
            elif what == "data":
                p.data = p.data.clone()
            elif what == "transpose" and p.dim() == 2:
                p.data = p.data.t().contiguous().t()
            elif what == "channels_last" and p.dim() == 4:
                p.data = p.data.to(memory_format=torch.channels_last)

    def do_dtype(self, dtype: torch.dtype, _: Side) -> None:
        for p in self.params:
            p.data = p.data.to(dtype)
            p.grad = None
            for key, value in self.optimizer.state.get(p, {}).items():
                if not self.ours and key != "step" and value is not None:  # flatout casts its state itself
                    self.optimizer.state[p][key] = value.to(dtype)

    def do_drop(self, which: int, _: Side) -> None:
        listed = self.optimizer.param_groups[0]["params"]
        if which < len(listed) > 1:
            self.optimizer.state.pop(listed.pop(which), None)


def assert_same(ours: Side, theirs: Side) -> None:
    close = dict(rtol=2e-5, atol=2e-6, equal_nan=True, check_stride=False)
    for i, (p, q) in enumerate(zip(ours.params, theirs.params, strict=True)):
        torch.testing.assert_close(p, q, **close, msg=lambda m, i=i: f"parameter {i}: {m}")
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, **close, msg=lambda m, i=i: f"gradient {i}: {m}")
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    mine, saved = ours.optimizer.state_dict(), theirs.optimizer.state_dict()
    for a, b in zip(mine["param_groups"], saved["param_groups"], strict=True):
        assert {**a, "foreach": None} == {**b, "foreach": None}
    assert mine["state"].keys() >= saved["state"].keys()
    for i, entry in mine["state"].items():
        expected = saved["state"].get(i, {})
        assert entry.keys() >= expected.keys()
        for key, value in entry.items():
            if expected.get(key) is None:  # a skipped step has created the state
                assert value is None or not value.any(), f"state {i} {key}"
            elif key == "step":
                torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
            else:
                torch.testing.assert_close(
                    value.to(expected[key].dtype),
                    expected[key],
                    **close,
                    msg=lambda m, i=i, k=key: f"state {i} {k}: {m}",
                )


def run(name: str, options: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
    ours = Side(fo, fa.GradScaler, name, options)
    theirs = Side(torch.optim, torch.amp.GradScaler, name, options)
    for call in calls:
        before = copy.deepcopy(theirs.optimizer.state_dict()) if call[-1] == "exchange" else None
        error = ours.run(call, theirs)
        if before is None:
            assert error == theirs.run(call, ours), call
        if error is not None:
            return  # the state after an error is not compared
        assert_same(ours, theirs)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(OPTIONS)), which=st.integers(0, 3), calls=CALLS)
def test_any_program_gives_what_torch_gives(name, which, calls):
    options = OPTIONS[name][which % len(OPTIONS[name])]
    run(name, options, [("grads", 1, 255, None), ("step", "bare"), *calls, ("grads", 2, 255, None), ("step", "plain")])
