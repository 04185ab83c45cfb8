"""Store of cached plans: one JSON file for each key, in the user's cache folder.

Many processes may use the store at once: a file is replaced as a whole. The folder and its files must belong to this
user, and only this user may write to the folder. All other files are ignored silently, because an unusable cache must
not stop a training. ``Plan.load`` reads the files, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from flatout.core.cache_folder import cache_folder, make_folder, read_own, write_own
from flatout.plan import Plan

MOST_PLANS = 256
MOST_BYTES = 4 << 20
"""Limits of the store. Above either limit, the least recently used plans are deleted."""

_KEY = "key"
_NAME = re.compile(r"\.?[0-9a-f]{32}\.json(\..*)?")
"""Names of the store's files, including temporary files that a killed process left."""


def read_plan(key: Mapping[str, str]) -> Plan | None:
    """Return the plan of a key, or None if there is none that can be trusted. A read counts as a use."""
    path = _path(key)
    if path is None or not _is_private(path.parent):
        return None
    try:
        data = json.loads(read_own(path) or "null")
        if not isinstance(data, dict) or data.get(_KEY) != dict(key):
            return None
        plan = Plan.from_dict(data)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return plan


def write_plan(key: Mapping[str, str], plan: Plan) -> None:
    """Write the plan of a key, and delete the least recently used plans if there are too many."""
    path = _path(key)
    if path is None:
        return
    try:
        text = json.dumps(plan.to_dict() | {_KEY: dict(key)}, indent=1)
    except TypeError:  # a forced value may be an object, such as a multiprocessing context
        return
    make_folder(path.parent)
    if not _is_private(path.parent):
        return
    write_own(path, text + "\n")
    _delete_least_used(path.parent)


def forget_decision(key: Mapping[str, str], technique: str) -> None:
    """Remove a technique from the plan of a key. Do nothing without such a plan."""
    plan = read_plan(key)
    if plan is not None and technique in plan.decisions:
        write_plan(key, plan.without(technique))


def _path(key: Mapping[str, str]) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
    return folder / "plans" / f"{digest}.json"


def _is_private(folder: Path) -> bool:
    """Return True if a folder belongs to this user, and only this user may write to the folder."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_shared


def _delete_least_used(folder: Path) -> None:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process has deleted the file
                    found.append((entry.stat(follow_symlinks=False), entry.path))
    size = 0
    for i, (status, path) in enumerate(sorted(found, key=lambda file: -file[0].st_mtime_ns)):
        size += status.st_size
        if i >= MOST_PLANS or size > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)
