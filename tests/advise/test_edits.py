"""Diffs of scripts, which contain only edits that are certainly correct."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

from flatout.advise.causes import Cause, Code
from flatout.advise.edits import diff_of

WORKERS, EVALUATION, FP32 = "starved_loader", "evaluation_with_gradients", "fp32_matmuls"


def patched(folder: Path, text: str | bytes, *causes: tuple[Code, int], trained: Collection[int] = ()) -> str:
    """Return the text of a file after ``patch`` has applied the diff for causes at lines.

    ``git apply`` must accept it too.
    """
    content = text.encode() if isinstance(text, str) else text
    file = folder / "train.py"
    file.write_bytes(content)
    places = [f"train.py:{line}" for line in trained]
    diff = diff_of([Cause(code, f"train.py:{line}") for code, line in causes], folder, "cpu", places)
    assert file.read_bytes() == content
    if diff:
        subprocess.run(["git", "apply", "--check"], input=diff.encode(), cwd=folder, check=True)
        subprocess.run(["patch", "-p1", "--binary"], input=diff.encode(), cwd=folder, check=True)
    return file.read_bytes().decode(errors="surrogateescape")


@pytest.fixture(autouse=True)
def _settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatout.advise.edits.workers_to_use", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("multiprocessing.get_start_method", lambda: "fork")


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
        ("DataLoader(data, 64, True)", "DataLoader(data, 64, True, num_workers=3, persistent_workers=True)"),
        ("DataLoader(data, 64, True, None, None, 0)", None),
        ("DataLoader(*arguments)", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", ""], ids=["newline", "no newline"])
def test_workers(before, after, end, tmp_path):
    assert patched(tmp_path, before + end, (WORKERS, 1)) == (after or before) + end


def test_a_script_that_workers_would_run_again_gets_none(tmp_path, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda: "forkserver")
    assert patched(tmp_path, "DataLoader(data)\n", (WORKERS, 1)) == "DataLoader(data)\n"


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


def test_code_that_training_calls_keeps_its_gradients(tmp_path):
    function = "import torch\ndef losses(x):\n    target = teacher(x)\n    return model(x) - target\n"
    expected = function.replace("    target = ", "    with torch.no_grad():\n        target = ")
    assert patched(tmp_path, function, (EVALUATION, 3), trained=[4]) == expected
    assert patched(tmp_path, function, (EVALUATION, 3), trained=[3]) == function


WITH = 'import torch\nwith torch.autocast("cpu", dtype=torch.bfloat16):\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\nout = model(\n    x)\n", f"{WITH}    out = model(\n        x)\nout = out.float()\n"),
        ("import torch\nloss = huber(model(x), y)\nloss.backward()\n",
         f"{WITH}    loss = huber(model(x), y)\nloss.backward()\n"),
        ("import torch\nresult = evaluate(model(x))\n", None),
        ("import torch\nout = model(x)[0]\n", None),
        ("import torch\nout, state = model(x)\n", None),
        ("import torch\nself.out = model(x)\n", None),
        ("import torch\nmodel(x)\n", None),
        ("import torch\nmodel(x).backward()\n", None),
        ("import torch\nif x: y = model(x)\n", None),
        ("import torch as t\ny = model(x)\n", None),
    ],
)  # fmt: skip
def test_precision(before, after, tmp_path):
    assert patched(tmp_path, before, (FP32, 2)) == (after or before)


SCRIPT = """\
import torch
# é
loader = DataLoader(data)
def test():
{0}model(x)
for x in xs:
{0}out = model(x)
{0}step(out)
"""


@pytest.mark.parametrize("byte_order_mark", ["", "\ufeff"], ids=["no mark", "mark"])
@pytest.mark.parametrize("indentation", ["    ", "\t"], ids=["spaces", "tabs"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_file_keeps_its_form(end, indentation, byte_order_mark, tmp_path):
    before = byte_order_mark + SCRIPT.format(indentation).replace("\n", end)
    after = patched(tmp_path, before, (WORKERS, 3), (EVALUATION, 5), (FP32, 7))
    added = after.split(end)
    for line in ("@torch.no_grad()", f"{2 * indentation}out = model(x)", f"{indentation}out = out.float()"):
        added.remove(line)
    assert after.count(end) == after.count("\n") == before.count(end) + 3
    assert added[0] == f"{byte_order_mark}import torch"
    assert added[2] == "loader = DataLoader(data, num_workers=3, persistent_workers=True)"
    compile(after.encode(), "train.py", "exec")


@pytest.mark.parametrize(
    "content",
    ["# coding: latin-1\n# é\nDataLoader(data)\n".encode("latin-1"), b"a = 1\r# b\nDataLoader(data)\n"],
    ids=["other encoding", "carriage returns"],
)
def test_files_of_other_forms_are_left_out(content, tmp_path):
    assert patched(tmp_path, content, (WORKERS, 3)) == content.decode(errors="surrogateescape")


def test_unusual_separators_of_lines_stay_in_their_line(tmp_path):
    before = "a = '\x0c\x85\u2028'\nDataLoader(data)\n"
    assert "num_workers=3" in patched(tmp_path, before, (WORKERS, 2))


def test_several_causes_in_one_file(tmp_path):
    before = "import torch\nloader = DataLoader(data)\nout = model(x)\ndef test():\n    model(x)\n"
    after = patched(tmp_path, before, (WORKERS, 2), (EVALUATION, 5), (FP32, 3))
    assert after.splitlines() == [
        "import torch",
        "loader = DataLoader(data, num_workers=3, persistent_workers=True)",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    out = model(x)",
        "out = out.float()",
        "@torch.no_grad()",
        "def test():",
        "    model(x)",
    ]


def test_causes_that_are_unsure_or_elsewhere_are_left_out(tmp_path):
    (tmp_path / "train.py").write_text("DataLoader(data)\n")
    causes = [Cause(WORKERS, "train.py:1", is_sure=False), Cause(WORKERS, "elsewhere.py:1"), Cause(WORKERS, "")]
    assert diff_of(causes, tmp_path, "cpu") == ""
