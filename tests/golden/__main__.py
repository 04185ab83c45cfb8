"""``python -m tests.golden FOLDER``: record this version's decisions, trained weights, plans and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.golden import files
from tests.golden.simulation import JOBS, run
from tests.golden.trainings import result, trainings


def report(name: str) -> dict[str, Any]:
    """Return the report and plan of a simulated job, without figures that depend on the machine or a real clock."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, FLATOUT_CACHE=cache):
        recorded = run(
            JOBS[name], lambda tuned: {"report": json.loads(tuned.report.to_json()), "plan": tuned.plan.decisions}
        )
    recorded["report"].pop("environment")
    for pace in filter(None, (recorded["report"]["before"], recorded["report"]["after"])):
        pace.pop("phases")
    recorded["report"].pop("verdict")
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the record; `diff -r` compares two records")
    parser.add_argument("-k", default="", help="only the jobs whose names match this regular expression")
    options = parser.parse_args()
    (options.folder / "reports").mkdir(parents=True, exist_ok=True)
    for name in JOBS:
        if re.search(options.k, name):
            file = options.folder / "reports" / f"{name}.json"
            file.write_text(json.dumps(report(name), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(file, flush=True)
    if not options.k:
        hashes = {f"{optimizer}, {way}": result(optimizer, way) for optimizer, way in trainings()}
        files.write(options.folder / "files")
        (options.folder / "trainings.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
