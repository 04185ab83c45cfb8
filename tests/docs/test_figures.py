"""The tables of figures equal the files of results, and so do the charts."""

from __future__ import annotations

import json

import pytest

from tests.docs.pages import ROOT, tool

figures = tool("figures")


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_page_has_the_tables_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures.PLACE.search(text)
    assert figures.rewritten(text) == text, "python tools/figures.py"


def test_every_table_is_in_the_page_of_benchmarks() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert {match["name"] for match in figures.PLACE.finditer(text)} == {*figures.TABLES, "files"}


def test_every_file_names_its_machine_and_every_result_its_date_and_torch() -> None:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(figures.RESULTS.glob("*.json"))]
    by_benchmark = [each for each in files if "benchmarks" in each]
    assert len(by_benchmark) > 1
    for content in by_benchmark:
        assert content["machine"]
        for name, entry in content["benchmarks"].items():
            assert f"benchmarks/{name}.py" in entry["command"]
            assert (ROOT / "benchmarks" / f"{name}.py").exists()
            for result in entry["results"].values():
                assert {"date", "torch", "python"} <= result.keys()


def test_a_changed_result_changes_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for path in figures.RESULTS.glob("*.json"):
        content = path.read_text(encoding="utf-8").replace("1.915", "7.125")  # speed of the first script
        (tmp_path / path.name).write_text(content, encoding="utf-8")
    before = figures.table("scripts")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "7.1×" not in before
    assert "7.1×" in figures.table("scripts")


def test_charts_show_the_ratios_of_the_results() -> None:
    charts = tool("charts")
    table = figures.TABLES["scripts"]
    bars = list(table.bars(figures.measured("scripts")[0].results))
    figure = charts.chart(bars, table.against, "machine")
    (axes,) = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [bar.ratio for bar in bars]
    assert [label.get_text() for label in axes.get_yticklabels()] == [bar.label for bar in bars]
