"""``python -m tests.peers``: run the suites and print the table as Markdown."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.peers.runner import Result, run, table
from tests.peers.suites import SUITES


def main() -> int:
    """Run the requested suites. The exit status is 1 if a failure has no reason, or if a reason has no failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("suites", nargs="*", help="parts of suites' names; all suites without one")
    parser.add_argument("--sources", default=os.environ.get("FLATOUT_PEERS"), help="folder of the checkouts")
    options = parser.parse_args()
    if options.sources is None:
        parser.error("--sources or FLATOUT_PEERS must name a folder with the checkouts (tests/peers/README.md)")
    sources = Path(options.sources)
    results: list[Result] = []
    for suite in SUITES:
        if options.suites and not any(part in suite.name for part in options.suites):
            continue
        if not suite.found(sources):
            print(f"skipped: {suite.name} needs {sources / suite.project / suite.folder}", file=sys.stderr)
            continue
        print(f"running: {suite.name}", file=sys.stderr, flush=True)
        result = run(suite, sources)
        results.append(result)
        print(table([result]), file=sys.stderr, flush=True)
        for test in result.unexplained:
            print(f"failed: {suite.name}: {test}\n{result.failed[test]}", file=sys.stderr)
        for difference in result.stale:
            print(f"no longer fails: {suite.name}: {difference.test}", file=sys.stderr)
    print(table(results))
    return int(any(result.unexplained or result.stale for result in results))


if __name__ == "__main__":
    sys.exit(main())
