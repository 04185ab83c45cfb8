"""Adapters whose framework is not installed."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        ("lightning", ["lightning", "lightning.pytorch"]),
        ("transformers", ["transformers"]),
        ("accelerate", ["accelerate"]),
    ],
)
def test_an_adapter_without_its_framework_names_the_extra(
    adapter: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"flatout.integrations.{adapter}", raising=False)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'flatout\[{adapter}\]'"):
        importlib.import_module(f"flatout.integrations.{adapter}")


def test_flatout_itself_imports_no_framework() -> None:
    code = (
        "import sys, flatout; print(*{'lightning', 'pytorch_lightning', 'transformers', 'accelerate'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
