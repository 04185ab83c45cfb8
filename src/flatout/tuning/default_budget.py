"""Default budget of measurements, as a share of the training's duration."""

from __future__ import annotations

import math

from flatout.core import formatting

MOST_SECONDS = 60.0
"""Upper limit of the default budget, in seconds."""

SHARE = 0.1
"""Share of the training's duration that measurements may take."""

COMPARED_UPDATES = 20
"""Updates of one comparison: seven for pace and noise, seven for a candidate, and three pairs of the race."""

SHORTEST_BLOCK = 0.02
"""Duration in seconds of a timed block with shorter updates."""


def affordable(batch_seconds: float, expected_steps: int, per_update: float = 1) -> float:
    """Return the seconds of the default budget; 0 if the budget does not pay for one comparison.

    Args:
        batch_seconds: time of a batch, from its loading to its update.
        expected_steps: batches of the whole training.
        per_update: batches per update.
    """
    fewest = fewest_steps(batch_seconds, per_update)
    if fewest is None or expected_steps < fewest:
        return 0.0
    return min(MOST_SECONDS, SHARE * expected_steps * batch_seconds)


def fewest_steps(batch_seconds: float, per_update: float = 1) -> int | None:
    """Return the smallest ``expected_steps`` that pays for one comparison; None if ``MOST_SECONDS`` are too short."""
    comparison = COMPARED_UPDATES * max(SHORTEST_BLOCK, per_update * batch_seconds)
    return None if comparison > MOST_SECONDS else math.ceil(comparison / (SHARE * batch_seconds))


def too_few(expected_steps: int, per_update: float = 1) -> bool:
    """Return True if ``expected_steps`` batches pay for no comparison, for any duration of a batch."""
    return SHARE * expected_steps < COMPARED_UPDATES * per_update


def why_nothing(batch_seconds: float, expected_steps: int, per_update: float = 1) -> str:
    """Return the note on a training for which ``affordable`` is 0."""
    fewest = fewest_steps(batch_seconds, per_update)
    if fewest is None:
        return (
            f"nothing was measured: an update takes {formatting.seconds(per_update * batch_seconds)}, and the default "
            f"budget is at most {MOST_SECONDS:.0f} s. Pass budget= in seconds"
        )
    return (
        f"nothing was measured: {formatting.share(SHARE)} of {expected_steps:,} expected steps do not pay for one "
        f"comparison. Pass expected_steps={fewest} or more if the training is longer, or budget= in seconds"
    )
