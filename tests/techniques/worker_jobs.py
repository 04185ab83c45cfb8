"""Loaders and jobs for tests of the technique ``workers``."""

import torch
from torch.utils.data import Dataset, get_worker_info

import flatout
from flatout.report.model import Pace
from tests.jobs import Net, job_of

FED = Pace(step_ms=10.0, load_ms=0.01, samples_per_second=100.0)
"""Pace of a loop that never waits for its loader."""


class Numbers(Dataset):
    """Samples of an index and of the worker that made the sample, -1 for the training process."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        worker = get_worker_info()
        return torch.full((8,), float(i)), -1 if worker is None else worker.id


def job_with(loader, device="cpu", **settings):
    """Return a job with a loader, and with one batch for trials."""
    batches = [(torch.randn(4, 8), torch.zeros(4))]
    return job_of(Net(), batches, loader=loader, compute_loss=mean_output, device=device, **settings)


def mean_output(model, batch):
    return model(batch[0]).mean()


def run_with(loader, **options):
    """Return the run of a loader, by rules unless ``options`` say otherwise."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(model, loader, opt, **{"compute_loss": mean_output, "budget": 0, **options})


def workers_of(loader):
    """Return the workers that made the samples of an epoch."""
    return {worker for _, made_by in loader for worker in made_by.tolist()}


def numbers_of(loader):
    """Return the indices of an epoch's samples."""
    return [number for x, _ in loader for number in x[:, 0].tolist()]
