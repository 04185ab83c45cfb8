"""Warning about gradients in evaluation loops: once, with the line, and never in training."""

import copy
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.techniques.evaluation import SURE_AFTER
from tests.helpers import line_of
from tests.jobs import FORCED_IN_OWN_LOOP, QUICK, Net, job_of, make_job
from tests.techniques.harness import forced

X, Y = torch.randn(16, 8), torch.randint(0, 3, (16,))


def evaluate(model, times=10):
    model.eval()
    total = 0.0
    for _ in range(times):
        total += functional.cross_entropy(model(X), Y).item()
    return total


def warned(work):
    """Return the warnings that recommend ``torch.inference_mode``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [each for each in caught if "torch.inference_mode()" in str(each.message)]


def own_loop(techniques=QUICK):
    model, loader, opt = make_job()
    model, loader = flatout.optimize(model, loader, techniques=techniques, budget=0, device="cpu")
    return model, loader, opt


@pytest.mark.parametrize("techniques", [QUICK, FORCED_IN_OWN_LOOP], ids=["plain", "autocast"])
def test_the_warning_comes_once_with_the_line(techniques):
    model, _, _ = own_loop({k: v for k, v in techniques.items() if k not in ("fused_optimizer", "in_memory")})
    (said,) = warned(lambda: [evaluate(model) for _ in range(3)])
    assert f"{Path(said.filename).name}:{said.lineno}" == line_of(evaluate, "model(X)")
    assert said.category is UserWarning


def without_gradients(model):
    with torch.no_grad():
        evaluate(model)
    with torch.inference_mode():
        evaluate(model)


def in_eval_mode(model):
    """Fine-tune with frozen statistics."""
    model.eval()
    for _ in range(10):
        functional.cross_entropy(model(X), Y).backward()


def late(model):
    """Run one backward for many forwards."""
    model.eval()
    for _ in range(3):
        sum(model(X).sum() for _ in range(10)).backward()


def through_the_input(model):
    """Compute gradients of the input, as an adversarial attack does."""
    model.eval().requires_grad_(False)
    for _ in range(10):
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)


def frozen(model):
    evaluate(model.requires_grad_(False))


def written_into(model):
    model.eval()
    for _ in range(10):
        model(X).mul_(2).sum().backward()


def now_and_then(model):
    """Run fewer forwards than a warning takes between training steps."""
    for _ in range(5):
        evaluate(model, SURE_AFTER - 1)
        model(X).sum().backward()


TRAININGS = [without_gradients, in_eval_mode, late, through_the_input, frozen, written_into, now_and_then]


@pytest.mark.parametrize("use", TRAININGS)
def test_used_gradients_cause_no_warning(use):
    model, _, _ = own_loop()
    assert warned(lambda: use(model)) == []


def test_train_mode_is_ignored():
    model, _, _ = own_loop()
    model.train()
    assert warned(lambda: [model(X) for _ in range(10)]) == []


def test_a_model_inside_a_compiled_function_works():
    model, _, _ = own_loop()
    model.eval()
    step = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    assert torch.equal(step(X), model(X))


def test_copies_pickles_and_undo_know_nothing_of_it():
    model, loader, _ = make_job()
    run = flatout.optimize(model, loader, techniques=QUICK, budget=0, device="cpu")
    assert type(model) is not Net
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is Net
    run.undo()
    assert type(model) is Net
    assert warned(lambda: evaluate(model)) == []


def test_nothing_is_attached_where_the_run_evaluates():
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0, device="cpu")
    assert type(model) is Net
    model.eval()
    flatout.optimize(model, loader, techniques=QUICK, budget=0, device="cpu")
    assert type(model) is Net


class Flagged(torch.autograd.Function):
    """Autograd function whose context holds an object that a weak reference can follow."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


class Held:
    pass


@pytest.mark.parametrize("backward", [False, True])
def test_the_graph_is_freed_as_without_it(backward):
    held = []

    class Flagging(nn.Linear):
        def forward(self, x):
            mark = Held()
            held.append(weakref.ref(mark))
            return Flagged.apply(super().forward(x), mark)

    model = Flagging(8, 3).eval()
    with forced("evaluation", True, job_of(model)):
        output = model(X)
        assert held[0]() is not None
        if backward:
            output.sum().backward()
        del output
        assert held[0]() is None
    assert type(model) is Flagging
