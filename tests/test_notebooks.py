"""Every notebook is stored with the outputs of a complete run, and runs from top to bottom."""

import base64
import io
from pathlib import Path

import matplotlib.image
import nbformat
import pytest

from tests.docs.pages import links, tool

notebooks = tool("notebooks")
every_notebook = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_stored_with_the_outputs_of_a_complete_run(path: Path) -> None:
    notebook = notebooks.read(path)
    nbformat.validate(notebook)
    cells = notebooks.code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in [output.output_type for output in outputs]
    assert "stderr" not in [output.get("name") for output in outputs]


@every_notebook
def test_names_no_path_of_a_machine(path: Path) -> None:
    assert notebooks.local_paths(notebooks.read(path)) == []


@every_notebook
def test_figures_are_opaque(path: Path) -> None:
    """Black text on a transparent background would be invisible in a dark theme."""
    figures = [png for of_cell in notebooks.figures(notebooks.read(path)) for png in of_cell]
    assert figures
    for png in figures:
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(png)))
        assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1


@every_notebook
def test_links_lead_to_files(path: Path) -> None:
    for cell in notebooks.read(path).cells:
        if cell.cell_type == "markdown":
            for target in links(cell.source):
                assert (path.parent / target).is_file(), target


@pytest.mark.slow
@every_notebook
def test_runs_and_draws_the_stored_figures(path: Path) -> None:
    def counts(notebook: nbformat.NotebookNode) -> list[int]:
        return [len(of_cell) for of_cell in notebooks.figures(notebook)]

    assert counts(notebooks.executed(path)) == counts(notebooks.read(path))
