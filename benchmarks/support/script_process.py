"""``flatout`` as a process that also notes its first verified gain.

    python -m support.script_process FILE run --plan none train.py

FILE receives the time and the update, as JSON: null if no race showed a gain.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.autotune.engine import Engine
from flatout.cli import main
from flatout.cli import run as command


def run(file: Path, arguments: list[str]) -> int:
    """Run a command of flatout, and return its exit status."""
    engines: list[Engine] = []
    first: list[dict[str, float]] = []

    def made(*args: Any) -> Engine:
        engines.append(Engine(*args))
        return engines[-1]

    def look(*_: object) -> None:
        for tuning in engines[0].tunings if engines and not first else ():
            if tuning.outcome is not None and tuning.outcome.gain is not None and tuning.outcome.gain.low > 1:
                first.append({"at": time.perf_counter(), "update": engines[0].updates})

    with mock.patch.object(command, "Engine", made):
        hook = register_optimizer_step_post_hook(look)
        try:
            return main(arguments)
        finally:
            hook.remove()
            file.write_text(json.dumps(first[0] if first else None))


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
