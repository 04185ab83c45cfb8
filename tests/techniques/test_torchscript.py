"""TorchScript stands in for the model where it was shown to do the same, and steps aside everywhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.report.model import Row
from flatout.techniques import NothingBetter
from flatout.techniques.torchscript import ScriptedCall, TorchScriptSwitch
from tests.helpers import snapshot, trained_state
from tests.jobs import Net, make_data, make_job, train

pytestmark = [
    pytest.mark.usefixtures("short_trials"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

OTHERS = {"precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}


def unheard(work: Callable[[], Any]) -> Any:
    """As models do whose authors know of the tracer's warnings, and do not want to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


class Branch(nn.Linear):
    """What a trace loses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if x.sum() > 0:
            return y
        return -2 * y


class HiddenBranch(nn.Linear):
    """The same with no warning."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if unheard(lambda: bool(x.sum() > 0)) else -2 * y


class FirstIsLargest(nn.Linear):
    """A branch that only another order of the inputs takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if unheard(lambda: bool(x[0].abs().max() == x.abs().max())) else -2 * y


class Loop(nn.Linear):
    """A trace repeats it as often as the batch that it was traced with had samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(unheard(lambda: len(x))):
            y = y + 0.1
        return y


class OnlyInEval(nn.Linear):
    """Training shows nothing of its branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training and unheard(lambda: bool(x.sum() > 0)):
            y = -y
        return y


def row_of(run: Any, name: str = "torchscript") -> Row:
    return next(row for row in run.report.rows if row.technique == name)


def optimize(model: nn.Module, value: Any = True, **changes: Any) -> Any:
    opt = torch.optim.SGD(model.parameters(), 0.05)
    loader = DataLoader(make_data(), batch_size=16)
    arguments = {"techniques": OTHERS | {"torchscript": value}, "budget": 0} | changes
    return flatout.optimize(model, loader, opt, functional.cross_entropy, **arguments)


@pytest.mark.parametrize("value", [True, "script", "trace"])
def test_it_trains_like_the_plain_model_and_stays_in_place(value: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
    run = optimize(model, value)
    assert row_of(run).status == "kept"
    assert row_of(run).chosen == ("script" if value is True else value)
    assert run.plan.decisions == {"torchscript": row_of(run).chosen}
    assert "deprecated" in row_of(run).why
    call = model._compiled_call_impl
    assert isinstance(call, ScriptedCall)
    torch.manual_seed(1)
    losses = [run.step(batch).item() for _ in range(2) for batch in run.loader]
    assert call.plain_calls == 0
    torch.manual_seed(1)
    expected = [
        loss
        for _ in range(2)
        for loss in train(twin, DataLoader(make_data(), batch_size=16), torch.optim.SGD(twin.parameters(), 0.05))
    ]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert list(map(id, model.parameters())) == parameters
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net
        assert copied._compiled_call_impl is None
    run.undo()
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_train_and_eval_flips_are_followed_module_by_module(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 8)
    switch = TorchScriptSwitch(model, (kind,))
    switch.enable()
    model(x)
    switch.freeze()
    call = switch.call
    assert call is not None
    for flip in (model.eval, model.train, model.eval, model.train):
        flip()
        torch.manual_seed(2)
        through = model(x)
        torch.manual_seed(2)
        torch.testing.assert_close(through, model._call_impl(x))
    assert call.plain_calls == 0
    model.train()
    model.body[1].eval()
    torch.manual_seed(2)
    through = model(x)
    torch.manual_seed(2)
    torch.testing.assert_close(through, model._call_impl(x))
    assert call.plain_calls == (1 if kind == "trace" else 0)


def test_a_branch_on_data_is_scripted_and_never_traced() -> None:
    torch.manual_seed(0)
    model = Branch(8, 3)
    with pytest.raises(ValueError, match=r"test_torchscript\.py"):  # the line of the branch
        optimize(model, "trace")
    assert model._compiled_call_impl is None
    run = optimize(model, True)
    assert row_of(run).chosen == "script"
    x = torch.rand(16, 8)
    for sign in (1, -1):
        torch.testing.assert_close(model(sign * x), model._call_impl(sign * x))


@pytest.mark.parametrize(
    ("make", "said"),
    [(HiddenBranch, "negated"), (FirstIsLargest, "shuffled"), (Loop, "resized"), (OnlyInEval, "in eval mode")],
    ids=["negated", "shuffled", "resized", "eval"],
)
def test_what_a_trace_loses_without_a_warning_shows_on_altered_inputs(make: type[nn.Linear], said: str) -> None:
    torch.manual_seed(0)
    model = make(8, 3)
    switch = TorchScriptSwitch(model, ("trace",))
    x = torch.rand(16, 8)
    x[0] += 1
    before = snapshot(model)
    switch.enable()
    with pytest.raises(NothingBetter, match=said):
        model(x)
    switch.disable()
    assert snapshot(model) == before


def test_what_python_keeps_or_changes_is_not_missed() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.calls = 0
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.scale

    counting = Counting()
    switch = TorchScriptSwitch(counting, ("trace",))
    switch.enable()
    with pytest.raises(NothingBetter, match="'calls'"):
        counting(torch.randn(16, 8))

    class Scaled(nn.Linear):
        scale: float

        def __init__(self) -> None:
            super().__init__(8, 3)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight, self.bias) * self.scale

    model, x = Scaled(), torch.randn(16, 8)
    optimize(model)
    assert model._compiled_call_impl.why_off == ""
    model.scale = 3.0
    with pytest.warns(RuntimeWarning, match="TorchScript is off.*'scale' was changed"):
        torch.testing.assert_close(model(x), 3 * functional.linear(x, model.weight, model.bias))


def test_a_replaced_parameter_and_a_hook_are_seen() -> None:
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimize(model)
    heard: list[int] = []
    with model.register_forward_hook(lambda *_: heard.append(1)):
        model(x)
    assert heard == [1]
    model(x)
    assert model._compiled_call_impl.plain_calls == 1
    model.weight = nn.Parameter(torch.zeros(3, 8))
    with pytest.warns(RuntimeWarning, match="was replaced"):
        torch.testing.assert_close(model(x), model.bias.expand(16, 3))
    model(x)


def test_a_changed_weight_is_used_whoever_changed_it() -> None:
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimize(model, "trace")
    model.load_state_dict(nn.Linear(8, 3).state_dict())
    torch.testing.assert_close(model(x), functional.linear(x, model.weight, model.bias))
    assert model._compiled_call_impl.plain_calls == 0


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_it_goes_with_flatouts_autocast(kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    run = optimize(model, kind, techniques=OTHERS | {"precision": "bf16", "torchscript": kind})
    assert row_of(run).status == "kept", row_of(run).why
    model.eval()
    x = torch.randn(16, 8)
    out = model(x)
    assert model._compiled_call_impl.plain_calls == 0
    assert out.dtype is torch.float32
    assert not torch.equal(out, model.body(x))
    torch.testing.assert_close(out, model._call_impl(x), rtol=1e-2, atol=1e-2)
    with torch.no_grad():  # weights cast to bf16 must not be constants of the trace
        model.body[-1].weight.zero_()
        model.body[-1].bias.zero_()
    assert not model(x).any()


def test_an_autocast_of_the_users_own_leaves_no_stale_weight_in_a_trace() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(16, 8)
    switch = TorchScriptSwitch(model, ("trace",))
    switch.enable()
    with torch.autocast("cpu", torch.bfloat16):
        model._call_impl(x)  # its weights in 16 bits wait in autocast's cache
        model(x)
        switch.freeze()
    with torch.no_grad():
        model.body[-1].weight.zero_()
        model.body[-1].bias.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not model(x).any()
    assert switch.call is not None
    assert switch.call.plain_calls == 0


def test_it_is_tried_where_compile_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader, opt = make_job()
    tried = {"techniques": OTHERS, "budget": 20, "expected_steps": 10**9}
    monkeypatch.setenv("CXX", "no-such-compiler")
    before, everything = trained_state(model, opt), snapshot(model, opt)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, **tried)
    assert row_of(run, "compile").status == "not applicable"
    assert "no-such-compiler" in row_of(run, "compile").why
    assert row_of(run).trials
    assert row_of(run).trials[0].candidate == "script"
    assert not row_of(run).trials[0].failure
    assert trained_state(model, opt) == before
    run.undo()
    assert snapshot(model, opt) == everything


def test_it_is_tried_where_every_trial_of_compile_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda call, mode: broken)
    model, loader, opt = make_job()
    run = flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=OTHERS, budget=60, expected_steps=10**9
    )
    assert row_of(run, "compile").status == "rejected"
    assert row_of(run).trials


def test_it_is_left_alone_where_compile_serves_and_in_a_loop_of_ones_own() -> None:
    model, loader, opt = make_job()
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        techniques=OTHERS | {"compile": False},
        budget=30,
        expected_steps=10**9,
    )
    assert row_of(run).status == "not applicable", row_of(run).why
    assert "deprecated" in row_of(run).why
    with pytest.raises(ValueError, match="torchscript"):
        flatout.optimize(model, loader, techniques={"torchscript": True}, budget=0)
    with pytest.raises(ValueError, match="'script' or 'trace'"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, techniques={"torchscript": "both"}, budget=0)


def test_it_leaves_a_loss_alone_that_is_compiled_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, mode: call)
    model, loader, opt = make_job()
    techniques = OTHERS | {"compile": True}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert row_of(run).status == "not applicable"
    assert "torch.compile runs the model already" in row_of(run).why


def test_inference_goes_through_it_under_inference_mode_and_no_grad() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    run = flatout.optimize(model, DataLoader(make_data(), batch_size=16), techniques={"torchscript": True}, budget=0)
    assert row_of(run).chosen == "script"
    x = torch.randn(16, 8)
    expected = model._call_impl(x)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(x), expected)
    assert model._compiled_call_impl.plain_calls == 0


def test_keywords_and_dictionaries() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = functional.linear(x, self.weight, self.bias)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    for kind in ("script", "trace"):
        model = Named(8, 3)
        batches = [{"x": torch.randn(8, 8), "labels": torch.randint(0, 3, (8,))} for _ in range(4)]
        run = flatout.optimize(
            model,
            batches,
            torch.optim.SGD(model.parameters(), 0.1),
            techniques=OTHERS | {"torchscript": kind},
            budget=0,
        )
        assert row_of(run).status == "kept", row_of(run).why
        run.step(batches[0])
        assert model._compiled_call_impl.plain_calls == 0


def test_nothing_keeps_the_model_alive() -> None:
    model = Net()
    run = optimize(model)
    gone = weakref.ref(model)
    del model, run
    gc.collect()
    assert gone() is None


def test_tied_and_repeated_modules_are_followed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
            self.same = self.one
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.same(self.one(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(16, 8)
    run = optimize(model, "script")
    assert row_of(run).status == "kept", row_of(run).why
    model.eval()
    torch.testing.assert_close(model(x), model._call_impl(x))
    assert model._compiled_call_impl.plain_calls == 0


def test_what_fails_while_training_falls_back_and_says_why() -> None:
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimize(model, "script")
    call = model._compiled_call_impl

    class Broken:
        def way(self) -> Any:
            def fail(*_: Any) -> Any:
                raise RuntimeError("interpreter broke\nat length")

            return fail

    call._known = dict.fromkeys(call._known, Broken())
    with pytest.warns(RuntimeWarning, match="TorchScript is off .*eager: RuntimeError: interpreter broke$"):
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert call.why_off
    with pytest.raises(RuntimeError, match="shapes"):  # the user's own mistake stays theirs
        model(torch.randn(16, 9))


def test_data_that_a_dataset_of_one_batch_has() -> None:
    model = nn.Linear(8, 3)
    loader = DataLoader(TensorDataset(torch.randn(1, 8), torch.zeros(1, dtype=torch.long)))
    run = flatout.optimize(
        model,
        loader,
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques=OTHERS | {"torchscript": True},
        budget=0,
    )
    assert row_of(run).status == "kept", row_of(run).why
