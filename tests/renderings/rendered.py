"""Plain text of terminal output and of pages."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

from rich.console import Console

BLOCKS = {"h1", "h2", "h3", "p", "li", "tr", "text", "footer", "svg", "summary", "div", "pre"}
"""Elements that begin and end a line."""


def in_terminal(shown: Any, width: int, ascii_only: bool = False, **options: Any) -> str:
    """Return the plain text that a console of this width prints for an object."""
    return drawn(lambda console: console.print(shown), width, ascii_only, **options)


def drawn(draw: Callable[[Console], object], width: int, ascii_only: bool = False, **options: Any) -> str:
    """Return the plain text that a function draws on a console of this width."""
    sink = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8", errors="replace")
    draw(Console(file=sink, width=width, color_system=None, legacy_windows=False, highlight=False, **options))
    sink.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in sink.read().splitlines())


def root_of(shown: Any) -> ET.Element:
    """Return the parsed page that a notebook shows. No-break spaces become spaces."""
    return ET.fromstring(shown._repr_html_().replace("\u00a0", " "))


def on_page(root: ET.Element) -> str:
    """Return the text of a page: one line per paragraph, table row and chart label."""
    lines = [""]

    def read(element: ET.Element) -> None:
        name = element.tag.rpartition("}")[2]
        if name in ("style", "title"):  # a chart's titles repeat its texts
            return
        if name in BLOCKS:
            lines.append("")
        lines[-1] += " " if name == "br" else element.text or ""
        for child in element:
            read(child)
            lines[-1] += " " if name == "tr" else ""
            lines[-1] += child.tail or ""
        if name in BLOCKS:
            lines.append("")

    read(root)
    return "".join(f"{' '.join(line.split())}\n" for line in lines if line.strip())


def everywhere(shown: Any) -> dict[str, str]:
    """Return the renderings of an object in terminals of several widths, and as a page."""
    return {
        "terminal, 80 columns": in_terminal(shown, 80),
        "terminal, 80 columns, ASCII": in_terminal(shown, 80, ascii_only=True),
        "terminal, 140 columns": in_terminal(shown, 140),
        "page": on_page(root_of(shown)),
    }
