"""Exported models, loaded without flatout and by C++."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

TUNED = {"precision": "bf16", "channels_last": True, "fused_optimizer": True}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.drop(functional.relu(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Images()
    loader = DataLoader(TensorDataset(torch.randn(32, 3, 8, 8), torch.arange(32) % 4), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, techniques=TUNED, budget=0)
    run.fit(1, progress=False)
    return run


def expected_of(run, x):
    """Return the output of the plain model in float32."""
    run.undo()
    return run.model.eval()(x).detach()


LOADS = """
import sys, torch
models = torch.export.load("model.pt2").module(), torch.jit.load("model.pt")
expected = torch.load("expected.pt")
for model in models:
    torch.testing.assert_close(model(expected["x"]), expected["y"])
assert "flatout" not in sys.modules
"""


@pytest.mark.slow
def test_it_is_loaded_without_flatout_at_any_batch_size(trained, tmp_path):
    kept = {name: value.clone() for name, value in trained.model.state_dict().items()}
    trained.export(tmp_path / "model.pt2")
    trained.export(tmp_path / "model.pt", "torchscript")
    assert trained.model.training
    assert all(torch.equal(value, kept[name]) for name, value in trained.model.state_dict().items())
    x = torch.randn(5, 3, 8, 8)
    torch.save({"x": x, "y": expected_of(trained, x)}, tmp_path / "expected.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOADS], cwd=tmp_path, check=True)


PROGRAM = r"""
#include <torch/script.h>
#include <cstdio>
int main(int, char** argv) {
  auto model = torch::jit::load(argv[1]);
  auto y = model.forward({torch::ones({3, 3, 8, 8})}).toTensor().contiguous();
  for (int64_t i = 0; i < y.numel(); ++i) std::printf("%.9g\n", y.data_ptr<float>()[i]);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_of_libtorch_runs_it(trained, tmp_path):
    trained.export(tmp_path / "model.pt", "torchscript")
    (tmp_path / "run.cpp").write_text(PROGRAM)
    root = Path(torch.__file__).parent
    include = [
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_path('include')}",
    ]
    link = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O0", *include, tmp_path / "run.cpp", "-o", tmp_path / "run", *link]
    subprocess.run(command, check=True, timeout=600)
    told = subprocess.run([tmp_path / "run", tmp_path / "model.pt"], check=True, capture_output=True, text=True).stdout
    found = torch.tensor([float(line) for line in told.split()]).reshape(3, 4)
    torch.testing.assert_close(found, expected_of(trained, torch.ones(3, 3, 8, 8)))


class Branch(nn.Linear):
    """Layer with a branch that a trace would lose, in a class that cannot be scripted."""

    def forward(self, *inputs):
        y = super().forward(inputs[0])
        return y if bool(inputs[0].sum() > 0) else -y


def test_a_trace_that_would_lose_a_branch_is_refused(tmp_path):
    torch.manual_seed(0)
    model = Branch(4, 3)
    batches = [(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, batches, optimizer, functional.cross_entropy, budget=0)
    with pytest.raises(ValueError, match="Converting a tensor"):
        run.export(tmp_path / "model.pt", "torchscript")


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, ids, mask=None, labels=None):
        scores = self.embed(ids).mean(1) * mask
        return (
            {"scores": scores}
            if labels is None
            else {"scores": scores, "loss": functional.cross_entropy(scores, labels)}
        )


def test_mappings_are_exported_without_their_labels(tmp_path):
    model = Keywords()
    batch = {"ids": torch.arange(8).reshape(4, 2), "mask": torch.ones(4, 1), "labels": torch.zeros(4, dtype=torch.long)}
    run = flatout.optimize(model, [batch], torch.optim.SGD(model.parameters(), 0.1), budget=0)
    run.export(tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    found = loaded(ids=batch["ids"][:3], mask=batch["mask"][:3])
    torch.testing.assert_close(found["scores"], model(batch["ids"][:3], batch["mask"][:3])["scores"])
    assert "loss" not in found


def test_what_it_is_called_with_can_be_given(trained, tmp_path):
    trained.export(tmp_path / "model.pt2", example=torch.randn(2, 3, 12, 12))
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.randn(4, 3, 12, 12)
    torch.testing.assert_close(loaded(x), expected_of(trained, x))


def test_another_format_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match=r"'export', 'torchscript'.*'onnx'"):
        trained.export(tmp_path / "model.onnx", "onnx")


def test_weights_as_safetensors_tied_ones_once(trained, tmp_path):
    from safetensors.torch import load_model

    trained.model.extra = nn.Linear(8, 4)
    trained.model.extra.weight = trained.model.head.weight
    trained.export_weights(tmp_path / "weights.safetensors")
    other = Images()
    other.extra = nn.Linear(8, 4)
    other.extra.weight = other.head.weight
    load_model(other, tmp_path / "weights.safetensors")
    for name, value in trained.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_weights_need_the_package_safetensors(trained, tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="safetensors"):
        trained.export_weights(tmp_path / "weights.safetensors")
