"""JSON form of a report: the fields of the data model, with a schema version."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flatout.report.model import READABLE_VERSIONS, SCHEMA_VERSION, Gain, Summary


def to_dict(summary: Summary) -> dict[str, Any]:
    """Return a report as plain dicts, lists, strings and numbers.

    A number that is not finite becomes None, because JSON has only finite numbers. The ends of a gain without an
    interval become None, too.
    """
    return {"schema": SCHEMA_VERSION, **plain(summary)}


def from_json(text: str) -> Summary:
    """Read a report from the JSON text of ``to_dict``, in a version of ``READABLE_VERSIONS``. Ignore unknown fields.

    Raises:
        ValueError: the text is not JSON, not a report, or has an unreadable schema version.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a report must be JSON: {error}") from error
    return from_dict(data)


def from_dict(data: Any) -> Summary:
    """Read a report from the plain data of ``to_dict``, in a version of ``READABLE_VERSIONS``. Ignore unknown fields.

    Raises:
        ValueError: the data is not a report, or has an unreadable schema version.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("a report must be a JSON object with the key 'schema'")
    if data["schema"] not in READABLE_VERSIONS:
        known = " or ".join(map(str, READABLE_VERSIONS))
        raise ValueError(f"the report's schema must be {known}, got {data['schema']!r}")
    try:
        return _read(Summary, data)
    except KeyError as error:
        raise ValueError(f"the report lacks the field {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the report has a field of the wrong kind: {error}") from error


def plain(value: Any) -> Any:
    """Return a value of a data model as plain dicts, lists, strings and numbers, as ``to_dict`` does."""
    if isinstance(value, Gain):
        low, high = value.interval or (None, None)
        return {"ratio": plain(value.ratio), "low": low, "high": high}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read(kind: Any, value: Any) -> Any:
    """Return a value of type ``kind`` from plain data. A missing float becomes its default, or NaN."""
    arguments = get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        required = {field.name for field in dataclasses.fields(kind) if _is_required(field)}
        given = {name for name in kinds if value.get(name) is not None}
        return kind(**{name: _read(kinds[name], value[name]) for name in kinds if name in given | required})
    if get_origin(kind) is Literal:
        if value not in arguments:
            raise ValueError(f"a status or statistic must be one of {', '.join(arguments)}; got {value!r}")
        return value
    if isinstance(kind, UnionType):
        return None if value is None else _read(arguments[0], value)
    if get_origin(kind) is tuple:
        return tuple(_read(arguments[0], item) for item in value)
    if arguments:  # a mapping
        return {str(key): _read(arguments[1], item) for key, item in value.items()}
    return math.nan if kind is float and value is None else kind(value)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
