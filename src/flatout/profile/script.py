"""``flatout profile train.py``: profile of a training script that does not use flatout.

torch's hook on optimizers counts the updates, and a step is the interval between two updates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.core.main_program import MainProgram
from flatout.profile.record import Course

_MOST_ENDS = 3
"""Number of attempts to end a script. A script that catches all of them trains to its own end."""


@dataclass(frozen=True)
class Ended:
    """End of a script.

    Attributes:
        status: exit status of the script.
        error: exception that ended the script; None for no exception and for ``SystemExit``.
        updates: number of updates of the script's first optimizer until the profile was done.
        failure: exception from closing the profiler after the script; None if closing succeeded.
    """

    status: int
    error: BaseException | None
    updates: int
    failure: Exception | None = None


def run_course(program: MainProgram, course: Course, *, stop: bool) -> Ended:
    """Run a program as Python would, and advance ``course`` after each update.

    Args:
        program: the script or module.
        course: advanced by every update of the script's first optimizer.
        stop: end the script when the course is done. If the script catches this, its next updates end it again.
    """
    leader: Optimizer | None = None
    passed, done, ends = 0, False, 0
    next(course)
    process = os.getpid()  # a child that the script forks is not profiled, and ends as usual

    def updated(optimizer: Optimizer, *_: object) -> None:
        nonlocal leader, passed, done, ends
        leader = optimizer if leader is None else leader
        if os.getpid() != process:
            return
        if optimizer is leader and not done:
            passed += 1
            done = next(course, True)
        if stop and done and ends < _MOST_ENDS:
            ends += 1
            raise SystemExit(0)  # handlers of a script rarely catch SystemExit, and a thread shows no traceback for it

    error: BaseException | None = None
    failure: Exception | None = None
    hook = register_optimizer_step_post_hook(updated)
    try:
        with _restored_interpreter():
            program.run()
    except BaseException as raised:
        if os.getpid() != process:
            raise
        error = raised.with_traceback(program.own(raised.__traceback__))
    finally:
        hook.remove()
        if os.getpid() == process:
            try:
                course.close()
            except Exception as raised:
                failure = raised
    if os.getpid() != process:
        raise SystemExit(0)
    if isinstance(error, SystemExit):
        return Ended(_status(error.code), None, passed, failure)
    return Ended(int(error is not None), error, passed, failure)


@contextmanager
def _restored_interpreter() -> Iterator[None]:
    """Restore the changes of a program in ``sys``, and the module ``__main__``."""
    arguments, folders, main, excepthook = list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = arguments, folders
        sys.modules["__main__"], sys.excepthook = main, excepthook


def _status(code: object) -> int:
    """Return the exit status that Python gives to ``SystemExit.code``. Print the code if it is a message."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1
