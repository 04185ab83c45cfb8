"""Advice to use expandable segments: only on a GPU with varying shapes."""

import pytest
import torch
from torch import nn

from flatout.techniques.allocator import SETTINGS
from tests.jobs import job_of
from tests.reasons import reasons
from tests.techniques.harness import findings, refusal


@pytest.fixture
def gpu(monkeypatch):
    """Statistics of a GPU allocator. Tests may change the number of retries."""
    stats = {"num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return stats


def batches_of(*lengths, device="cuda"):
    return job_of(nn.Linear(2, 2), [torch.randn(4, length) for length in lengths], device=device)


def test_varying_shapes_are_reason_to_advise_it(gpu):
    seen, remedy = findings("allocator", batches_of(3, 4))
    assert {"shapes-vary", "fragmentation"} <= reasons(seen)
    assert "allocator-retries" not in reasons(seen)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in remedy


def test_so_is_memory_that_did_not_fit(gpu):
    gpu["num_alloc_retries"] = 7
    seen, _ = findings("allocator", batches_of(3, 3))
    assert {"allocator-retries", "fragmentation"} <= reasons(seen)
    assert "shapes-vary" not in reasons(seen)
    assert " 7 " in seen


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_users_own_is_left_alone(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:False")
    assert "set-by-user" in refusal("allocator", batches_of(3, 4))


def test_no_advice_where_it_is_of_no_use(gpu, monkeypatch):
    assert "one-shape" in refusal("allocator", batches_of(3, 3))
    assert "on-cpu" in refusal("allocator", batches_of(3, 4, device="cpu"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "other-allocator" in refusal("allocator", batches_of(3, 4))
