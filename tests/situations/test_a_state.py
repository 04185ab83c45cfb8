"""Kind A: a step writes more than weights, buffers and optimizer state."""

from __future__ import annotations

import collections
import csv
import logging
import queue
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

from tests.situations.harness import Start, Table, check, mlp, points, sgd, weights

KIND = Table()
SEEN = {"forwards": 0}


def classified(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def train(start: Start, model, loss=classified, epochs=14, **loader):
    """Train for 112 steps by default, and return the model's weights and the losses."""
    batches = DataLoader(points(), **({"batch_size": 16} | loader))
    model, batches, step = start(model, batches, sgd(model), loss)
    losses = [step(batch) for _ in range(epochs) for batch in batches]
    return {"weights": [*weights(model), torch.stack(losses)]}


@KIND.add()
def queue_of_momentum_contrast(start: Start):
    class Contrast:
        def __init__(self):
            self.keys, self.next = normalize(torch.randn(64, 4)), 0

        def __call__(self, model, batch):
            query = normalize(model(batch[0]))
            key = normalize(model(batch[0] + 0.1)).detach()
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.keys.T.clone()], 1)
            self.keys[self.next : self.next + len(key)] = key
            self.next = (self.next + len(key)) % 64
            return cross_entropy(logits / 0.2, torch.zeros(len(key), dtype=torch.long))

    contrast = Contrast()
    seen = train(start, mlp(), contrast, epochs=15)
    return {"weights": [*seen["weights"], contrast.keys], "next": contrast.next}


@KIND.add()
def mean_teacher_in_a_dict(start: Start):
    model = mlp()
    teacher = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(model, batch):
        with torch.no_grad():
            for name, p in model.named_parameters():
                teacher[name].mul_(0.9).add_(p, alpha=0.1)
            target = functional_call(model, teacher, batch[0])
        return classified(model, batch) + mse_loss(model(batch[0]), target)

    seen = train(start, model, loss)
    return {"weights": [*seen["weights"], *teacher.values()]}


@KIND.add()
def bank_of_features_in_numpy(start: Start):
    bank = np.zeros((128, 4), dtype=np.float32)
    written = np.zeros(128, dtype=np.int64)
    x, y = points().tensors
    model = mlp()

    def loss(model, batch):
        x, (y, index) = batch[0], batch[1].T
        out = model(x)
        old = torch.from_numpy(bank[index.numpy()])
        bank[index.numpy()] = 0.5 * bank[index.numpy()] + 0.5 * out.detach().numpy()
        written[index.numpy()] += 1
        return cross_entropy(out, y) + 0.1 * mse_loss(out, old)

    loader = DataLoader(TensorDataset(x, torch.stack([y, torch.arange(128)], 1)), batch_size=16, shuffle=True)
    model, loader, step = start(model, loader, sgd(model), loss)
    for _ in range(14):
        for batch in loader:
            step(batch)
    return {"weights": [*weights(model), torch.from_numpy(bank)], "written": written.tolist()}


@KIND.add()
def confusion_matrix_of_the_training(start: Start):
    confusion = torch.zeros(4, 4, dtype=torch.long)

    def loss(model, batch):
        x, y = batch
        out = model(x)
        confusion.index_put_((y, out.argmax(1)), torch.ones_like(y), accumulate=True)
        return cross_entropy(out, y)

    return train(start, mlp(), loss) | {"samples": confusion.sum().item(), "rows": confusion.sum(1).tolist()}


@KIND.add()
def counters_of_a_class_and_a_global(start: Start):
    class Net(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            Net.calls += 1
            SEEN["forwards"] += 1
            if Net.calls % 20 == 0:
                print("forward", Net.calls)
            return self.body(x)

    SEEN["forwards"] = 0
    return train(start, Net()) | {"calls": Net.calls, "forwards": SEEN["forwards"]}


@KIND.add()
def margin_from_the_last_losses(start: Start):
    last: collections.deque[float] = collections.deque(maxlen=12)
    margins = []

    def loss(model, batch):
        value = classified(model, batch)
        margin = sum(last) / len(last) if last else 1.0
        last.append(value.item())
        margins.append(margin)
        return value + 0.1 * (value - margin).relu()

    return train(start, mlp(), loss) | {"margins": len(margins), "last": len(last)}


@KIND.add()
def cache_of_encodings_with_statistics(start: Start):
    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.encodings: dict[int, torch.Tensor] = {}
            self.hits, self.misses = 0, 0

        def forward(self, x):
            if len(x) not in self.encodings:
                self.misses += 1
                self.encodings[len(x)] = torch.linspace(0, 1, len(x))[:, None] * torch.rand(())
            else:
                self.hits += 1
            return self.body(x + self.encodings[len(x)])

    model = Encoded()
    seen = train(start, model, batch_size=24)
    return seen | {"lengths": sorted(model.encodings), "hits": model.hits, "misses": model.misses}


@KIND.add()
def recurrent_state_kept_on_the_module(start: Start):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(8, 12), nn.Linear(12, 4)
            self.hidden, self.position = None, 0

        def forward(self, x):
            self.hidden = self.cell(x, None if self.hidden is None else self.hidden.detach())
            self.position += 1
            return self.head(self.hidden)

    model = Stateful()
    seen = train(start, model)
    return {"weights": [*seen["weights"], model.hidden.detach()], "position": model.position}


@KIND.add()
def center_of_self_distillation(start: Start):
    class Distill:
        def __init__(self):
            self.center, self.updates = torch.zeros(4), 0

        def __call__(self, model, batch):
            student = model(batch[0]) / 0.5
            teacher = model(batch[0] * 0.9).detach()
            target = ((teacher - self.center) / 0.3).softmax(1)
            self.center = 0.8 * self.center + 0.2 * teacher.mean(0)  # another tensor each time
            self.updates += 1
            return -(target * student.log_softmax(1)).sum(1).mean()

    distill = Distill()
    seen = train(start, mlp(), distill)
    return {"weights": [*seen["weights"], distill.center], "updates": distill.updates}


@KIND.add()
def warm_up_of_a_term_in_the_forward(start: Start):
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)
            self.step, self.beta = 0, 0.0

        def forward(self, x):
            mean, log_variance = self.encoder(x).chunk(2, 1)
            self.step += 1
            self.beta = min(1.0, self.step / 80)
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
            return self.decoder(mean), self.beta * kl

    def loss(model, batch):
        decoded, kl = model(batch[0])
        return mse_loss(decoded, batch[0]) + 0.1 * kl

    model = Variational()
    return train(start, model, loss) | {"step": model.step, "beta": model.beta}


@KIND.add()
def hook_that_writes_a_file(start: Start):
    model = mlp()
    path = start.folder / "activations.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)

        def note(module, args, output):
            rows.writerow([len(args[0]), output.shape[1]])

        handle = model[0].register_forward_hook(note)
        seen = train(start, model)
        handle.remove()
    return seen | {"rows": path.read_text().splitlines()}


@KIND.add()
def gradient_norms_by_tensor_hooks(start: Start):
    model, norms = mlp(), queue.Queue()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.put(p.grad.norm().item()))
    seen = train(start, model)
    return seen | {"norms": norms.qsize()}


@KIND.add()
def progress_in_a_logging_hook(start: Start):
    class Lines(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []

        def emit(self, record):
            self.lines.append(record.getMessage())

    @dataclass
    class Progress:
        step: int = 0
        samples: int = 0

    lines, progress, log = Lines(), Progress(), logging.getLogger("training")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    model = mlp()

    def advance(module, args):
        progress.step += 1
        progress.samples += len(args[0])
        if progress.step % 16 == 0:
            log.info("step %d", progress.step)

    model.register_forward_pre_hook(advance)
    seen = train(start, model)
    log.removeHandler(lines)
    return seen | {"lines": lines.lines, "progress": asdict(progress)}


@KIND.add()
def curriculum_inside_the_forward(start: Start):
    class Growing(nn.Module):
        """Shows one more feature every 14 calls."""

        def __init__(self):
            super().__init__()
            self.body, self.calls, self.history = mlp(), 0, []

        def forward(self, x):
            shown = min(8, 1 + self.calls // 14)
            if not self.history or self.history[-1] != shown:
                self.history.append(shown)
            self.calls += 1
            return self.body(x * (torch.arange(8) < shown))

    model = Growing()
    return train(start, model) | {"history": model.history, "calls": model.calls}


@KIND.cases()
def test_state_of_a_step(situation, form, way):
    check(situation, form, way)
