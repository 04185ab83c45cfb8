"""Technique ``decode``: images of an ``ImageFolder`` by native code, within ``optimize``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.data import PrefixCache
from flatout.data.decode import why_not_decodable

pytest.importorskip("torchvision")
pytest.importorskip("simplejpeg")
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder


@pytest.fixture
def images(tmp_path):
    for i in range(16):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (60, 50 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / str(i % 2) / f"{i}.jpg")
    steps = [transforms.RandomResizedCrop(8), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return ImageFolder(str(tmp_path), transforms.Compose(steps))


def optimized(dataset, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    loader = DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0, **arguments)


def test_batches_of_a_forced_technique_are_the_users(images):
    run = optimized(images, techniques={"decode": True})
    assert run.report.row("decode").status == "kept"
    assert isinstance(run._job.data.source.dataset, PrefixCache)
    plain = DataLoader(images, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        torch.manual_seed(2)
        expected = list(plain)
        torch.manual_seed(2)
        for left, right in zip(expected, run.loader, strict=True):
            assert all(map(torch.equal, left, right))


def test_the_prefix_cache_replaces_a_forced_decoder(images):
    run = optimized(images, techniques={"decode": True, "prefix_cache": True}, expected_steps=100)
    assert {name: run.report.row(name).status for name in ("decode", "prefix_cache")} == dict.fromkeys(
        ("decode", "prefix_cache"), "kept"
    )
    cache = run._job.data.source.dataset
    assert cache.dataset is images
    assert cache.share == 1


def test_without_simplejpeg_the_row_says_what_to_install(images, monkeypatch):
    monkeypatch.setattr("flatout.data.front.why_not_decodable", lambda: "simplejpeg is missing: pip install simplejpeg")
    with pytest.raises(ValueError, match="pip install simplejpeg"):
        optimized(images, techniques={"decode": True})
    assert why_not_decodable() == ""
