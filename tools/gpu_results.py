"""Summary of a GPU check: ``python tools/gpu_results.py OUT LOGS ARCHS`` writes results.json and a plot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def output_of(*command: str, having: str = "") -> str:
    """Return the first line with ``having`` that ``command`` prints; empty if the command is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    lines = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return next((line.strip() for line in lines if having in line), "")


def environment(archs: str) -> dict[str, str]:
    """Return the facts about machine and versions that belong to every figure."""
    import torch

    nvcc = "/usr/local/cuda/bin/nvcc" if shutil.which("nvcc") is None else "nvcc"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
        "nvcc": output_of(nvcc, "--version", having="release"),
        "architectures": archs,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "command": "make gpu-check",
    }


def phases(logs: Path) -> list[dict[str, Any]]:
    """Return the name, the status and the seconds of each phase.

    The status is "passed", "failed", "timed out", "skipped" or "unsupported".
    """
    found = []
    for line in (logs / "phases.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        status = {"0": "passed", "124": "timed out", "137": "timed out", "skipped": "skipped"}.get(code, "failed")
        log = logs / f"{name}.log"
        if status == "passed" and log.exists() and "\nunsupported: " in "\n" + log.read_text(errors="replace"):
            status = "unsupported"
        found.append({"name": name, "status": status, "seconds": int(seconds)})
    return found


def test_counts(out: Path) -> dict[str, int]:
    """Return the numbers of tests, failures, errors and skips of the GPU suite; empty if it did not finish."""
    try:
        suites = ElementTree.parse(out / "tests.xml").getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):  # a killed run leaves an incomplete file
        return {}
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, "0"))
    return counts


def benchmarks(logs: Path) -> list[dict[str, Any]]:
    """Return the median and the quartiles in seconds, and the extra information, of each benchmark."""
    return [
        {
            "file": report.stem.removeprefix("benchmark-"),
            "name": entry["name"],
            "group": entry.get("group"),
            "median_seconds": entry["stats"]["median"],
            "q1_seconds": entry["stats"]["q1"],
            "q3_seconds": entry["stats"]["q3"],
            "rounds": entry["stats"]["rounds"],
            **entry.get("extra_info", {}),
        }
        for report in sorted(logs.glob("benchmark-*.json"))
        for entry in _entries(report)
    ]


def _entries(report: Path) -> list[dict[str, Any]]:
    """Return the entries of pytest-benchmark; empty if it was killed while it wrote them."""
    try:
        return json.loads(report.read_text())["benchmarks"]
    except json.JSONDecodeError:
        return []


def plot(entries: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot bars of the medians. Do nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1 + 0.35 * len(entries)), layout="constrained")
    axes.barh([entry["name"] for entry in entries], [entry["median_seconds"] * 1e3 for entry in entries])
    axes.set(xlabel="median, ms", xscale="log", title=title)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write ``results.json`` and, if there are benchmarks, ``benchmarks.png``."""
    out, logs, archs = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    entries = benchmarks(logs)
    results = {
        "environment": environment(archs),
        "phases": phases(logs),
        "tests": test_counts(out),
        "benchmarks": entries,
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    if entries:
        plot(entries, results["environment"]["gpu"], out / "benchmarks.png")
    for phase in results["phases"]:
        print(f"{phase['name']:12} {phase['status']:12} {phase['seconds']:4d} s")
    print(f"written: {out / 'results.json'}")


if __name__ == "__main__":
    main()
