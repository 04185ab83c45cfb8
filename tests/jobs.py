"""Small jobs for tests of optimize: models, data, loops."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from flatout.techniques import REGISTRY, Measured
from flatout.training.job import Job, JobData
from flatout.training.spec import Spec

NO_TECHNIQUES = {technique.name: False for technique in REGISTRY if isinstance(technique, Measured)}
"""Value of ``techniques`` that forbids everything that optimize can choose."""


def only(*names):
    """Return ``techniques`` that forbid all techniques except these."""
    return {name: False for name in NO_TECHNIQUES if name not in names}


QUICK = {"compile": False, "precision": False, "workers": False}
"""Value of ``techniques`` that forbids slow trials. compile and precision have their own tests."""

FORCED = {"compile": False, "workers": False, "precision": "bf16", "fused_optimizer": True, "in_memory": True}
"""Value of ``techniques`` that forces all fast techniques, so that nothing is measured."""

FORCED_IN_OWN_LOOP = {name: value for name, value in FORCED.items() if name != "fused_optimizer"}
"""Value of ``techniques`` that forces all fast techniques in a user's own loop."""


class Net(nn.Module):
    """Model with BatchNorm and Dropout, whose state shows side effects of trials."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


def make_data(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class SlowSamples(Dataset):
    """Deterministic map-style dataset with Python code for each sample."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([float(i + k) for k in range(8)]), i % 3


class Stream(IterableDataset):
    """Stream that yields each sample once over all iterators."""

    def __init__(self, n):
        self.left = iter(range(n))

    def __iter__(self):
        for i in self.left:
            yield torch.full((8,), float(i)), i % 3


def make_job(optimizer=torch.optim.Adam, **changes):
    torch.manual_seed(0)
    model = Net()
    opt = optimizer(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True, **changes)
    return model, loader, opt


def job_of(
    model, batches=(), optimizer=None, *, loader=None, loss_fn=None, compute_loss=None, device="cpu", **settings
):
    """Return the internal ``Job`` that ``optimize`` makes of its arguments, with these batches for trials."""
    loader = batches if loader is None else loader
    functions = {"loss_fn": loss_fn, "compute_loss": compute_loss}
    spec = Spec(model, loader, torch.device(device), optimizer, **functions, **{"lr_rule": "none"} | settings)
    job = Job(spec, JobData(loader, loader, spec.expected_steps or 0, list(batches)))
    job.objective.has_loss = spec.optimizer is not None or loss_fn is not None or compute_loss is not None
    return job


def tried(model, loader, *given, **settings):
    """Return a run whose trial steps were taken and reverted. The run measures nothing."""
    techniques = NO_TECHNIQUES | {"cpu_threads": torch.get_num_threads()}  # the current number of threads
    return flatout.optimize(model, loader, *given, techniques=techniques, budget=0, **settings)


def loss_of(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y)


def train(model, loader, opt, epochs=1, compute_loss=loss_of):
    """Train in a plain PyTorch loop, and return the losses."""
    losses = []
    for _ in range(epochs):
        for batch in loader:
            opt.zero_grad()
            loss = compute_loss(model, batch)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}
