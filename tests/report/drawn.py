"""Charts, bars and tables of a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET


def charts(root: ET.Element) -> list[ET.Element]:
    return [element for element in root.iter("div") if "chart" in element.attrib.get("class", "").split()]


def chart(root: ET.Element, begins: str) -> ET.Element:
    """Return the chart with a label that begins with these words."""
    (found,) = (drawn for drawn in charts(root) if drawn.attrib["aria-label"].startswith(begins))
    return found


def bars(root: ET.Element) -> list[ET.Element]:
    return [element for element in root.iter() if element.tag.endswith("rect")]


def share(element: ET.Element, name: str) -> float:
    """Return an attribute in percent of the chart's width."""
    return float(element.attrib[name].removesuffix("%"))


def widths(root: ET.Element) -> list[float]:
    return [share(bar, "width") for bar in bars(root)]


def whiskers(root: ET.Element) -> list[tuple[float, float]]:
    """Return both ends of each whisker, in percent of the chart's width."""
    groups = [element for element in root.iter() if element.attrib.get("class") == "whisker"]
    return [(share(group[0], "x1"), share(group[0], "x2")) for group in groups]


def lines(root: ET.Element) -> list[tuple[str, str, ET.Element]]:
    """Return name, number and bar of each line of a plot."""
    found = []
    for line in (element for element in root.iter("div") if element.attrib.get("class") == "line"):
        texts = {e.attrib["class"]: (e.text or "").replace("\u00a0", " ") for e in line if e.tag == "span"}
        found.append((texts["name"], texts["value"], bars(line)[0]))
    return found


def table_rows(root: ET.Element, first: str) -> list[list[str]]:
    """Return the cells of each row below the headings, for the table whose first cell is this text."""
    for table in root.iter("table"):
        rows = [["".join(cell.itertext()) for cell in row.iter("td")] for row in table.iter("tr")]
        cells = [row for row in rows if row]
        if cells[0][0] == first:
            return cells
    raise AssertionError(f"no table begins with {first}")
