"""``Profile``: the data of a profile with its text, page and files."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from typing import Any

from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType

from flatout.core import formatting
from flatout.profile import profile_page, profile_text, sections
from flatout.profile.profile_data import ProfileData
from flatout.report.shown import Shown

SCHEMA_VERSION = 2
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""


@dataclass(frozen=True, repr=False)
class Profile(ProfileData, Shown):
    """Profile of training steps: :class:`ProfileData` with its text, page and files.

    ``print(profile)`` prints text, ``rich.print(profile)`` prints text in color, and a Jupyter cell shows a page with
    charts.
    """

    _TITLE = "flatout profile"

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(replace(self, trace=None))
        del plain["trace"]
        return {"schema": SCHEMA_VERSION, **plain}

    def to_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the trace for chrome://tracing or https://ui.perfetto.dev.

        Args:
            path: file to write. The file is compressed with gzip if ``path`` ends in ``.gz``.

        Raises:
            ValueError: this profile was not recorded in this process, or the loop ended before the profiler began.
        """
        if self.trace is None:
            raise ValueError("this profile has no trace: no step was profiled in this process")
        opened = gzip.open(path, "wb") if fspath(path).endswith(".gz") else open(path, "wb")  # noqa: SIM115
        with opened as to, open(self.trace.path, "rb") as trace:
            shutil.copyfileobj(trace, to)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from profile_text.render(self, options)

    def __str__(self) -> str:
        return profile_text.to_text(self)

    def _facts(self) -> dict[str, str]:
        return {
            "seconds": f"{sections.ms(self.seconds)} a step",
            "biggest": sections.biggest(self),
            "steps": formatting.counted(len(self.steps), "step"),
        }

    def _fragment(self) -> Markup:
        return profile_page.fragment(self)
