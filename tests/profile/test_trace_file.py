"""Trace files of ``export_chrome_trace`` with unusual file names."""

from __future__ import annotations

import json
from pathlib import Path

from flatout.profile.trace import BOUNDARY, Trace


def test_bytes_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 1, "args": {}}
        for name, ts in ((BOUNDARY, 0), ("named", 5), (BOUNDARY, 10))
    ]
    file.write_bytes(json.dumps({"traceEvents": events}).encode().replace(b"named", b"na\xffmed"))
    trace = Trace.read(file)
    assert trace.steps == 1
    assert [event.name for event in trace.within(trace.host)] == [BOUNDARY, "na\N{REPLACEMENT CHARACTER}med"]
