"""Files and notebook cells of a report or a profile."""

from __future__ import annotations

import json
from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from flatout.core.described import Described
from flatout.report import html


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
    def _fragment(self) -> Markup:
        """Return everything shown, as HTML."""

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
        Path(path).write_text(html.render("page.html.j2", title=self._TITLE, body=self._fragment()), encoding="utf-8")

    def _repr_html_(self) -> str:
        return str(html.render("cell.html.j2", body=self._fragment()))
