"""The report as JSON: the data model field by field, with a schema version."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args

from flatout.report.model import SCHEMA_VERSION, Gain, Pace, Row, Status, Summary, Trial


def to_dict(summary: Summary) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers; a number that is not finite becomes None, as JSON has none."""
    return {"schema": SCHEMA_VERSION, **_plain(dataclasses.asdict(summary))}


def from_json(text: str) -> Summary:
    """Reads the JSON text of what ``to_dict`` made.

    Raises:
        ValueError: the text is not JSON, not a report, or of another schema version.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a report must be JSON: {error}") from error
    return from_dict(data)


def from_dict(data: Any) -> Summary:
    """Reads what ``to_dict`` made; fields that this version does not know are passed over.

    Raises:
        ValueError: not a report, or of another schema version.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("a report must be a JSON object with the key 'schema'")
    if data["schema"] != SCHEMA_VERSION:
        raise ValueError(f"the report's schema must be {SCHEMA_VERSION}, got {data['schema']!r}")
    try:
        return Summary(
            rows=tuple(_row(row) for row in data["rows"]),
            environment={str(key): str(value) for key, value in data["environment"].items()},
            before=_pace(data["before"]),
            after=_pace(data["after"]),
            tuning_seconds=_number(data["tuning_seconds"]),
            verdict=str(data.get("verdict", "")),
            won=tuple(map(str, data.get("won", ()))),
            notes=tuple(data["notes"]),
        )
    except KeyError as error:
        raise ValueError(f"the report lacks the field {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the report has a field of the wrong kind: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _optional(value: float | None) -> float | None:
    return None if value is None else float(value)


def _pace(data: dict[str, Any] | None) -> Pace | None:
    if data is None:
        return None
    return Pace(
        step_ms=_number(data["step_ms"]),
        load_ms=_number(data["load_ms"]),
        samples_per_second=_number(data["samples_per_second"]),
        mfu=_optional(data.get("mfu")),
        step_bytes=data.get("step_bytes"),
        phases={str(name): _number(share) for name, share in data.get("phases", {}).items()},
        loader_per_second=_optional(data.get("loader_per_second")),
    )


def _gain(data: dict[str, Any] | None) -> Gain | None:
    return None if data is None else Gain(_number(data["ratio"]), _number(data["low"]), _number(data["high"]))


def _trial(data: dict[str, Any]) -> Trial:
    return Trial(
        candidate=data["candidate"],
        baseline_ms=_number(data["baseline_ms"]),
        candidate_ms=_number(data["candidate_ms"]),
        gain=_gain(data["gain"]),
        pairs=int(data["pairs"]),
        baseline_bytes=data.get("baseline_bytes"),
        candidate_bytes=data.get("candidate_bytes"),
        setup_seconds=_number(data["setup_seconds"]),
        break_even_steps=_optional(data["break_even_steps"]),
        loss_difference=_optional(data["loss_difference"]),
        output_difference=_optional(data.get("output_difference")),
        gradient_difference=_optional(data.get("gradient_difference")),
        failure=data["failure"],
    )


def _row(data: dict[str, Any]) -> Row:
    if data["status"] not in get_args(Status):
        raise ValueError(f"a row's status must be one of {', '.join(get_args(Status))}; got {data['status']!r}")
    return Row(
        technique=data["technique"],
        number=data["number"],
        title=data["title"],
        status=data["status"],
        why=data["why"],
        chosen=data["chosen"],
        gain=_gain(data["gain"]),
        memory=_optional(data.get("memory")),
        expected=str(data.get("expected", "")),
        purpose=str(data.get("purpose", "")),
        trials=tuple(_trial(trial) for trial in data["trials"]),
    )
