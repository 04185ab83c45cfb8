"""Pages as the tests read them: their code, links and anchors, and the pages that the build generates."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

BLOCK = re.compile(r"(?:^<!-- (?P<mark>[\w:, -]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """Block of Python in a page.

    Attributes:
        line: line of the code's beginning.
        code: the code.
        mark: comment above the block, such as ``fragment`` or ``package: psutil``; empty without one.
    """

    line: int
    code: str
    mark: str


def tool(name: str) -> ModuleType:
    """Return a module of the folder tools."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def written() -> dict[str, str]:
    """Return the texts of README and of all pages in docs/, by their path in the repository."""
    files = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of Python in a page."""
    for match in BLOCK.finditer(text):
        yield Block(text.count("\n", 0, match.start("code")) + 1, match["code"], match["mark"] or "")


def links(text: str) -> set[str]:
    """Return the targets of a page's links."""
    return {match["target"] for match in LINK.finditer(CODE.sub(lambda code: code[0].replace("](", "] ("), text))}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    found = set()
    for match in HEADING.finditer(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", match["text"])
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain, flags=re.A).strip().lower()))
    return found
