"""Kind F: trainings that rely on the memory layout of weights, gradients and batches."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.situations.harness import OWN_LOOP, Start, Table, check, images, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()
CHANNELS_LAST = {"channels_last": True}


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


def train(start: Start, model, between=None, loss=classified, optimizer=None, epochs=14):
    """Train, and call ``between(step)`` after each step."""
    optimizer = optimizer or sgd(model)
    model, loader, step = start(model, DataLoader(images(), batch_size=8), optimizer, loss)
    for number in range(epochs):
        for batch in loader:
            step(batch)
            if between:
                between(number)
    return {"weights": weights(model)}


def own_loop(start: Start, model, optimizer, before_update, epochs=14):
    """Train in a loop that calls ``before_update()`` between backward and step."""
    model, loader, _ = start(model, DataLoader(images(), batch_size=8), optimizer)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            before_update()
            optimizer.step()
    return {"weights": weights(model)}


@KIND.add(forced=CHANNELS_LAST)
def importance_of_weights_as_flat_vectors(start: Start):
    """Continual learning: a flat anchor of the weights pulls them back after each step."""
    model = convolutions()
    anchor = torch.cat([p.data.view(-1).clone() for p in model.parameters()])

    def pull(epoch):
        flat = torch.cat([p.data.view(-1) for p in model.parameters()])
        flat = flat + 0.01 * (anchor - flat)
        torch.nn.utils.vector_to_parameters(flat, model.parameters())

    return train(start, model, pull)


@KIND.add(forms=OWN_LOOP, forced=CHANNELS_LAST)
def gradients_of_two_tasks_projected(start: Start):
    model, last = convolutions(), []

    def project():
        flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
        if last and (dot := flat @ last[0]) < 0:
            flat = flat - dot / last[0].square().sum() * last[0]
        last[:] = [flat.clone()]
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view(p.shape))
            at += p.numel()

    return own_loop(start, model, sgd(model), project)


@KIND.add(forced=CHANNELS_LAST)
def weights_clipped_through_numpy(start: Start):
    """``reshape`` of a contiguous array is a view, and the script writes through it."""
    model = convolutions()

    def clip(epoch):
        for p in model.parameters():
            flat = p.detach().numpy().reshape(-1)
            np.clip(flat, -0.15, 0.15, out=flat)

    return train(start, model, clip) | {
        "clipped": all(float(p.detach().abs().max()) <= 0.16 for p in model.parameters())
    }


@KIND.add(forced=CHANNELS_LAST)
def weights_saved_and_loaded(start: Start):
    model, layouts = convolutions(), []

    def save(epoch):
        if epoch == 12:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "whole": model}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            layouts.extend(value.stride() for value in loaded["model"].values())
            layouts.extend(value.stride() for value in loaded["whole"].state_dict().values())

    return train(start, model, save) | {"layouts": layouts}


@KIND.add(forms=OWN_LOOP, forced=CHANNELS_LAST, tolerance=1e-2)
def quasi_newton_steps(start: Start):
    """LBFGS reads gradients by ``view(-1)``. With smaller batches it enlarges a rounding of 1e-7 to 1."""
    model = convolutions()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, history_size=4)
    model, loader, _ = start(model, DataLoader(images(), batch_size=64), None)  # flatout tunes no LBFGS
    for _ in range(40):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return {"weights": weights(model)}


@KIND.add(forced=CHANNELS_LAST)
def features_flattened_by_view(start: Start):
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 2)

        def forward(self, x):
            x = self.conv(x).relu()
            return self.head(x.view(x.size(0), -1))

    return train(start, Old())


@KIND.add(forced=CHANNELS_LAST)
def kernels_as_strided_matrices(start: Start):
    """An orthogonality term reads the kernels of the first layer as a matrix."""
    model = convolutions()

    def loss(model, batch):
        kernels = torch.as_strided(model[0].weight, (6, 27), (27, 1))
        return classified(model, batch) + 0.1 * (kernels @ kernels.T - torch.eye(6)).square().sum()

    return train(start, model, loss=loss)


@KIND.add(forced=CHANNELS_LAST)
def views_of_weights_from_before(start: Start):
    """The script decays weights through views that it took when it made the model."""
    model = convolutions()
    views = [module.weight.data.view(-1) for module in model if isinstance(module, nn.Conv2d)]

    def decay(epoch):
        for view in views:
            view.mul_(0.995)

    seen = train(start, model, decay)
    shared = [torch.equal(view, module.weight.data.view(-1)) for view, module in zip(views, model[::2], strict=False)]
    return seen | {"shared": shared}


@KIND.add(forced=CHANNELS_LAST)
def weights_in_one_flat_buffer(start: Start):
    model = convolutions()
    flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    average = flat.clone()

    def smooth(epoch):
        average.lerp_(flat, 0.1)
        if epoch % 3 == 2:
            flat.lerp_(average, 0.1)

    seen = train(start, model, smooth)
    return {"weights": [*seen["weights"], flat.clone(), average]}


@KIND.add(forced=CHANNELS_LAST)
def weights_in_shared_memory(start: Start):
    """Another process of the script would read the weights where they were shared."""
    model = convolutions().share_memory()
    places = [p.data_ptr() for p in model.parameters()]
    seen = train(start, model)
    same = [p.data_ptr() == place for p, place in zip(model.parameters(), places, strict=True)]
    return seen | {"shared": all(p.is_shared() for p in model.parameters()), "same": same}


@KIND.add(forced=CHANNELS_LAST)
def hooks_on_gradients_that_flatten(start: Start):
    model, norms = convolutions(), []
    for p in model.parameters():
        p.register_hook(lambda grad: norms.append(grad.view(-1).norm()) or grad * 0.9)
    seen = train(start, model)
    return {"weights": [*seen["weights"], torch.stack(norms[-6:])]}


@KIND.add(forced=CHANNELS_LAST)
def images_flattened_in_the_loop(start: Start):
    model, means = convolutions(), []
    model, loader, step = start(model, DataLoader(images(), batch_size=8), sgd(model), classified)
    for _ in range(14):
        for x, y in loader:
            means.append(x.view(len(x), -1).mean(1))
            step((x, y))
    return {"weights": [*weights(model), torch.stack(means)]}


@KIND.add(forced=CHANNELS_LAST)
def moments_read_as_flat_vectors(start: Start):
    model, norms = convolutions(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def log(epoch):
        norms.append(torch.cat([s["exp_avg"].view(-1) for s in optimizer.state.values()]).norm())

    seen = train(start, model, log, optimizer=optimizer)
    return {"weights": [*seen["weights"], torch.stack(norms)]}


@KIND.cases()
def test_memory_layout(situation, form, way):
    check(situation, form, way)
