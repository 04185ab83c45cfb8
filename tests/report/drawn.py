"""Charts, bars and tables of a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET


def charts(root: ET.Element) -> list[ET.Element]:
    return [element for element in root.iter() if element.tag.endswith("}svg")]


def chart(root: ET.Element, begins: str) -> ET.Element:
    """Return the chart with a label that begins with these words."""
    (found,) = (drawn for drawn in charts(root) if drawn.attrib["aria-label"].startswith(begins))
    return found


def bars(root: ET.Element) -> list[ET.Element]:
    return [element for element in root.iter() if element.tag.endswith("rect")]


def widths(root: ET.Element) -> list[float]:
    return [float(bar.attrib["width"]) for bar in bars(root)]


def lines(root: ET.Element) -> list[tuple[str, str, ET.Element]]:
    """Return name, number and bar of each line of a plot."""
    groups = [element for element in root.iter() if element.tag.endswith("}g")]
    found = []
    for group in groups:
        texts = {e.attrib["class"]: e.text or "" for e in group if e.tag.endswith("}text")}
        found.append((texts["name"], texts["value"], bars(group)[0]))
    return found


def table_rows(root: ET.Element, css: str) -> list[list[str]]:
    """Return the cells of each row below the headings, for the table of this CSS class."""
    (table,) = (element for element in root.iter("table") if element.attrib.get("class") == css)
    return [
        ["".join(cell.itertext()) for cell in row.iter("td")] for row in table.iter("tr") if row.find("td") is not None
    ]
