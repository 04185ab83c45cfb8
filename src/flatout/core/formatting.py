"""Formatting of numbers and errors in reports, profiles, progress bars and the monitor."""

from __future__ import annotations

import math
import re
import unicodedata

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_QUANTITY = re.compile(r"(?<=\d) (?=(?:%|×|[mµn]?s|min|h|[KMGT]i?B|B|samples/s|tokens/s|[TGM]FLOPs?(?:/s)?)(?!\w))")
_FORMATS = {"Cf", "Zl", "Zp"}  # Unicode categories: format characters, line and paragraph separators


def visible(text: str) -> str:
    """Remove control characters, such as terminal escapes, and show format characters by number.

    A format character can make a name look like another. U+202E, for example, reverses the text after it.
    """
    text = _CONTROL.sub("", text)
    return text if text.isascii() else "".join(map(_shown, text))


def clean(text: str) -> str:
    """Return ``visible(text)`` without leading and trailing white space."""
    return visible(text).strip()


def unbroken(text: str) -> str:
    """Join numbers and their units by no-break spaces."""
    return _QUANTITY.sub("\u00a0", text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _FORMATS:
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def first_line(error: BaseException) -> str:
    """Return an error as one line. A first line that ends in a colon is joined with the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if any(line.startswith("Original Traceback") for line in lines):  # of a worker process: the last line has the error
        return lines[-1]
    shown = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {shown}"


def capital(text: str) -> str:
    """Return ``text`` with an uppercase first letter."""
    return text[:1].upper() + text[1:]


def percent(ratio: float, digits: int | None = None) -> str:
    """Format a change: 1.25 becomes ``+25 %``. Changes below ten per cent get one decimal.

    Args:
        ratio: new speed / old speed.
        digits: number of decimals, or None to choose it by size.
    """
    change = (ratio - 1) * 100
    if not math.isfinite(change):
        return "?"
    text = f"{abs(change):.{decimals(ratio - 1) if digits is None else digits}f}"
    sign = "" if float(text) == 0 else "+" if change > 0 else "−"
    return f"{sign}{text} %"


def share(part: float | None, digits: int | None = None) -> str:
    """Format a part of a whole: 0.41 becomes ``41 %``. Parts below ten per cent get one decimal. Empty for None.

    Args:
        part: 0..1.
        digits: number of decimals, or None to choose it by size.
    """
    return "" if part is None else f"{100 * part:.{decimals(part) if digits is None else digits}f} %"


def decimals(part: float) -> int:
    """Return the number of decimals for a percentage, by its size."""
    return 1 if abs(part) < 0.0995 else 0


def milliseconds(value: float) -> str:
    """Format a time with three significant digits: ``0.412 ms``, ``6.23 ms``, ``184 ms``."""
    if not math.isfinite(value):
        return "?"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(3, max(0, 2 - magnitude))}f} ms"


def seconds(value: float) -> str:
    """Format a duration: ``8.4 s``, ``75 s``, ``4 min 10 s``, ``18 h 5 min``."""
    if not math.isfinite(value):
        return "?"
    if value < 100:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes} min"


def count(value: float) -> str:
    """Format a rate or a number of steps: ``12,340``. Only values below ten get decimals."""
    if not math.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:,.2g}"


def counted(number: int, name: str) -> str:
    """Format a number of things: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def size_of(value: float) -> str:
    """Format bytes with three digits, in powers of 1024: ``0 B``, ``1.21 GiB``, ``310 MiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"
