"""Recorder of a script's training: recorded calls give the losses and the gradients of the script itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from flatout.autotune import recorder
from flatout.autotune.recorder import RecordedUpdate, Recorder, linearized_loss, with_gradients_of_update


def _fail(error: Exception) -> None:
    raise error


@contextmanager
def recorded() -> Iterator[list[tuple[torch.optim.Optimizer, RecordedUpdate]]]:
    updates: list[tuple[torch.optim.Optimizer, RecordedUpdate]] = []
    with closing(Recorder(lambda *update: updates.append(update), _fail, _fail)) as recorder:
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: recorder.end_update(optimizer))
        try:
            yield updates
        finally:
            hook.remove()


class Net(nn.Module):
    """Network with two inputs, several outputs, and a submodule that the forward calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0, *, target: Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.body(x)) * scale
        out = self.head(hidden)
        loss = None if target is None else functional.cross_entropy(out, target)
        return {"out": out, "hidden": hidden, "note": "text", "loss": loss}


def unmoved(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that does not change the parameters."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)


X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def triple(net: Net) -> None:
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1])
    (functional.cross_entropy(net(X)["out"], Y, reduction="none") * mask).mean().backward()


def inside(net: Net) -> None:
    net(X, target=Y)["loss"].backward()


def mixup(net: Net) -> None:
    share = torch.rand(())
    out = net(share * X + (1 - share) * X.flip(0), 0.5)["out"]
    (share * functional.cross_entropy(out, Y) + (1 - share) * functional.cross_entropy(out, Y.flip(0))).backward()


def twice(net: Net) -> None:
    (functional.cross_entropy(net(X)["out"], Y) + net(2 * X)["hidden"].square().mean()).backward()


def chained(net: Net) -> None:
    state = torch.zeros(6, 4)
    for _ in range(3):
        state = state + net(X + state)["hidden"][:, :4]
    state.square().mean().backward()


def in_two_backwards(net: Net) -> None:
    outputs = net(X)
    outputs["out"].square().mean().backward(retain_graph=True)
    outputs["hidden"].square().mean().backward()


def accumulated(net: Net) -> None:
    for part in (slice(0, 3), slice(3, 6)):
        (functional.cross_entropy(net(X[part])["out"], Y[part]) / 2).backward()


def written_over(net: Net) -> None:
    x = X.clone()
    out = net(x)["out"]
    functional.cross_entropy(out, Y).backward()
    x.zero_()


def by_function(net: Net) -> None:
    torch.autograd.backward([functional.cross_entropy(net(X)["out"], Y), net(X)["hidden"].sum()])


STEPS: list[Callable[[Net], None]] = [
    triple, inside, mixup, twice, chained, in_two_backwards, accumulated, written_over, by_function
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_recorded_calls_have_the_gradients_of_the_script(step: Callable[[Net], None]) -> None:
    net = Net()
    optimizer = unmoved(net)
    with recorded() as updates:
        step(net)
        expected = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
    ((stepped, update),) = updates
    assert stepped is optimizer
    assert set(update.batches) == {net}
    net.zero_grad()
    for batch in update.batches[net]:
        linearized_loss(net, batch).backward()
    assert {name for name, p in net.named_parameters() if p.grad is not None} == expected.keys()
    for name, p in net.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name])


@pytest.mark.parametrize("step", [triple, inside, twice, chained, by_function, in_two_backwards])
def test_recorded_calls_have_the_loss_of_the_script(step: Callable[[Net], None]) -> None:
    net, losses = Net(), []
    optimizer = unmoved(net)
    backward = torch.autograd.backward
    with pytest.MonkeyPatch.context() as patch:

        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            losses.append(sum(float(t.detach()) for t in ([tensors] if isinstance(tensors, Tensor) else tensors)))
            backward(tensors, *args, **kwargs)

        patch.setattr(torch.autograd, "backward", noted)
        with recorded() as updates:
            step(net)
            optimizer.step()
    found = [linearized_loss(net, batch).item() for batch in updates[0][1].batches[net]]
    assert sum(found) == pytest.approx(sum(losses), rel=1e-5)


def test_an_optimizer_of_the_last_layer_has_the_scale_of_its_own_gradients() -> None:
    net = Net()
    optimizer = unmoved(net.head)
    with recorded() as updates:
        for _ in range(2):  # the gradients of the body are never cleared
            optimizer.zero_grad()
            triple(net)
            nn.utils.clip_grad_norm_(net.head.parameters(), 0.01)
            optimizer.step()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    batches = with_gradients_of_update(net, optimizer, updates[-1][1].batches[net])
    for gradient, parameter in zip(expected, net.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    net.zero_grad()
    for batch in batches:
        linearized_loss(net, batch).backward()
    for gradient, parameter in zip(expected[-2:], net.head.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_sparse_argument_is_recorded() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(4, 2))

        def forward(self, adjacency: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, self.kernel)

    net = Sparse()
    with recorded() as updates:
        for _ in range(2):
            net(torch.eye(4).to_sparse()).sum().backward()
            unmoved(net).step()
    assert [list(update.batches) for _, update in updates] == [[net], [net]]


def test_two_networks_with_two_optimizers_have_their_own_updates() -> None:
    torch.manual_seed(0)
    makes, judges = nn.Linear(2, 4), nn.Linear(4, 1)
    for_makes, for_judges = unmoved(makes), unmoved(judges)
    with recorded() as updates:
        for _ in range(2):
            for_judges.zero_grad()
            made = makes(torch.randn(8, 2))
            (judges(X).mean() - judges(made.detach()).mean()).backward()
            for_judges.step()
            judged = [p.grad.clone() for p in judges.parameters() if p.grad is not None]
            for_makes.zero_grad()
            judges(made).mean().backward()
            for_makes.step()
            made_with = [p.grad.clone() for p in makes.parameters() if p.grad is not None]
    assert [optimizer for optimizer, _ in updates] == 2 * [for_judges, for_makes]
    assert [list(update.batches) for _, update in updates] == 2 * [[judges], [makes]]
    for module, update, expected in ((judges, updates[2][1], judged), (makes, updates[3][1], made_with)):
        module.zero_grad()
        for batch in update.batches[module]:
            linearized_loss(module, batch).backward()
        for p, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)


def test_parts_of_a_model_with_several_optimizers_share_a_backward() -> None:
    first, second = nn.Linear(4, 8), nn.Linear(8, 3)
    optimizers = unmoved(first), unmoved(second)
    with recorded() as updates:
        functional.cross_entropy(second(first(X)), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [list(update.batches) for _, update in updates] == [[first], [second]]


def test_evaluation_frozen_modules_and_losses_are_not_recorded() -> None:
    net, frozen, loss_fn = Net(), Net().requires_grad_(False), nn.CrossEntropyLoss()
    optimizer = unmoved(net)
    with recorded() as updates:
        with torch.no_grad():
            net(X)
        loss_fn(net(X)["out"] + frozen(X)["out"], Y).backward()
        net(X)  # this call has no backward
        net.eval()(X)["out"].mean().backward()
        optimizer.step()
    ((_, update),) = updates
    assert {module: len(batches) for module, batches in update.batches.items()} == {net: 1}
    assert len(update.batches[net][0]["args"]) == 1


def test_calls_without_a_backward_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_BYTES", 5 * X.nbytes)
    net, other = Net(), Net()
    optimizer = unmoved(net, other)
    with recorded() as updates:
        waiting = [net(X)["out"] for _ in range(9)]
        (waiting[0] + other(X)["out"]).mean().backward()
        optimizer.step()
    ((_, update),) = updates
    assert set(update.batches) == {other}  # a call of the first optimizer is missing


def test_a_forked_child_records_nothing() -> None:
    net = Net()
    optimizer = unmoved(net)
    with recorded() as updates:
        inside(net)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                net(X)
                for hook in _global_optimizer_post_hooks.values():
                    hook(optimizer, (), {})
                status = len(updates)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
    assert len(updates) == 1


def test_torch_has_its_functions_back() -> None:
    before = nn.Module.__call__, torch.autograd.backward
    with recorded():
        assert nn.Module.__call__ is not before[0]
    assert (nn.Module.__call__, torch.autograd.backward) == before
