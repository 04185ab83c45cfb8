"""HTML from the templates of this package."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from flatout.core import formatting

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of a template with ``values``.

    Texts lose their control characters and are escaped. ``Markup`` stays unchanged.
    """
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # imported late, because most programs make no page

    environment = Environment(
        loader=PackageLoader("flatout.report"),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["formatting"] = formatting
    environment.filters["code"] = _code
    environment.filters["verbatim"] = _verbatim
    return environment


def _clean(value: object) -> str:
    return value if isinstance(value, Markup) else formatting.unbroken(formatting.clean(str(value)))


def _verbatim(text: str) -> Markup:
    """Escape code or a command. Spaces stay unchanged, because readers copy the text."""
    return escape(formatting.clean(text))


def _code(text: str) -> Markup:
    """Format the text between backquotes as code."""
    return Markup(re.sub("`([^`\n]+)`", r"<code>\1</code>", str(escape(_clean(text)))))
