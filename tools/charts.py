"""Charts of the benchmarks, from benchmarks/results: ``python tools/charts.py`` writes docs/pictures/*.svg."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from figures import ROOT, TABLES, Bar, measured

PICTURES = ROOT / "docs" / "pictures"
FAST, EQUAL, SLOW, LINES = "#2f9e6e", "#6f87a8", "#c9702b", "#808890"
"""Colors that are legible on light and on dark pages. ``EQUAL`` is for intervals that contain 1."""

STYLE = {
    "font.size": 11,
    "text.color": LINES,
    "axes.labelcolor": LINES,
    "axes.edgecolor": LINES,
    "xtick.color": LINES,
    "ytick.color": LINES,
    "svg.hashsalt": "flatout",  # equal figures give equal files
}


def chart(bars: Sequence[Bar], against: str, origin: str) -> Figure:
    """Return bars of ratios with their intervals, and a line at 1."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.38 * len(bars)), layout="constrained")
    places = range(len(bars))
    axes.barh(places, [bar.ratio for bar in bars], color=[_color(bar) for bar in bars], height=0.6)
    for place, bar in zip(places, bars, strict=True):
        end = max(1.0, bar.ratio)  # right of the line at 1, which would cross the label
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color=LINES, linewidth=2)
            end = max(end, bar.high)
        axes.annotate(f"{bar.ratio:.2f}×", (end, place), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=LINES, linewidth=1, linestyle="--")
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"speed relative to {against}\n{origin}", fontsize=9)
    return figure


def _color(bar: Bar) -> str:
    low, high = (bar.ratio if end is None else end for end in (bar.low, bar.high))
    return FAST if low >= 1 else SLOW if high < 1 else EQUAL


def main() -> None:
    """Write a chart for each table with bars, from its newest results."""
    for name, table in TABLES.items():
        if table.bars is None:
            continue
        newest = measured(table.benchmark)[0]
        with plt.rc_context(STYLE):
            figure = chart(list(table.bars(newest.results)), table.against, f"{newest.machine}, {newest.dates[-1]}")
            figure.savefig(PICTURES / f"{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
