"""Context manager for a training loop of accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flatout.integrations.framework_tuning import AutoOptions, FrameworkTuning

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "flatout.integrations.accelerate needs the package accelerate: pip install 'flatout[accelerate]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack


@contextmanager
def tuned(accelerator: Accelerator, **options: Unpack[AutoOptions]) -> Iterator[FrameworkTuning]:
    """Tune the training loop inside the block while it trains.

    Write ``with tuned(accelerator): ...``. The accelerator's ``mixed_precision`` does not change. At the end of the
    block, also after an error, model and optimizers are as before, and the main process shows the report.

    Args:
        accelerator: the accelerator that prepared the training.
        options: ``techniques``, ``precision``, ``deterministic`` and ``plan``, as in :func:`flatout.auto`.

    Yields:
        The tuning, whose ``report`` can be read at any time.

    Raises:
        ValueError: a technique or a precision is unknown.
    """
    tuning = FrameworkTuning(**options)
    tuning.begin(sets_precision=accelerator.mixed_precision != "no")
    try:
        yield tuning
    finally:
        tuning.end(shows_report=accelerator.is_main_process)
