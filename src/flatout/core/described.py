"""Base of results that a prompt shows as one line, and a notebook as a small table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape
from textwrap import shorten

from flatout.core import formatting

LONGEST = 120
"""Largest number of characters of a result on one line."""


class Described(ABC):
    """Base of results that are shown by a few facts.

    A fact is a text that needs no measurement, because a debugger may show an object at any moment.
    """

    @abstractmethod
    def _facts(self) -> Mapping[str, str]:
        """Return the facts by name, the most important first. An unknown fact is empty."""

    def __repr__(self) -> str:
        line = f"{_name(self)} {', '.join(_known(self).values())}"
        return f"<{shorten(line, LONGEST - 2, placeholder=' …')}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:left">{escape(fact)}</td></tr>'
            for name, fact in _known(self).items()
        )
        return f"<b>{_name(self)}</b><table>{rows}</table>"


def _name(shown: Described) -> str:
    return f"flatout.{type(shown).__name__}"


def _known(shown: Described) -> dict[str, str]:
    """Return the known facts. An incomplete object has none, for example after a failed constructor."""
    try:
        facts = {name: formatting.clean(fact) for name, fact in shown._facts().items()}
    except Exception:
        return {}
    return {name: fact for name, fact in facts.items() if fact}
