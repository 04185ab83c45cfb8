"""Scripts of all kinds under ``python`` and under ``flatout run``: equal output and exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def ran(folder: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"FLATOUT_CACHE": "off"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout or done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script(script, tmp_path):
    expected = ran(tmp_path, str(script))
    assert "Traceback" not in expected[1]
    assert ran(tmp_path, str(script)) == expected
    command = ("-m", "flatout", "run", "--plan", "none", "--without", "compile", "--precision", "fp32", str(script))
    assert ran(tmp_path, *command) == expected
