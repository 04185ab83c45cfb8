"""Kind E: losses that are no mean over samples, where a batch is computed in parts."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, ctc_loss, mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

from tests.situations.harness import Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()
PARTS = {"batch_size": {"micro_batch": 8}}
IN_PARTS = {"forced": PARTS, "forced_forms": ("step",)}


def train(start: Start, model, loss, data=None, batch_size=32, epochs=14, lr=0.05, **arguments):
    loader = DataLoader(data or points(160), batch_size=batch_size)
    model, loader, step = start(model, loader, sgd(model, lr=lr), loss, **arguments)
    losses = [step(batch) for _ in range(epochs) for batch in loader]
    return {"weights": [*weights(model), torch.stack(losses)]}


@KIND.add(**IN_PARTS)
def hardest_triplets_of_the_batch(start: Start):
    def loss(model, batch):
        x, y = batch
        distances = torch.cdist(out := normalize(model(x)), out)
        same = y[:, None] == y
        positive = distances.masked_fill(~same, 0).amax(1)
        negative = distances.masked_fill(same, 9).amin(1)
        return (positive - negative + 0.5).relu().mean()

    return train(start, mlp(), loss)


@KIND.add(**IN_PARTS)
def normalization_written_by_hand(start: Start):
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            hidden = self.first(x)
            hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
            return self.second(hidden.relu())

    return train(start, Normalized(), classified)


@KIND.add(**IN_PARTS)
def characters_of_ctc(start: Start):
    lengths = torch.randint(1, 6, (160,))
    data = TensorDataset(torch.randn(160, 12, 6), torch.cat([torch.randint(1, 5, (160, 5)), lengths[:, None]], 1))

    def loss(model, batch):
        x, y = batch
        scores = model(x).log_softmax(2).transpose(0, 1)
        frames = torch.full((len(x),), 12)
        total = ctc_loss(scores, y[:, :5], frames, y[:, 5], reduction="sum")
        return total / y[:, 5].sum()

    return train(start, mlp(6, 16, 5), loss, data)


@KIND.add(**IN_PARTS)
def sum_over_the_batch(start: Start):
    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return train(start, mlp(), loss, lr=0.002)


@KIND.add(**IN_PARTS)
def two_towers_with_negatives_of_the_batch(start: Start):
    model = nn.ModuleDict({"text": mlp(4, 16, 6), "image": mlp(4, 16, 6)})

    def forward(x):
        return normalize(model["text"](x[:, :4])), normalize(model["image"](x[:, 4:]))

    model.forward = forward

    def loss(model, batch):
        text, image = model(batch[0])
        scores = text @ image.T / 0.3
        own = torch.arange(len(text))
        return (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2

    return train(start, model, loss)


@KIND.add(**IN_PARTS)
def variance_and_covariance_terms(start: Start):
    def loss(model, batch):
        first, second = model(batch[0]), model(batch[0] + 0.1)
        terms = mse_loss(first, second)
        for out in (first, second):
            terms = terms + (1 - out.std(0)).relu().mean()
            covariance = torch.cov(out.T)
            terms = terms + (covariance - torch.diag(covariance.diag())).square().sum() / 4
        return terms

    return train(start, mlp(), loss)


@KIND.add(**IN_PARTS)
def redundancy_reduction(start: Start):
    """Barlow twins: the cross-correlation over the batch should be the identity."""

    def loss(model, batch):
        first, second = model(batch[0]), model(batch[0].roll(1, 1))
        first, second = ((out - out.mean(0)) / (out.std(0) + 1e-3) for out in (first, second))
        return (first.T @ second / len(first) - torch.eye(4)).square().sum()

    return train(start, mlp(), loss)


@KIND.add(**IN_PARTS)
def weights_of_classes(start: Start):
    """The mean of a weighted cross-entropy divides by the weights of the batch."""
    balance = torch.tensor([0.1, 1.0, 3.0, 8.0])
    return train(start, mlp(), lambda model, batch: cross_entropy(model(batch[0]), batch[1], weight=balance))


@KIND.add(**IN_PARTS)
def dice_over_the_batch(start: Start):
    x = torch.randn(160, 8)
    data = TensorDataset(x, (x[:, :4] > 1).float())

    def loss(model, batch):
        x, y = batch
        p = (logits := model(x)).sigmoid()
        dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        return dice + 0.5 * binary_cross_entropy_with_logits(logits, y)

    return train(start, mlp(), loss, data)


@KIND.add(**IN_PARTS)
def samples_mixed_with_their_neighbors(start: Start):
    def loss(model, batch):
        x, y = batch
        logits = model(0.7 * x + 0.3 * x.flip(0))
        return 0.7 * cross_entropy(logits, y) + 0.3 * cross_entropy(logits, y.flip(0))

    return train(start, mlp(), loss)


@KIND.add(**IN_PARTS)
def correlation_as_the_loss(start: Start):
    x = torch.randn(160, 8)
    data = TensorDataset(x, x.square().sum(1))

    def loss(model, batch):
        score = model(batch[0]).squeeze(1)
        return 1 - torch.corrcoef(torch.stack([score, batch[1]]))[0, 1]

    return train(start, mlp(8, 16, 1), loss, data)


@KIND.add(**IN_PARTS)
def balanced_experts(start: Start):
    """The balancing term is a product of means over the batch."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.experts = nn.Linear(8, 3), nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

        def forward(self, x):
            gates = self.route(x).softmax(1)
            out = sum(gate[:, None] * expert(x) for gate, expert in zip(gates.unbind(1), self.experts, strict=True))
            return out, 3 * (gates.mean(0) * gates.square().mean(0)).sum()

    def loss(model, batch):
        logits, balance = model(batch[0])
        return cross_entropy(logits, batch[1]) + 0.5 * balance

    return train(start, Experts(), loss)


def accumulated(start: Start, model, loader, loss, weight, epochs=6):
    """Train with four batches per update: the weighted mean over them, as ``loss_weight`` promises."""
    optimizer = sgd(model)
    if start.form == "step":
        model, loader, step = start(model, loader, optimizer, loss, loss_weight=weight, accumulate=4)
        for _ in range(epochs):
            for batch in loader:
                step(batch)
        return model
    model, loader, _ = start(model, loader, optimizer)
    for _ in range(epochs):
        batches = list(loader)
        for first in range(0, len(batches), 4):
            part = batches[first : first + 4]
            optimizer.zero_grad()
            total = sum(weight(batch) for batch in part)
            for batch in part:
                (loss(model, batch) * weight(batch) / total).backward()
            optimizer.step()
    return model


@KIND.add()
def accumulation_over_unequal_batches(start: Start):
    """Batches of 8 to 15 samples: the update is the mean over samples."""
    order = torch.randperm(160).tolist()
    cuts = [0]
    while cuts[-1] < 160:
        cuts.append(min(160, cuts[-1] + 8 + len(cuts) % 8))
    loader = DataLoader(points(160), batch_sampler=[order[a:b] for a, b in itertools.pairwise(cuts)])
    model = accumulated(start, mlp(), loader, classified, lambda batch: len(batch[0]))
    return {"weights": weights(model)}


@KIND.add()
def masked_frames_in_accumulation_and_evaluation(start: Start):
    x = torch.randn(96, 10, 4)
    lengths = torch.arange(96) * 10 // 96 + 1
    mask = torch.arange(10) < lengths[:, None]
    target = torch.where(mask[..., None], x.cumsum(1), 0.0)
    data = TensorDataset(x, torch.cat([target, mask[..., None].float()], 2))

    def loss(model, batch):
        x, y = batch
        each = (model(x) - y[..., :4]).square().mean(2)
        return (each * y[..., 4]).sum() / y[..., 4].sum()

    def frames(batch):
        return batch[1][..., 4].sum()

    model = accumulated(start, mlp(4, 16, 4), DataLoader(data, batch_size=6), loss, frames)
    if start.form == "step":
        value = torch.tensor(start.run.evaluate(DataLoader(data, batch_size=10))["loss"])
    else:
        with torch.no_grad():
            value = loss(model, data.tensors)
    return {"weights": [*weights(model), value]}


@KIND.add(forms=("step",), refusable=True)
def memory_limit_with_a_loss_over_the_batch(start: Start):
    """A limit below the memory of a step must not change what the loss is."""

    def loss(model, batch):
        out = normalize(model(batch[0]))
        return torch.logsumexp(out @ out.T / 0.5, 1).mean()

    limit = {"memory_limit": 6_000_000} if start.form == "step" else {}
    seen = train(start, mlp(8, 1024, 8), loss, points(1024), batch_size=512, epochs=2, **limit)
    return seen


@KIND.cases()
def test_losses_in_parts(situation, form, way):
    check(situation, form, way)
