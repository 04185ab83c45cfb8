"""Base of results that a terminal, a notebook and files show."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.core.described import Described
from flatout.report.document import Block
from flatout.report.html import cell, page

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType


class Shown(Described):
    """Base of results that a terminal, a notebook and files show.

    ``print`` prints text, ``rich.print`` prints text in color, and a Jupyter cell shows a page with charts. ``to_json``
    and ``to_html`` write files.
    """

    _TITLE: ClassVar[str]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything shown, as plain data with the key ``schema``."""

    @abstractmethod
    def _blocks(self) -> Iterable[Block]:
        """Return the blocks of the text."""

    def _page(self) -> Iterable[Block]:
        """Return the blocks of the page."""
        return self._blocks()

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return everything shown, as JSON text.

        Args:
            path: also write the text to this file.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        text = text.encode("utf-8", "backslashreplace").decode()  # shows a lone surrogate as JSON would escape it
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write one self-contained page with its charts, for light and dark displays.

        Args:
            path: file to write.
        """
        Path(path).write_text(page(self._TITLE, self._page()), encoding="utf-8")

    def _repr_html_(self) -> str:
        return cell(self._page())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from flatout.report.terminal import render

        yield from render(self._blocks(), options)

    def __str__(self) -> str:
        from flatout.report.terminal import plain_text  # slow to import

        return plain_text(self._blocks())
