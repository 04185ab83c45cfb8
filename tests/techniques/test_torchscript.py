"""TorchScript: used if its results match the eager model. All other calls are eager."""

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
from tests.clock import Clock, TimedStep
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES, Net, job_of, make_data, make_job, train
from tests.reasons import reasons
from tests.techniques.harness import PythonCalls, decided, forced, refusal, refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def unheard(work: Callable[[], Any]) -> Any:
    """Suppress the tracer's warnings, as some models do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


class Branch(nn.Linear):
    """Layer with a data-dependent branch, which a trace loses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if x.sum() > 0:
            return y
        return -2 * y


class HiddenBranch(nn.Linear):
    """Layer with a data-dependent branch that the tracer does not warn about."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if unheard(lambda: bool(x.sum() > 0)) else -2 * y


class FirstIsLargest(nn.Linear):
    """Layer whose other branch needs another order of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if unheard(lambda: bool(x[0].abs().max() == x.abs().max())) else -2 * y


class Loop(nn.Linear):
    """Layer with a loop over samples, whose length a trace makes constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(unheard(lambda: len(x))):
            y = y + 0.1
        return y


class OnlyInEval(nn.Linear):
    """Layer with a branch in eval mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training and unheard(lambda: bool(x.sum() > 0)):
            y = -y
        return y


def optimize(model: nn.Module, value: Any = True, **changes: Any) -> Any:
    opt = torch.optim.SGD(model.parameters(), 0.05)
    loader = DataLoader(make_data(), batch_size=16)
    arguments = {"techniques": NO_TECHNIQUES | {"torchscript": value}, "budget": 0} | changes
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, **arguments)
    assert run.report.row("torchscript").status == "kept"
    return run


def plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call the model eagerly: a copy of the model does not use TorchScript."""
    return copy.deepcopy(model)(x)


@pytest.mark.parametrize("value", [True, "script", "trace"])
def test_it_trains_like_the_plain_model_and_stays_in_place(value: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    parameters, keys, attributes = list(map(id, model.parameters())), list(model.state_dict()), set(vars(model))
    run = optimize(model, value)
    row = run.report.row("torchscript")
    assert row.chosen == ("script" if value is True else value)
    assert run.plan.decisions == {"torchscript": row.chosen}
    assert "deprecated" in reasons(row)
    torch.manual_seed(1)
    with PythonCalls(Net.forward) as calls:
        losses = [run.step(batch).item() for _ in range(2) for batch in run.loader]
    assert calls.count == 0
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
        with PythonCalls(Net.forward) as calls:
            copied(torch.randn(16, 8))
        assert calls.count == 1
    run.undo()
    assert set(vars(model)) == attributes
    with PythonCalls(Net.forward) as calls:
        model(torch.randn(16, 8))
    assert calls.count == 1


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_train_and_eval_flips_are_followed_module_by_module(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 8)

    def check(plain_calls: int) -> None:
        torch.manual_seed(2)
        expected = plainly(model, x)
        torch.manual_seed(2)
        with PythonCalls(Net.forward) as calls:
            torch.testing.assert_close(model(x), expected)
        assert calls.count == plain_calls

    with forced("torchscript", kind, job_of(model)) as candidate:
        model(x)
        candidate.end_warmup()
        for flip in (model.eval, model.train, model.eval, model.train):
            flip()
            check(plain_calls=0)
        model.train()
        model.body[1].eval()
        check(plain_calls=1)  # no form of these modes was verified


def test_a_branch_on_data_is_scripted_and_never_traced() -> None:
    torch.manual_seed(0)
    model = Branch(8, 3)
    attributes = set(vars(model))
    with pytest.raises(ValueError, match=r"test_torchscript\.py"):  # the line of the branch
        optimize(model, "trace")
    assert set(vars(model)) == attributes
    run = optimize(model, True)
    assert run.report.row("torchscript").chosen == "script"
    x = torch.rand(16, 8)
    with PythonCalls(Branch.forward) as calls:
        for sign in (1, -1):
            y = functional.linear(sign * x, model.weight, model.bias)
            torch.testing.assert_close(model(sign * x), y if sign == 1 else -2 * y)
    assert calls.count == 0


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (HiddenBranch, "differs-when-negated"),
        (FirstIsLargest, "differs-when-shuffled"),
        (Loop, "differs-when-resized"),
        (OnlyInEval, "differs-in-eval-mode"),
    ],
)
def test_a_trace_that_loses_a_branch_without_a_warning_is_found_on_altered_inputs(
    make: type[nn.Linear], code: str
) -> None:
    torch.manual_seed(0)
    model = make(8, 3)
    x = torch.rand(16, 8)
    x[0] += 1
    before = snapshot(model)
    with forced("torchscript", "trace", job_of(model)):
        codes = refused(lambda: model(x))
    assert codes is not None
    assert code in codes
    assert snapshot(model) == before


def test_a_forward_that_counts_in_python_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.calls = 0
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.scale

    model = Counting()
    with pytest.raises(ValueError, match="'calls'"):
        optimize(model, "trace")


def test_an_attribute_that_is_changed_later_counts() -> None:
    class Scaled(nn.Linear):
        scale: float

        def __init__(self) -> None:
            super().__init__(8, 3)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight, self.bias) * self.scale

    model, x = Scaled(), torch.randn(16, 8)
    optimize(model)
    for scale, plain_calls in ((1.0, 0), (3.0, 1), (1.0, 0)):
        model.scale = scale
        with PythonCalls(Scaled.forward) as calls:
            torch.testing.assert_close(model(x), scale * functional.linear(x, model.weight, model.bias))
        assert calls.count == plain_calls


def test_a_replaced_parameter_and_a_hook_are_seen() -> None:
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimize(model)
    heard: list[int] = []
    with model.register_forward_hook(lambda *_: heard.append(1)):
        model(x)
    assert heard == [1]
    with PythonCalls(nn.Linear.forward) as calls:
        model(x)
    assert calls.count == 0
    model.weight = nn.Parameter(torch.zeros(3, 8))
    with PythonCalls(nn.Linear.forward) as calls:
        torch.testing.assert_close(model(x), model.bias.expand(16, 3))
    assert calls.count == 1


def test_a_weight_that_is_loaded_later_is_used() -> None:
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimize(model, "trace")
    model.load_state_dict(nn.Linear(8, 3).state_dict())
    with PythonCalls(nn.Linear.forward) as calls:
        torch.testing.assert_close(model(x), functional.linear(x, model.weight, model.bias))
    assert calls.count == 0


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_it_goes_with_flatouts_autocast(kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimize(model, kind, techniques=NO_TECHNIQUES | {"precision": "bf16", "torchscript": kind})
    model.eval()
    x = torch.randn(16, 8)
    with PythonCalls(Net.forward) as calls:
        out = model(x)
    assert calls.count == 0
    assert out.dtype is torch.float32
    assert not torch.equal(out, model.body(x))
    torch.testing.assert_close(out, model.body(x), rtol=5e-2, atol=5e-2)
    with torch.no_grad():  # weights cast to bf16 must not be constants of the trace
        model.body[-1].weight.zero_()
        model.body[-1].bias.zero_()
    assert not model(x).any()


def test_an_autocast_of_the_users_own_leaves_no_stale_weight_in_a_trace() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(16, 8)
    with forced("torchscript", "trace", job_of(model)) as candidate:
        with torch.autocast("cpu", torch.bfloat16):
            model.body(x)  # autocast's cache now holds its weights in 16 bits
            model(x)
            candidate.end_warmup()
        with torch.no_grad():
            model.body[-1].weight.zero_()
            model.body[-1].bias.zero_()
        with torch.autocast("cpu", torch.bfloat16), PythonCalls(Net.forward) as calls:
            assert not model(x).any()
    assert calls.count == 0


def test_no_trial_tries_it(clock: Clock) -> None:
    model, loader, opt = make_job()
    job = job_of(model, list(loader), optimizer=opt, loss_fn=TimedStep(clock, 0.01), expected_steps=10**9)
    with decided("torchscript", job=job) as outcome:
        row = outcome.rows["torchscript"]
    assert (row.status, row.trials) == ("not applicable", ())
    assert {"deprecated", "superseded-by-compile"} <= reasons(row)


def test_it_is_refused_in_the_users_own_loop() -> None:
    model, _, opt = make_job()
    assert "own-loop" in (refusal("torchscript", job_of(model)) or ())
    with pytest.raises(ValueError, match=r"torchscript.*'script'.*'trace'.*'both'"):
        forced("torchscript", "both", job_of(model, optimizer=opt))


def test_a_loss_that_is_compiled_with_its_model_is_left_alone(compiler: Any) -> None:
    model, _, opt = make_job()
    job = job_of(model, optimizer=opt, loss_fn=functional.cross_entropy)
    with forced("compile", True, job):
        assert "superseded-by-compile" in (refusal("torchscript", job) or ())


def test_inference_goes_through_it_under_inference_mode_and_no_grad() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    run = flatout.optimize(model, DataLoader(make_data(), batch_size=16), techniques={"torchscript": True}, budget=0)
    assert run.report.row("torchscript").chosen == "script"
    x = torch.randn(16, 8)
    expected = plainly(model, x)
    with PythonCalls(Net.forward) as calls:
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(model(x), expected)
    assert calls.count == 0


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_keywords_and_dictionaries(kind: str) -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = functional.linear(x, self.weight, self.bias)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    model = Named(8, 3)
    batches = [{"x": torch.randn(8, 8), "labels": torch.randint(0, 3, (8,))} for _ in range(4)]
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, batches, opt, techniques=NO_TECHNIQUES | {"torchscript": kind}, budget=0)
    with PythonCalls(Named.forward) as calls:
        run.step(batches[0])
    assert calls.count == 0


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
    optimize(model, "script")
    model.eval()
    expected = plainly(model, x)
    with PythonCalls(Twice.forward) as calls:
        torch.testing.assert_close(model(x), expected)
    assert calls.count == 0


class Breakable(nn.Linear):
    """Layer that fails only in TorchScript, once its buffer is set."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("broken", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting() and bool(self.broken > 0):
            raise RuntimeError("interpreter broke")
        return functional.linear(x, self.weight, self.bias)


def test_a_failure_while_training_falls_back_with_a_reason() -> None:
    model, x = Breakable(), torch.randn(16, 8)
    with forced("torchscript", "script", job_of(model)) as candidate:
        model(x)
        candidate.end_warmup()
        model.broken.fill_(1)
        expected = functional.linear(x, model.weight, model.bias)
        with pytest.warns(RuntimeWarning, match=r"TorchScript.*interpreter[^\n]*$") as said:
            torch.testing.assert_close([model(x), model(x)], [expected, expected])
        assert len(said) == 1
        assert candidate.stopped
        with pytest.raises(RuntimeError, match="shapes"):  # the user's error is raised unchanged
            model(torch.randn(16, 9))


def test_a_dataset_of_one_sample() -> None:
    model = nn.Linear(8, 3)
    loader = DataLoader(TensorDataset(torch.randn(1, 8), torch.zeros(1, dtype=torch.long)))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    techniques = NO_TECHNIQUES | {"torchscript": True}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert run.report.row("torchscript").status == "kept"
