"""Compiled models in loops of one's own: hooks, gradients of gradients and changes of modules, as in eager models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import flatout
from tests.jobs import NO_TECHNIQUES, job_of
from tests.techniques.harness import PythonCalls, forced

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Model whose output is a view, and with a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.act, self.factor = nn.Softplus(), 1.0

    def forward(self, x):
        y = self.two(self.act(self.norm(self.one(x)))) * self.factor
        return y.unflatten(1, (2, 2)).transpose(1, 2)


def double(x):
    return 2 * x


class Pair(Net):
    def forward(self, x):
        y = super().forward(x)
        return {"first": y[:, 0], "more": (y.square().sum(), x)}


@pytest.fixture
def made(request):
    """Return a compiled model, an equal plain model, and batches."""
    torch.manual_seed(0)
    model = getattr(request, "param", Net)()
    twin = copy.deepcopy(model)
    batches = [torch.randn(8, 6) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    candidate = forced("compile", True, job_of(model, batches, optimizer))
    with candidate:
        total(model(batches[0])).backward()
        model.zero_grad()
        total(twin(batches[0]))
        candidate.end_warmup()
        with PythonCalls(Net.forward) as calls:
            total(model(batches[1]))
            total(twin(batches[1]))
        assert calls.count == 1  # of the twin
        yield model, twin, batches


def total(output):
    if isinstance(output, dict):
        return output["first"].square().sum() + output["more"][0]
    return output.square().sum()


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def assert_same_training(model, twin, batches):
    for x in batches:
        for each in (model, twin):
            each.zero_grad()
            total(each(x)).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        grads = [(a.grad, b.grad) for a, b in pairs]
        assert [a is None for a, _ in grads] == [b is None for _, b in grads]
        assert_same([a for a, _ in grads if a is not None], [b for _, b in grads if b is not None])
    assert_same(model.buffers(), twin.buffers())


# -- hooks ---------------------------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda _, args, output: output * 0.5),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, given, grads: (given[0] * 0.5,)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,)),
    "of a weight": lambda m: m.weight.register_hook(lambda grad: grad * 0.5),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_act_while_they_are_registered(made, hook):
    model, twin, batches = made
    handles = [HOOKS[hook](each.two) for each in (model, twin)]
    assert_same_training(model, twin, batches)
    for handle in handles:
        handle.remove()
    assert_same_training(model, twin, batches)
    with PythonCalls(Net.forward) as calls:
        model(batches[0])
    assert calls.count == 0  # compiled again


def test_global_hooks_act(made):
    model, _, batches = made
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    model(batches[0])
    handle.remove()
    assert model.two in seen


def test_a_hook_that_was_compiled_is_removed():
    torch.manual_seed(0)
    model, batches = Net(), [torch.randn(8, 6)] * 2
    handle = model.two.register_forward_hook(lambda _, args, output: output * 0.5)
    candidate = forced("compile", True, job_of(model, batches, torch.optim.SGD(model.parameters(), 0.1)))
    with candidate:
        total(model(batches[0])).backward()
        candidate.end_warmup()
        halved = model(batches[0])
        handle.remove()
        torch.testing.assert_close(model(batches[0]), 2 * halved, rtol=1e-4, atol=1e-5)


# -- gradients of gradients ----------------------------------------------------------------------------------


def test_graphs_are_retained(made):
    model, twin, batches = made
    for each in (model, twin):
        each.zero_grad()
        loss = total(each(batches[0]))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    with PythonCalls(Net.forward) as calls:
        model(batches[0])
    assert calls.count == 0


@pytest.mark.parametrize("made", [Net, Pair], indirect=True)
def test_gradients_of_weights_are_differentiated_again(made):
    model, twin, batches = made
    for x in batches[:2]:
        for each in (model, twin):
            each.zero_grad()
            loss = total(each(x))
            gradients = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
            (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert_same(model.buffers(), twin.buffers())


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_inputs_are_differentiated_again(made, is_leaf):
    model, twin, batches = made
    for x in batches[:2]:
        for each in (model, twin):
            each.zero_grad()
            given = x.clone().requires_grad_()
            given = given if is_leaf else given * 1.5
            (slope,) = torch.autograd.grad(total(each(given)), given, create_graph=True)
            slope.square().sum().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("is_leaf", [True, False])
def test_inputs_with_gradients_that_were_compiled(is_leaf):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    weight = torch.randn(6, 6, requires_grad=True)

    def inputs():
        x = torch.ones(8, 6).cumsum(0).requires_grad_()
        return x if is_leaf else x @ weight

    candidate = forced("compile", True, job_of(model, [inputs()], torch.optim.SGD(model.parameters(), 0.1)))
    with candidate:
        total(model(inputs())).backward()
        candidate.end_warmup()
        total(twin(inputs()))
        found = []
        for each in (model, twin):
            x = inputs()
            with PythonCalls(Net.forward) as calls:
                output = each(x)
            assert calls.count == (each is twin)
            (slope,) = torch.autograd.grad(total(output), x, create_graph=True)
            found.append([slope, *torch.autograd.grad(slope.square().sum(), [x, each.one.weight])])
    assert_same(*found)


def test_a_product_with_the_hessian(made):
    model, twin, batches = made
    found = []
    for each in (model, twin):
        parameters = list(each.parameters())
        gradients = torch.autograd.grad(total(each(batches[0])), parameters, create_graph=True)
        found.append(torch.autograd.grad(gradients, parameters, [torch.ones_like(p) for p in parameters]))
    assert_same(*found)


def test_functional_transforms(made):
    model, twin, batches = made
    model.eval()
    twin.eval()
    found = []
    for each in (model, twin):
        weights = dict(each.named_parameters())

        def loss(weights, each=each):
            return total(torch.func.functional_call(each, weights, (batches[0],)))

        found.append(list(torch.func.grad(loss)(weights).values()))
        faster = {name: p - 0.1 * p.square() for name, p in weights.items()}
        found[-1] += torch.autograd.grad(loss(faster), list(weights.values()))
    assert_same(*found)


# -- changes of modules --------------------------------------------------------------------------------------


def weight_replaced(model):
    model.two.weight = nn.Parameter(model.two.weight.detach() * 0.5)


def data_replaced(model):
    model.two.weight.data = model.two.weight.data * 0.5


def head_replaced(model):
    torch.manual_seed(1)
    model.two = nn.Linear(16, 4)


CHANGES = {
    "weight": weight_replaced,
    "data": data_replaced,
    "head": head_replaced,
    "activation": lambda model: setattr(model, "act", nn.ReLU()),
    "attribute": lambda model: setattr(model, "factor", 2.0),
    "frozen": lambda model: model.one.requires_grad_(False),
    "eval of a part": lambda model: model.norm.eval(),
    "forward of a part": lambda model: setattr(model.act, "forward", double),
    "forward": lambda model: setattr(model, "forward", lambda x: Net.forward(model, 2 * x)),
    "pruned": lambda model: prune.l1_unstructured(model.two, "weight", 0.5),
    "double": lambda model: model.double(),
    "weight norm": lambda model: parametrize.register_parametrization(model.two, "weight", nn.Softplus()),
    "momentum": lambda model: setattr(model.norm, "momentum", 0.5),
    "call": lambda model: setattr(model.act, "__class__", nn.Tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_modules_act(made, change):
    model, twin, batches = made
    for each in (model, twin):
        CHANGES[change](each)
    if change == "double":
        batches = [x.double() for x in batches]
    assert_same_training(model, twin, batches)


# -- run.step ------------------------------------------------------------------------------------------------


def test_a_loss_that_begins_to_penalize_gradients():
    is_penalized = []

    def loss(model, x):
        x = x.clone().requires_grad_(bool(is_penalized))
        output = total(model(x))
        if is_penalized:
            (slope,) = torch.autograd.grad(output, x, create_graph=True)
            output = output + slope.square().mean()
        return output

    runs, batches = [], [torch.randn(8, 6) for _ in range(3)]
    for compiled in (True, False):
        is_penalized.clear()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        techniques = NO_TECHNIQUES | {"compile": compiled}
        run = flatout.optimize(model, batches, optimizer, compute_loss=loss, techniques=techniques, budget=0, plan=None)
        for each in (False, True):
            is_penalized += [True] * each
            for x in batches:
                run.step(x)
        runs.append(model)
    assert_same(runs[0].parameters(), runs[1].parameters())
