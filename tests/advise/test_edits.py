"""Diffs of scripts: what is surely right is written, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flatout.advise.causes import Cause, Code
from flatout.advise.edits import diff_of

WORKERS, EVALUATION, FP32 = "starved_loader", "evaluation_with_gradients", "fp32_matmuls"


def patched(folder: Path, text: str, *causes: tuple[Code, int]) -> str:
    """Return a file after ``patch`` has applied the diff for causes at lines."""
    file = folder / "train.py"
    file.write_text(text)
    diff = diff_of([Cause(code, f"train.py:{line}") for code, line in causes], folder, "cpu")
    assert file.read_text() == text
    if diff:
        subprocess.run(["patch", "-p0"], input=diff, text=True, cwd=folder, check=True)
    return file.read_text()


@pytest.fixture(autouse=True)
def _settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatout.advise.edits.workers_to_use", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(data)", "DataLoader(data, num_workers=3, persistent_workers=True)"),
        ("DataLoader(data, num_workers=0)", "DataLoader(data, num_workers=3, persistent_workers=True)"),
        ("DataLoader(data, num_workers=0, batch_size=4)",
         "DataLoader(data, num_workers=3, batch_size=4, persistent_workers=True)"),
        ("a = 'é', utils.DataLoader(\n    data,\n    batch_size=4,\n)",
         "a = 'é', utils.DataLoader(\n    data,\n    batch_size=4, num_workers=3, persistent_workers=True,\n)"),
        ("DataLoader(data, num_workers=2)", None),
        ("DataLoader(data, num_workers=args.workers)", None),
        ("DataLoader(data, **options)", None),
        ("DataLoader(a), DataLoader(b)", None),
        ("make_loader(data)", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", ""], ids=["newline", "no newline"])
def test_workers(before, after, end, tmp_path):
    assert patched(tmp_path, before + end, (WORKERS, 1)) == (after or before) + end


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        ("import torch\ndef test():\n    return model(x)\n", 3,
         "import torch\n@torch.no_grad()\ndef test():\n    return model(x)\n"),
        ("import torch\n@timed\ndef test():\n    return model(x)\n", 4,
         "import torch\n@timed\n@torch.no_grad()\ndef test():\n    return model(x)\n"),
        ("import torch\ndef main():\n    loss.backward()\n    for x in xs:\n\n        model(x)\n", 6,
         "import torch\ndef main():\n    loss.backward()\n"
         "    with torch.no_grad():\n        for x in xs:\n\n            model(x)\n"),
        ("import torch\nloss.backward()\nmodel(x)\n", 3,
         "import torch\nloss.backward()\nwith torch.no_grad():\n    model(x)\n"),
        ("import torch\nloss.backward()\nmodel('''a\nb''')\n", 3, None),
        ("import torch\nmodel(x).backward()\n", 2, None),
        ("def test():\n    return model(x)\n", 2, None),
    ],
)  # fmt: skip
def test_evaluation(before, line, after, tmp_path):
    assert patched(tmp_path, before, (EVALUATION, line)) == (after or before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\nloss = model(\n    x)\n",
         'import torch\nwith torch.autocast("cpu", dtype=torch.bfloat16):\n    loss = model(\n        x)\n'),
        ("import torch\nmodel(x).backward()\n", None),
        ("import torch\nif x: y = model(x)\n", None),
        ("import torch as t\nmodel(x)\n", None),
    ],
)  # fmt: skip
def test_precision(before, after, tmp_path):
    assert patched(tmp_path, before, (FP32, 2)) == (after or before)


def test_several_causes_in_one_file(tmp_path):
    before = "import torch\nloader = DataLoader(data)\nout = model(x)\ndef test():\n    model(x)\n"
    after = patched(tmp_path, before, (WORKERS, 2), (EVALUATION, 5), (FP32, 3))
    assert after.splitlines() == [
        "import torch",
        "loader = DataLoader(data, num_workers=3, persistent_workers=True)",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    out = model(x)",
        "@torch.no_grad()",
        "def test():",
        "    model(x)",
    ]


def test_causes_that_are_unsure_or_elsewhere_are_left_out(tmp_path):
    (tmp_path / "train.py").write_text("DataLoader(data)\n")
    causes = [Cause(WORKERS, "train.py:1", is_sure=False), Cause(WORKERS, "elsewhere.py:1"), Cause(WORKERS, "")]
    assert diff_of(causes, tmp_path, "cpu") == ""
