"""Process of a ``LaneApart``.

    python -m support.lane_process PIPE PARENT

PIPE is the file descriptor of a connection. PARENT is the process that requests turns. The process runs no code of
flatout except for code that the loop itself imports.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from support.timed_steps import TimedSteps


def main(pipe: Connection, parent: int) -> None:
    """Make a loop, warm it up, and train a turn for each received number of seconds, until None is received."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    make, args = pipe.recv()
    steps, told = make(*args)
    timed = TimedSteps(steps)
    timed.warm_up()
    pipe.send(told)
    while (seconds := pipe.recv()) is not None:
        pipe.send(timed.turn(seconds))
    timed.close()


def _end_with(parent: int) -> None:
    """End this process after its parent has ended or was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
