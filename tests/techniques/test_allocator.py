"""Expandable segments are advised where shapes vary on a GPU, and nowhere else."""

import pytest
import torch
from torch import nn

from flatout.job import Job
from flatout.techniques import NotApplicable
from flatout.techniques.allocator import SETTINGS, Allocator


@pytest.fixture
def gpu(monkeypatch):
    """What torch tells of an allocator; the retries may be changed."""
    stats = {"num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return stats


def job_of(*lengths, device="cuda"):
    job = Job(nn.Linear(2, 2), [], [], None, None, None, torch.device(device))
    job.batches = [torch.randn(4, length) for length in lengths]
    return job


def advice(job):
    Allocator().check(job)
    return " ".join(Allocator().findings(job, 1.0))


def test_varying_shapes_are_reason_to_advise_it(gpu):
    assert "several shapes" in advice(job_of(3, 4))
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in advice(job_of(3, 4))


def test_so_is_memory_that_did_not_fit(gpu):
    gpu["num_alloc_retries"] = 7
    assert "7 times" in advice(job_of(3, 3))


@pytest.mark.parametrize("name", SETTINGS)
def test_whoever_has_set_it_is_told_nothing(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:False")
    with pytest.raises(NotApplicable, match="already"):
        advice(job_of(3, 4))


def test_nor_whoever_has_no_need_of_it(gpu, monkeypatch):
    with pytest.raises(NotApplicable, match="one shape"):
        advice(job_of(3, 3))
    with pytest.raises(NotApplicable, match="CPU"):
        advice(job_of(3, 4, device="cpu"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(NotApplicable, match="cudaMallocAsync"):
        advice(job_of(3, 4))
