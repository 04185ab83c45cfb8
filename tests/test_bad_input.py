"""Bad input is refused with an error that names the argument and the value, and nothing changes."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from tests.helpers import snapshot
from tests.jobs import Net, make_data


def bad_jobs():
    net, opt = Net(), torch.optim.Adam
    other = torch.optim.Adam(Net().parameters())
    frozen = Net().requires_grad_(False)
    loader = DataLoader(make_data(), batch_size=16)
    ce = functional.cross_entropy
    words = [["a", "b"], ["c", "d"]]
    yield "empty loader", (net, [], opt(net.parameters()), ce), {}, ValueError, "loader"
    yield "nothing to train", (frozen, loader, None, ce), {}, ValueError, "^model"
    yield "no tensors", (net, words, opt(net.parameters()), ce), {}, ValueError, "^loader"
    yield "foreign optimizer", (net, loader, other, ce), {}, ValueError, "^optimizer"
    vector = lambda out, y: functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    yield "vector loss", (net, loader, opt(net.parameters()), vector), {}, ValueError, r"loss.*\(16,\)"
    number = lambda out, y: 1.0  # noqa: E731
    yield "loss not a tensor", (net, loader, opt(net.parameters()), number), {}, TypeError, "loss.*float"
    detached = lambda out, y: ce(out.detach(), y)  # noqa: E731
    yield "detached loss", (net, loader, opt(net.parameters()), detached), {}, ValueError, "loss"
    job = (net, loader, opt(net.parameters()), ce)
    yield "misspelt", job, {"techniques": {"compil": False}}, ValueError, "'compil'.*'compile'"
    yield "bad value", job, {"techniques": {"workers": -1}}, ValueError, "workers.*-1"
    yield "bad precision", job, {"precision": "fp8"}, ValueError, "'fp8'"
    yield "bad norm", job, {"max_grad_norm": -1.0}, ValueError, r"max_grad_norm.*-1\.0"
    yield "bad accumulate", job, {"accumulate": 0}, ValueError, "accumulate.*0"
    yield "bad budget", job, {"budget": -1.0}, ValueError, r"budget.*-1\.0"
    yield "not a model", (ce, *job[1:]), {}, TypeError, "^model.*function"
    yield "not a loader", (net, 3, *job[2:]), {}, TypeError, "^loader.*int"
    no_opt = (net, loader, None, ce)
    yield "norm without optimizer", no_opt, {"max_grad_norm": 1.0}, ValueError, "max_grad_norm"
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt(net.parameters()))
    yield "plateau", job, {"scheduler": plateau}, ValueError, "ReduceLROnPlateau"
    lbfgs = torch.optim.LBFGS(net.parameters())
    yield "lbfgs", (net, loader, lbfgs, ce), {}, ValueError, "LBFGS"
    yield "no loss", (net, loader, opt(net.parameters())), {}, ValueError, "loss_fn.*compute_loss"
    yield "two losses", job, {"compute_loss": ce}, ValueError, "loss_fn.*compute_loss"
    yield "triple", (net, [(torch.ones(2, 8),) * 3], opt(net.parameters()), ce), {}, TypeError, "compute_loss"


def picture(model, optimizer):
    """Return all that is known of the two; an optimizer of another model has no state by name."""
    if not isinstance(model, Net):
        return type(model), None
    held = set() if optimizer is None else {p for group in optimizer.param_groups for p in group["params"]}
    return type(model), snapshot(model, optimizer if held & {*model.parameters()} else None)


@pytest.mark.parametrize(("args", "kwargs", "error", "facts"), [pytest.param(*c[1:], id=c[0]) for c in bad_jobs()])
def test_bad_input_is_refused_and_changes_nothing(args, kwargs, error, facts):
    model, optimizer = args[0], args[2] if len(args) > 2 else None
    before = picture(model, optimizer)
    with pytest.raises(error, match=facts):
        flatout.optimize(*args, **kwargs)
    assert picture(model, optimizer) == before


def test_an_error_in_the_users_model_passes_through_whole():
    class Broken(Net):
        def forward(self, x):
            raise RuntimeError("mine")

    model = Broken()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        flatout.optimize(model, DataLoader(make_data(), batch_size=16), None, functional.cross_entropy, budget=0)
    assert snapshot(model) == before
