"""Kind D: what a training changes after its model was compiled or traced."""

from __future__ import annotations

import random
import types

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils.data import DataLoader

from tests.situations.harness import OWN_LOOP, Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()
COMPILED = {"compile": True}
TRACED = {"torchscript": "trace"}
SCRIPTED = {"torchscript": "script"}

CHANGED = 70
"""Step after which the training changes its model. ``flatout run`` has tuned by then."""


def train(start: Start, model, change=None, loss=classified, steps=110, optimizer=None):
    """Train, and call ``change(step)`` before each step."""
    optimizer = optimizer or sgd(model)
    model, batches, step = start(model, DataLoader(points(), batch_size=16), optimizer, loss)
    losses, number = [], 0
    while number < steps:
        for batch in batches:
            if change:
                change(number)
            losses.append(step(batch))
            number += 1
    return {"weights": [*weights(model), torch.stack(losses)]}


@KIND.add(forced=COMPILED)
def noise_by_numpy_in_the_forward(start: Start):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x * (1 + np.random.normal(0, 0.3)))

    return train(start, Noisy())


@KIND.add(forced=COMPILED)
def branch_by_random_choice(start: Start):
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

        def forward(self, x):
            return random.choice(self.branches)(x)

    return train(start, Choosing())


@KIND.add(forced=TRACED)
def teacher_forcing_by_a_coin(start: Start):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = x[:, :4]
            for _ in range(3):
                hidden = self.cell(x[:, 4:] if random.random() < 0.9 else hidden, hidden)
            return self.head(hidden)

    return train(start, Decoder())


@KIND.add(forced=COMPILED)
def hook_removed_later(start: Start):
    model = mlp()
    handle = model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    return train(start, model, lambda step: handle.remove() if step == CHANGED else None)


@KIND.add(forced=COMPILED)
def pre_hook_exchanged_later(start: Start):
    model, counts = mlp(), {"first": 0, "second": 0}

    def first(module, args):
        counts["first"] += 1

    def second(module, args):
        counts["second"] += 1
        return (args[0].clamp(-1, 1),)

    handle = model[2].register_forward_pre_hook(first)

    def change(step):
        if step == CHANGED:
            handle.remove()
            model[2].register_forward_pre_hook(second)

    return train(start, model, change) | {"counts": counts}


@KIND.add(forced=COMPILED)
def layers_thawed_one_after_the_other(start: Start):
    model = nn.Sequential(mlp(8, 12, 12), mlp(12, 12, 12), nn.Linear(12, 4))
    for part in model[:2]:
        part.requires_grad_(False)

    def change(step):
        if step in (CHANGED, CHANGED + 16):
            model[1 if step == CHANGED else 0].requires_grad_(True)

    return train(start, model, change) | {"grads": [p.grad is not None for p in model.parameters()]}


@KIND.add(forced=COMPILED)
def normalization_frozen_later(start: Start):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def change(step):
        if step == CHANGED:
            model[1].eval()

    seen = train(start, model, change)
    return seen | {"tracked": model[1].num_batches_tracked.item()}


@KIND.add(forced=COMPILED)
def head_replaced_later(start: Start):
    model = nn.Sequential(mlp(8, 12, 12), nn.Linear(12, 4))
    optimizer = sgd(model)

    def change(step):
        if step == CHANGED:
            model[1] = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))
            optimizer.add_param_group({"params": list(model[1].parameters())})

    return train(start, model, change, optimizer=optimizer)


@KIND.add(forced=COMPILED)
def temperature_annealed_by_the_loop(start: Start):
    class Gumbel(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.head, self.temperature = nn.Linear(8, 4), nn.Linear(4, 4), 2.0

        def forward(self, x):
            return self.head((self.route(x) / self.temperature).softmax(1))

    model = Gumbel()

    def change(step):
        model.temperature = max(0.3, model.temperature * 0.98)

    return train(start, model, change)


@KIND.add(forced=SCRIPTED)
def flag_of_a_scripted_model(start: Start):
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.skip = nn.Linear(8, 8), nn.Linear(8, 4), False

        def forward(self, x):
            if self.skip:
                return self.second(x)
            return self.second(torch.tanh(self.first(x)))

    model = Skipping()
    return train(start, model, lambda step: setattr(model, "skip", step >= CHANGED and step % 2 == 0))


@KIND.add(forms=OWN_LOOP, forced=COMPILED)
def inner_step_of_meta_learning(start: Start):
    """After a warm-up, the loss is that of weights one differentiable step ahead."""
    model, losses, number = mlp(), [], 0
    optimizer = sgd(model)
    model, loader, _ = start(model, DataLoader(points(), batch_size=16), optimizer)
    for _ in range(12):
        for batch in loader:
            optimizer.zero_grad()
            loss = classified(model, batch)
            if number >= CHANGED:
                names, values = zip(*model.named_parameters(), strict=True)
                grads = torch.autograd.grad(loss, values, create_graph=True)
                ahead = {n: p - 0.1 * g for n, p, g in zip(names, values, grads, strict=True)}
                loss = cross_entropy(functional_call(model, ahead, batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            number += 1
    return {"weights": [*weights(model), torch.stack(losses)]}


@KIND.add(forms=OWN_LOOP, forced=COMPILED)
def two_backwards_through_one_graph(start: Start):
    """Two losses share the forward, and the norm of the first one's gradient scales the second."""
    model = nn.Sequential(mlp(8, 16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer, norms = sgd(model), []
    model, loader, _ = start(model, DataLoader(points(), batch_size=16), optimizer)
    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            cross_entropy(out, y).backward(retain_graph=True)
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            (0.01 / (1 + norm) * out.square().mean()).backward()
            norms.append(norm)
            optimizer.step()
    return {"weights": [*weights(model), torch.stack(norms)]}


@KIND.add(forms=OWN_LOOP, forced=COMPILED)
def gradients_per_sample_later(start: Start):
    """Differential privacy: after a warm-up, gradients of single samples are clipped and averaged."""
    model = mlp()
    optimizer, number = sgd(model), 0
    model, loader, _ = start(model, DataLoader(points(), batch_size=16), optimizer)

    def one(params, x, y):
        return cross_entropy(functional_call(model, params, x[None]), y[None])

    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            if number < CHANGED:
                cross_entropy(model(x), y).backward()
            else:
                params = {name: p.detach() for name, p in model.named_parameters()}
                grads = vmap(grad(one), in_dims=(None, 0, 0))(params, x, y)
                for name, p in model.named_parameters():
                    p.grad = grads[name].clamp(-0.1, 0.1).mean(0)
            optimizer.step()
            number += 1
    return {"weights": weights(model)}


@KIND.add(forced=COMPILED)
def weights_tied_later(start: Start):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def change(step):
        if step == CHANGED:
            model[2].weight = model[0].weight

    return train(start, model, change) | {"tied": model[2].weight is model[0].weight}


@KIND.add(forced=COMPILED)
def pruning_in_the_middle(start: Start):
    model = mlp(8, 16, 4)

    def change(step):
        if step == CHANGED:
            prune.l1_unstructured(model[0], "weight", amount=0.5)
        if step == CHANGED + 24:
            prune.remove(model[0], "weight")

    return train(start, model, change) | {"zeros": (model[0].weight == 0).sum().item()}


@KIND.add(forced=COMPILED)
def parametrization_registered_later(start: Start):
    model = mlp(8, 16, 4)
    optimizer = sgd(model)

    def change(step):
        if step == CHANGED:
            parametrizations.weight_norm(model[0])
            optimizer.add_param_group({"params": list(model[0].parametrizations.weight.parameters())})
        if step == CHANGED + 24:
            remove_parametrizations(model[0], "weight")

    return train(start, model, change, optimizer=optimizer)


@KIND.add(forced=COMPILED)
def forward_replaced_on_the_instance(start: Start):
    model = nn.Sequential(mlp(8, 12, 12), nn.Linear(12, 4))

    def scaled(self, x):
        return nn.Linear.forward(self, x) * 0.5

    def change(step):
        if step == CHANGED:
            model[1].forward = types.MethodType(scaled, model[1])

    return train(start, model, change)


@KIND.add(forced=COMPILED)
def forward_that_warms_up(start: Start):
    class Warming(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate, self.calls = mlp(), nn.Parameter(torch.zeros(4)), 0

        def forward(self, x):
            self.calls += 1
            out = self.body(x)
            return out if self.calls <= CHANGED else out * self.gate.exp()

    model = Warming()
    return train(start, model) | {"calls": model.calls}


@KIND.add(forced=COMPILED)
def activations_read_by_a_late_backward_hook(start: Start):
    """Saliency: a full backward hook of a layer, for eight steps in the middle."""
    model, norms, handles = mlp(), [], []

    def change(step):
        if step == CHANGED:
            handles.append(model[0].register_full_backward_hook(lambda m, _, grads: norms.append(grads[0].norm())))
        if step == CHANGED + 8:
            handles.pop().remove()

    seen = train(start, model, change)
    return {"weights": [*seen["weights"], torch.stack(norms)] if norms else [], "hooked": len(norms)}


@KIND.cases()
def test_frozen_behavior(situation, form, way):
    check(situation, form, way)
