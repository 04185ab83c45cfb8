"""Runs the notebooks, and stores them with the outputs of this run.

    python tools/notebooks.py                         all notebooks
    python tools/notebooks.py quickstart case_study   some of them

A notebook runs in an empty folder. Without the environment variable ``FLATOUT_CACHE``, its cache of plans and peaks is
empty, too. Idle threads of OpenMP sleep, as in the tests, because other programs may use the cores. What cells write to
stderr is printed and not stored, because warnings name files of the machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = tuple(sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb")))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 300
PATHS = re.compile(r"/(?:home|root|tmp|work|Users|private|opt|mnt)/[^\s\"'<>]*")
"""Absolute paths that another machine does not have."""


def read(path: Path) -> nbformat.NotebookNode:
    """Return a stored notebook."""
    return nbformat.read(path, as_version=4)


def executed(path: Path, *, compiles: bool = False) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of a new run, without metadata that change from run to run.

    Args:
        path: the notebook.
        compiles: True to begin with an empty cache of compiled code, so that a compilation takes its full time.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = read(path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, timeout=CELL_SECONDS, resources=where, record_timing=False, coalesce_streams=True
        )
        defaults = {"FLATOUT_CACHE": f"{folder}/cache", "OMP_WAIT_POLICY": "passive"}
        client.execute(env=defaults | os.environ | ({"TORCHINDUCTOR_CACHE_DIR": f"{folder}/code"} if compiles else {}))
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_stderr(output)]
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def _is_stderr(output: nbformat.NotebookNode) -> bool:
    """Return True for what a cell wrote to stderr, which is printed."""
    if output.get("name") != "stderr":
        return False
    print(output.text, file=sys.stderr)
    return True


def code_cells(notebook: nbformat.NotebookNode) -> list[Any]:
    """Return the cells of code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def figures(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return the figures of each cell of code, as base64 text of PNG."""
    return [
        [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        for cell in code_cells(notebook)
    ]


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Yield all sources, and all outputs except for images."""
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", ()):
            yield output.get("text", "")
            yield from (str(data) for kind, data in output.get("data", {}).items() if not kind.startswith("image/"))


def local_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the paths in sources and outputs that another machine does not have."""
    return [found for text in texts(notebook) for found in PATHS.findall(text)]


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all without a name, and store them."""
    unknown = set(names) - {path.stem for path in NOTEBOOKS}
    if unknown:
        sys.exit(f"names must be those of notebooks, got {', '.join(sorted(unknown))}")
    host = re.compile(rf"\b{re.escape(platform.node())}\b")
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        begun = time.perf_counter()
        notebook = executed(path, compiles=True)
        found = [*local_paths(notebook), *(name for text in texts(notebook) for name in host.findall(text))]
        if found:
            sys.exit(f"{path.name} must not name this machine, got {', '.join(sorted(set(found)))}")
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
