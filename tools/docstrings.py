"""Extension of griffe: turns the reStructuredText in docstrings into Markdown, for the reference pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|meth|class|attr|mod|data|exc):`~?([^`]+)`")
LITERAL_BLOCK = re.compile(r"::(?=[ ]*\n)")


class MarkdownDocstrings(griffe.Extension):
    """Replaces roles such as ``:func:`name``` by code, and a double colon before a block of code by a colon."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = LITERAL_BLOCK.sub(":", ROLE.sub(r"`\1`", obj.docstring.value))
