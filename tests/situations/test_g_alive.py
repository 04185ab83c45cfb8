"""Kind G: what stays alive during and after trainings."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from tests.situations.harness import OWN_LOOP, Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()


def alive(kind: type) -> int:
    """Return the number of objects of a class, garbage excluded."""
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


def train(start: Start, model, optimizer=None, epochs=2, loss=classified, data=None):
    optimizer = optimizer or sgd(model)
    model, loader, step = start(model, DataLoader(data or points(), batch_size=16), optimizer, loss)
    for _ in range(epochs):
        for batch in loader:
            step(batch)
    return model


@KIND.add(budget=0.1)
def models_trained_one_after_the_other(start: Start):
    """A search over widths keeps the numbers, and drops the models."""
    before, ends, models = alive(nn.Module), [], []
    for width in range(4, 16):
        model = train(start, mlp(8, width), epochs=8)
        ends.append(float(model[2].bias.sum()) < 100)
        models.append(weakref.ref(model))
        del model
    start.run = None
    gc.collect()
    return {
        "ends": ends,
        "alive": sum(model() is not None for model in models) > 1,
        "modules": alive(nn.Module) - before > 8,
    }


@KIND.add(forms=OWN_LOOP, budget=0.1)
def a_new_optimizer_in_each_epoch(start: Start):
    model = mlp()
    before = alive(torch.optim.Optimizer)
    optimizer = sgd(model)
    model, loader, _ = start(model, DataLoader(points(), batch_size=16), optimizer)
    for epoch in range(20):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.1 * (epoch % 5))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"weights": weights(model), "optimizers": alive(torch.optim.Optimizer) - before > 2}


@KIND.add(budget=0.1)
def folds_of_a_cross_validation(start: Start):
    dead = []
    for fold in range(5):
        torch.manual_seed(fold)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        train(start, model, optimizer, epochs=8)
        gone = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        start.run = None
        gc.collect()
        dead.append(gone)
    del gone
    train(start, mlp(), epochs=8)  # the next training may release what the last one used
    start.run = None
    gc.collect()
    return {"dead": [one() is None for gone in dead for one in gone]}


@KIND.add(forms=("run",))
def a_thousand_inner_optimizers(start: Start):
    """Test-time adaptation: each task copies a layer and makes an optimizer."""
    model, x = mlp(), points().tensors[0]
    counts = []
    for task in range(1000):
        head = nn.Linear(4, 1)
        head.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
        inner = torch.optim.SGD(head.parameters(), lr=0.1)
        inner.zero_grad()
        mse_loss(head(model(x[:8]).detach()), x[:8, :1]).backward()
        inner.step()
        if task in (500, 999):
            counts.append((alive(torch.optim.Optimizer), alive(nn.Linear), alive(torch.Tensor)))
    return {"growth": [last - first > 40 for first, last in zip(*counts, strict=True)]}


@KIND.add(forms=OWN_LOOP)
def closures_that_hold_a_large_batch(start: Start):
    model = mlp()
    optimizer = sgd(model)
    model, loader, _ = start(model, DataLoader(points(), batch_size=16), optimizer)
    held = []
    for _ in range(12):
        for x, y in loader:
            large = x.repeat(50, 1)
            held.append(weakref.ref(large))

            def closure(large=large, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(model(large), y.repeat(50))
                loss.backward()
                return loss

            optimizer.step(closure)
    del large, closure
    gc.collect()
    return {"weights": weights(model), "held": sum(one() is not None for one in held) > 2}


@KIND.add()
def model_that_must_die(start: Start):
    model, buffer = mlp(), torch.zeros(1000)
    model.register_buffer("buffer", buffer)
    train(start, model, epochs=14)
    ends = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(buffer)]
    del model, buffer
    start.run = None
    gc.collect()
    return {"dead": [end() is None for end in ends]}


@KIND.add()
def everything_as_it_was_after_undo(start: Start):
    def state():
        return {
            "class": type(model),
            "forward": "forward" in vars(model) or any("forward" in vars(one) for one in model.modules()),
            "hooks": [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()],
            "step": type(optimizer).step is torch.optim.SGD.step,
            "instance": sorted(name for name in vars(optimizer) if "flatout" in name),
            "attributes": sorted(vars(model)),
            "call": nn.Module.__call__.__qualname__,
            "backward": torch.autograd.backward.__module__,
            "iter": DataLoader.__iter__.__qualname__,
        }

    model = mlp()
    optimizer = sgd(model)
    train(start, model, optimizer, epochs=14)
    start.undo(model)
    return {"weights": weights(model)} | state()


@KIND.add()
def memory_over_epochs(start: Start):
    model = mlp()
    model, loader, step = start(model, DataLoader(points(), batch_size=16), sgd(model), classified)
    objects, tensors = [], []
    for epoch in range(120):
        for batch in loader:
            step(batch)
        if epoch in (60, 119):
            tensors.append(alive(torch.Tensor))
            objects.append(len(gc.get_objects()))
    return {"tensors": tensors[1] - tensors[0] > 10, "objects": objects[1] - objects[0] > 300}


@KIND.add()
def batches_and_graphs_of_the_past(start: Start):
    model, outs, inputs = mlp(), [], []

    def loss(model, batch):
        out = model(batch[0])
        outs.append(weakref.ref(out))
        inputs.append(weakref.ref(batch[0]))
        return cross_entropy(out, batch[1])

    train(start, model, epochs=14, loss=loss)
    del outs[-2:], inputs[-2:]
    gc.collect()
    return {"outs": sum(o() is not None for o in outs) > 4, "inputs": sum(i() is not None for i in inputs) > 4}


@KIND.add(budget=2)
def epochs_left_after_a_batch(start: Start):
    model = mlp()
    model, loader, step = start(model, DataLoader(points(), batch_size=16, shuffle=True), sgd(model), classified)
    threads, children = [], []
    for epoch in range(120):
        for batch in loader:
            step(batch)
            break
        if epoch in (20, 60, 119):
            gc.collect()
            threads.append(threading.active_count())
            children.append(len(multiprocessing.active_children()))
    return {"weights": weights(model), "threads": threads[2] > threads[1], "children": children[2] > children[1]}


@KIND.add(forms=("run",))
def backwards_whose_update_comes_rarely(start: Start):
    """One update for 150 batches: what is recorded until then must stay bounded."""
    model = mlp(64, 64, 64)
    optimizer, x = sgd(model), torch.randn(32, 64)
    counts = []
    for number in range(450):
        mse_loss(model(x), x).backward()
        if number in (100, 149, 400, 449):
            counts.append(alive(torch.Tensor))
        if number % 150 == 149:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(model), "growth": [counts[1] - counts[0] > 100, counts[3] - counts[2] > 100]}


@KIND.add(forms=OWN_LOOP, budget=0.1)
def discriminators_that_are_replaced(start: Start):
    generator, dead = mlp(4, 16, 8), []
    of_generator = sgd(generator)
    real = points().tensors[0][:16]
    generator, _, _ = start(generator, DataLoader(points(64, 4), batch_size=16), of_generator)
    for _ in range(12):
        critic = mlp(8, 16, 1)
        of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
        dead.append((weakref.ref(critic), weakref.ref(of_critic)))
        for _ in range(10):
            fake = generator(torch.randn(16, 4))
            of_critic.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(fake).mean()).backward()
            of_generator.step()
    del critic, of_critic, fake
    gc.collect()
    return {"weights": weights(generator), "alive": sum(one() is not None for pair in dead for one in pair) > 2}


@KIND.cases()
def test_what_stays_alive(situation, form, way):
    check(situation, form, way)
