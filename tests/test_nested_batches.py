"""Batches of nested tensors, whose sizes are neither numbers nor comparable."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import flatout
from tests.jobs import NO_TECHNIQUES, QUICK
from tests.reasons import reasons


class Ragged(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(1 + i % 7, 8, generator=generator), i % 3


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.stack([part.mean(0) for part in torch.relu(self.embed(x)).unbind()]))


def make():
    def collate(samples):
        x, y = zip(*samples, strict=True)
        return torch.nested.nested_tensor(list(x), layout=torch.jagged), torch.tensor(y)

    torch.manual_seed(0)
    model = Pooled()
    loader = DataLoader(Ragged(), batch_size=16, collate_fn=collate)
    return model, loader, torch.optim.SGD(model.parameters(), lr=0.1)


def train(loader, update):
    return torch.stack([update(batch) for _ in range(2) for batch in loader])


def own(model, optimizer):
    def update(batch):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return update


def plain():
    model, loader, optimizer = make()
    return train(loader, own(model, optimizer))


def test_steps_are_tuned():
    model, loader, optimizer = make()
    run = flatout.optimize(model, loader, optimizer, cross_entropy, techniques=QUICK, budget=1.0, plan=None)
    torch.testing.assert_close(train(run.loader, run.step), plain(), rtol=1e-3, atol=1e-4)


def test_own_loops_are_tuned():
    model, loader, optimizer = make()
    model, loader = flatout.optimize(model, loader, optimizer, techniques=QUICK, budget=1.0, plan=None)
    torch.testing.assert_close(train(loader, own(model, optimizer)), plain(), rtol=1e-3, atol=1e-4)


def test_a_plan_fits_batches_of_other_lengths():
    model, loader, optimizer = make()
    plan = flatout.optimize(model, loader, optimizer, cross_entropy, techniques=NO_TECHNIQUES, budget=0).plan
    model, loader, optimizer = make()
    flatout.optimize(model, list(loader)[1:], optimizer, cross_entropy, plan=plan, budget=0)


@pytest.mark.parametrize("technique", ["compile", "torchscript"])
def test_forms_for_fixed_sizes_are_refused(technique):
    model, loader, optimizer = make()
    force = NO_TECHNIQUES | {technique: True}
    with pytest.raises(ValueError, match=technique) as caught:
        flatout.optimize(model, loader, optimizer, cross_entropy, techniques=force, budget=0)
    assert "nested-tensors" in reasons(str(caught.value))
