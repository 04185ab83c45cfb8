"""Snapshot.capture and restore: everything that training changes is restored bit for bit."""

import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, TensorDataset

from flatout.core.snapshot import Snapshot
from tests.helpers import bits, snapshot


class Net(nn.Module):
    """Module that is hard to restore: tied weights, BatchNorm, Dropout, a non-persistent buffer."""

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
    state = Snapshot.capture([model], optimizer, on=on)

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
    state = Snapshot.capture([model], optimizer)
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
    state = Snapshot.capture([model], optimizer)
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
    state = Snapshot.capture([model])
    with torch.no_grad():
        model.bias.zero_()
    state.restore()
    assert bits(model.bias) == before


def test_loader_generators_come_back():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=5, shuffle=True, generator=generator)
    state = Snapshot.capture([nn.Linear(1, 1)], loader=loader)
    first = [batch[0].tolist() for batch in loader]
    assert [batch[0].tolist() for batch in loader] != first
    state.restore()
    assert [batch[0].tolist() for batch in loader] == first


def test_backend_flags_come_back():
    state = Snapshot.capture([nn.Linear(1, 1)])
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
    state = Snapshot.capture([model], optimizer)
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
    state = Snapshot.capture([model], optimizer)
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
    state = Snapshot.capture([model], optimizer)
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
        Snapshot.capture([nn.Linear(1, 1)]).restore()
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
    state = Snapshot.capture([nn.Linear(1, 1)], loader=loader)
    first = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loader] != first
    state.restore()
    assert [batch.tolist() for batch in loader] == first


class Noise(nn.Module):
    """Module that draws from its own generators, one of each kind."""

    def __init__(self, depth=0):
        super().__init__()
        self.below = Noise(depth - 1) if depth else None
        self.own = torch.Generator().manual_seed(1)
        self.kept = {"python": random.Random(2), "numpy": [np.random.default_rng(3), np.random.RandomState(4)]}
        self.system = random.SystemRandom()  # has no state

    def forward(self, x):
        drawn = torch.rand((), generator=self.own).item() + self.kept["python"].random()
        drawn += sum(generator.random() for generator in self.kept["numpy"])
        return x * drawn if self.below is None else self.below(x) * drawn


def test_generators_of_modules_come_back_however_deep():
    model = nn.Sequential(*[nn.Identity() for _ in range(70)], Noise(depth=8))
    state = Snapshot.capture([model])
    first = model(torch.ones(1))
    assert model(torch.ones(1)) != first
    state.restore()
    assert model(torch.ones(1)) == first


def test_generators_of_the_loss_and_of_the_optimizer_come_back():
    generator, held = torch.Generator(), random.Random(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.noise = random.Random(1)  # reachable only from the optimizer

    def compute_loss(model, batch):
        return torch.rand((), generator=generator).item() + held.random()

    state = Snapshot.capture([model], optimizer, code=[compute_loss])
    first = compute_loss(model, None), optimizer.noise.random()
    assert compute_loss(model, None) != first[0]
    assert optimizer.noise.random() != first[1]
    state.restore()
    assert (compute_loss(model, None), optimizer.noise.random()) == first


class Lookahead(torch.optim.Optimizer):
    """Optimizer that wraps another one and keeps slow weights in attributes, as common implementations do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = {"weights": [p.detach().clone() for group in self.param_groups for p in group["params"]]}
        self.queue = deque([torch.zeros(2)], maxlen=3)
        self.updated = set()
        self.norms = np.zeros(2)
        self.itself = {"optimizer": self}

    def step(self, closure=None):
        self.optimizer.step()
        weights = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(weights):
            slow = self.slow["weights"][i].add_(p.detach(), alpha=0.5)
            if i == 0:
                self.slow["weights"][i] = slow.clone()
        self.slow["late"] = torch.ones(1)
        self.queue.append(self.queue[0].add_(1).clone())
        self.updated.add(len(self.updated))
        self.norms += 1
        self.count = len(self.updated)


def test_tensors_in_attributes_of_an_optimizer_come_back():
    model = Net()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = Lookahead(inner)
    train(model, optimizer)
    objects = list(optimizer.slow["weights"])

    def picture():
        tensors = [*optimizer.slow["weights"], *optimizer.queue]
        tensors += [value for entry in inner.state.values() for value in entry.values()]
        return [bits(t) for t in tensors], list(optimizer.slow), optimizer.updated.copy(), optimizer.norms.tolist()

    before, state = picture(), Snapshot.capture([model], optimizer)
    for _ in range(2):
        train(model, optimizer)
        assert picture() != before
        state.restore()
        assert picture() == before
    assert all(new is old for new, old in zip(optimizer.slow["weights"], objects, strict=True))
    assert optimizer.count == len(optimizer.updated)


def test_objects_and_lists_in_the_state_of_an_optimizer_come_back():
    class Preconditioner:
        def __init__(self):
            self.statistics = [torch.zeros(2)]

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, history = Preconditioner(), [torch.zeros(1)]
    optimizer.state[model.weight] = {"preconditioner": kept, "history": history}
    state = Snapshot.capture([model], optimizer)
    kept.statistics[0].add_(1)
    kept.statistics.append(torch.ones(2))
    history[0] += 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    state.restore()
    assert optimizer.state[model.weight] == {"preconditioner": kept, "history": history}
    assert len(kept.statistics) == len(optimizer.param_groups) == 1
    assert kept.statistics[0].sum() == history[0] == 0


class Observer(nn.Module):
    """Module that resizes a buffer in its first forward, as observers of ``torch.ao.quantization`` do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("min_val", torch.tensor([]))
        self.register_buffer("shrinks", torch.arange(6.0))
        self.register_buffer("is_set", torch.arange(4.0))
        self.register_buffer("is_replaced", torch.arange(4.0))
        self.register_buffer("has_other_data", torch.arange(4.0))
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        self.min_val.resize_(x.shape).copy_(x)
        self.shrinks.resize_(2).fill_(7)
        self.is_set.set_(torch.zeros(9))
        self.is_replaced = torch.zeros(5)
        self.has_other_data.data = torch.zeros(3, 3, dtype=torch.float64)
        self.weight.data = torch.zeros(8)
        return x


def test_buffers_that_forward_resizes_come_back_with_their_memory():
    model = Observer()
    tensors = [*model.buffers(), *model.parameters()]
    view = model.shrinks[2:]
    before = snapshot(model)
    state = Snapshot.capture([model])
    for size in (4, 9):
        model(torch.ones(size))
        state.restore()
        assert snapshot(model) == before
        assert all(new is old for new, old in zip((*model.buffers(), *model.parameters()), tensors, strict=True))
        assert view.data_ptr() == model.shrinks[2:].data_ptr()


def test_swapped_parameters_come_back():
    model = nn.Linear(2, 2)
    before, weight = bits(model.weight), model.weight
    state = Snapshot.capture([model])
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(5, dtype=torch.float64), requires_grad=False))
    state.restore()
    assert model.weight is weight
    assert (bits(weight), weight.dtype, weight.requires_grad) == (before, torch.float32, True)


def test_a_freshly_prepared_quantized_model_comes_back():
    model = nn.Sequential(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        torch.ao.quantization.prepare_qat(model, inplace=True)
    before, state = snapshot(model), Snapshot.capture([model])
    model(torch.randn(2, 4))
    assert snapshot(model) != before
    state.restore()
    assert snapshot(model) == before


def test_lazy_parameters_are_uninitialized_again():
    layer = nn.LazyLinear(2)
    state = Snapshot.capture([layer])
    weight = layer.weight
    weight.materialize((2, 3))
    state.restore()
    assert layer.weight is weight
    assert is_lazy(weight)


@pytest.mark.parametrize("captured_there", [True, False])
def test_buffers_made_in_inference_mode_come_back(captured_there):
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        model.register_buffer("count", torch.zeros(2))
        model.register_buffer("wide", torch.zeros(1).expand(3))
    with torch.inference_mode(captured_there):
        state = Snapshot.capture([model])
    with torch.inference_mode():
        model.count += 1
        model.wide[:1].fill_(7)
    state.restore()
    assert model.count.sum() == model.wide.sum() == 0


def test_modes_of_the_process_come_back():
    state = Snapshot.capture([])
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    state.restore()
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


class Stuck(nn.Module):
    """Module that frees the memory of its buffers, which cannot be allocated again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.zeros(2))

    def forward(self, x):
        for buffer in self.buffers():
            buffer.resize_(0).untyped_storage().resize_(0)
            buffer.numpy()
        return x


def test_restoring_continues_after_a_failure():
    stuck, model = Stuck(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = snapshot(model, optimizer)
    state = Snapshot.capture([stuck, model], optimizer)
    stuck(torch.ones(1))
    train(model, optimizer)
    model.eval()
    torch.set_num_threads(torch.get_num_threads() + 1)
    with pytest.raises(RuntimeError, match="resiz") as failed:
        state.restore()
    assert len(failed.value.__notes__) == 1
    assert snapshot(model, optimizer) == before
