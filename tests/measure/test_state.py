"""State.capture / restore: everything that training changes comes back bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.state import State
from tests.helpers import bits, snapshot


class Net(nn.Module):
    """Tied weights, BatchNorm, Dropout, a non-persistent buffer: what makes restoring hard."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(self.norm(self.first(x))))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    random.random()
    np.random.rand()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("on", [None, torch.device("cpu")])
@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restore_is_bit_exact(name, stepped_before, on):
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    if stepped_before:
        train(model, optimizer)
    before = snapshot(model, optimizer)
    state = State.capture([model], optimizer, on=on)

    for _ in range(2):
        train(model, optimizer)
        model.eval()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["added"] = 1
        assert snapshot(model, optimizer) != before
        state.restore()
        assert snapshot(model, optimizer) == before


def test_storage_identity_and_ties_survive():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    pointers = [p.data_ptr() for p in model.parameters()]
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    state = State.capture([model], optimizer)
    train(model, optimizer)
    model.last.weight = nn.Parameter(torch.zeros(6, 6))
    model.register_buffer("late", torch.zeros(1))
    state.restore()
    assert model.last.weight is model.first.weight
    assert "late" not in dict(model.named_buffers())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    for parameter, momentum in zip(model.parameters(), momenta, strict=True):
        assert optimizer.state[parameter]["momentum_buffer"] is momentum


def test_gradients_come_back_absent_or_with_their_bits():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.first.bias.grad = torch.full_like(model.first.bias, 7.0)
    grad = model.first.bias.grad
    state = State.capture([model], optimizer)
    train(model, optimizer)
    state.restore()
    assert model.first.bias.grad is grad
    assert bits(grad) == bits(torch.full_like(grad, 7.0))
    assert model.first.weight.grad is None


def test_nan_payloads_are_kept():
    model = nn.Linear(2, 2)
    odd = torch.tensor([0x7FC12345, 0xFFC00001], dtype=torch.uint32).view(torch.float32)
    with torch.no_grad():
        model.bias.copy_(odd)
    before = bits(model.bias)
    state = State.capture([model])
    with torch.no_grad():
        model.bias.zero_()
    state.restore()
    assert bits(model.bias) == before


def test_loader_generators_come_back():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=5, shuffle=True, generator=generator)
    state = State.capture([nn.Linear(1, 1)], loader=loader)
    first = [batch[0].tolist() for batch in loader]
    assert [batch[0].tolist() for batch in loader] != first
    state.restore()
    assert [batch[0].tolist() for batch in loader] == first


def test_backend_flags_come_back():
    state = State.capture([nn.Linear(1, 1)])
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.get_num_threads())
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not before[1]
    torch.set_num_threads(before[2] + 1)
    torch.use_deterministic_algorithms(True)
    state.restore()
    assert (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
    ) == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_parameters_from_elsewhere_come_back_too():
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    before = [bits(p) for p in head.parameters()]
    state = State.capture([model], optimizer)
    head(model(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert [bits(p) for p in head.parameters()] != before
    state.restore()
    assert [bits(p) for p in head.parameters()] == before
    assert head.weight.grad is None


def test_expanded_buffers_and_odd_optimizer_state_are_legal():
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.zeros(3, 1).expand(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["k"] = 3
    state = State.capture([model], optimizer)
    model.wide[:, :1].fill_(7)
    optimizer.state["k"] = 4
    state.restore()
    assert model.wide.sum() == 0
    assert optimizer.state["k"] == 3


def test_sparse_gradients_and_moments_come_back():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    gradient, moment = model.weight.grad, optimizer.state[model.weight]["momentum_buffer"]
    before = [bits(t) for t in (model.weight, gradient, moment)]
    state = State.capture([model], optimizer)
    model(torch.tensor([0, 2])).square().sum().backward()
    optimizer.step()
    state.restore()
    assert model.weight.grad is gradient
    assert optimizer.state[model.weight]["momentum_buffer"] is moment
    assert [bits(t) for t in (model.weight, gradient, moment)] == before


def test_the_newer_precision_flags_are_no_obstacle():
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        State.capture([nn.Linear(1, 1)]).restore()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_generators_of_the_dataset_come_back():
    class Noisy(TensorDataset):
        def __init__(self):
            super().__init__(torch.arange(4.0))
            self.noise = np.random.default_rng(0)

        def __getitem__(self, i):
            return self.noise.random()

    loader = DataLoader(Noisy(), batch_size=2)
    state = State.capture([nn.Linear(1, 1)], loader=loader)
    first = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loader] != first
    state.restore()
    assert [batch.tolist() for batch in loader] == first
