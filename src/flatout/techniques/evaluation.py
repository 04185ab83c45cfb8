"""6: no gradients in evaluation."""

from __future__ import annotations

from flatout.techniques.base import Rule


class Evaluation(Rule):
    """``run.evaluate`` runs under ``inference_mode`` and in eval mode, and restores every module's mode.

    When it helps: an evaluation loop that tracks gradients keeps every activation alive and is about a third
    slower; one that forgets ``eval()`` gives wrong numbers with BatchNorm or Dropout.
    """

    name = "evaluation"
    number = 6
    title = "no gradients in evaluation"
    kept_because = "run.evaluate and run.fit evaluate under inference_mode, in eval mode, and restore the modes"
    exact = True
