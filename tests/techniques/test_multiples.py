"""Names of the layers whose sizes underuse tensor cores."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.techniques.multiples import better_size, multiple_of, odd_layers
from tests.jobs import job_of
from tests.reasons import reasons
from tests.techniques.harness import count_work, findings, refusal, share_of_flops


class Gpt(nn.Module):
    """Small model with the layers of nanoGPT."""

    def __init__(self, vocabulary=257, width=32):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens):
        return self.lm_head(self.mlp(self.wte(tokens)))


def found(model, autocast=torch.bfloat16, tf32=False):
    return [(layer.names, layer.sizes, layer.multiple) for layer in odd_layers(model, autocast, tf32=tf32)]


@pytest.mark.parametrize(
    ("dtype", "tf32", "multiple"),
    [
        (torch.bfloat16, False, 8),
        (torch.float16, True, 8),
        (torch.int8, False, 16),
        (torch.float8_e4m3fn, False, 16),
        (torch.float32, True, 4),
        (torch.float32, False, 1),
        (torch.float64, True, 1),
    ],
)
def test_multiples(dtype, tf32, multiple):
    assert multiple_of(dtype, tf32=tf32) == multiple


def test_known_sizes():
    assert better_size(50257, 8) == 50304  # nanoGPT's
    assert better_size(30522, 8) == 30528  # BERT's
    assert better_size(10, 8) == 16
    assert better_size(513, 8) == 520  # not 576, which is an eighth more


@given(st.integers(1, 10**6), st.sampled_from([4, 8, 16]))
def test_a_better_size_suits_and_is_not_far(size, multiple):
    better = better_size(size, multiple)
    assert better % multiple == 0
    assert better >= size
    assert better < size + multiple or better <= 1.05 * size


def test_a_vocabulary_is_found_with_every_name_of_its_weight():
    assert found(Gpt()) == [(("wte", "lm_head"), (("out_features", 257, 264),), 8)]
    assert found(Gpt(264)) == []
    assert found(Gpt(260), None, tf32=True) == []
    assert found(Gpt(), None) == []  # float32 products do not use tensor cores


def test_an_embedding_alone_is_no_product():
    assert found(nn.Embedding(257, 31)) == []


def test_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7),  # the channels of an image are given
        nn.Conv2d(64, 30, 3),
        nn.Conv2d(30, 30, 3, groups=30),
        nn.ConvTranspose2d(30, 16, 1),
        nn.Conv1d(16, 32, 1),
    )
    assert found(model) == [
        (("1",), (("out_channels", 30, 32),), 8),
        (("3",), (("in_channels", 30, 32),), 8),
    ]


def test_layers_in_their_own_dtype():
    model = nn.Linear(12, 16).half()
    assert found(model, None) == [(("Linear",), (("in_features", 12, 16),), 8)]
    assert found(nn.Linear(12, 16).double()) == []


@pytest.fixture
def tensor_cores(monkeypatch):
    """Simulated GPU with tensor cores."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.mark.usefixtures("tensor_cores")
def test_the_findings_are_about_layers_that_matter():
    model = Gpt().bfloat16()
    model.extra = nn.Linear(3, 1).bfloat16()  # odd, but negligible

    def loss(m, b):
        return m(b).float().mean() + m.extra(torch.ones(3, dtype=torch.bfloat16)).sum()

    job = job_of(model, compute_loss=loss, device="cuda")
    count_work(job, torch.randint(0, 257, (4, 16)))
    assert share_of_flops(job, "lm_head") > 0.3
    finding, remedy = findings("multiples_of_8", job)
    assert {"wte", "lm_head", "Linear", "out_features", "257", "264", "8"} <= set(re.findall(r"\w+", finding))
    assert "enlarge-layer" in reasons(remedy)


@pytest.mark.usefixtures("tensor_cores")
def test_a_model_without_odd_sizes_gets_no_advice():
    assert "sizes-suit" in refusal("multiples_of_8", job_of(Gpt(264).bfloat16(), device="cuda"))


def test_shares_of_flops():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24), nn.ReLU())
    job = job_of(model, compute_loss=lambda m, b: m(b).sum())
    assert share_of_flops(job, "0") is None
    count_work(job, torch.ones(4, 8, requires_grad=True))
    assert share_of_flops(job, "1") == pytest.approx(0.75)
    assert share_of_flops(job, "2") == 0
    assert share_of_flops(job, "nowhere") is None


def test_a_cpu_and_an_old_gpu_have_no_tensor_cores(monkeypatch):
    assert "on-cpu" in refusal("multiples_of_8", job_of(Gpt()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GTX 1080")
    assert "no-tensor-cores" in refusal("multiples_of_8", job_of(Gpt(), device="cuda"))
