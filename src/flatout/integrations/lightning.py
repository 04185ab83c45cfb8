"""Callback for the Trainer of ``lightning``, which the Trainer of ``pytorch_lightning`` accepts, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.autotune.script_report import ScriptReport
from flatout.integrations.framework_tuning import AutoOptions, FrameworkTuning

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "flatout.integrations.lightning needs the package lightning: pip install 'flatout[lightning]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

FULL_PRECISION = "32-true"
"""Default precision of a Trainer."""


class FlatoutCallback(Callback):
    """Callback that tunes each ``trainer.fit`` while it trains.

    Write ``Trainer(callbacks=[FlatoutCallback()])``. flatout changes the precision only if the Trainer has the default,
    ``"32-true"``. When the fit ends, also after an error, model and optimizers are as before, and the first rank shows
    the report.

    Args:
        options: ``techniques``, ``precision``, ``deterministic`` and ``plan``, as in :func:`flatout.auto`.

    Raises:
        ValueError: a technique or a precision is unknown.
    """

    def __init__(self, **options: Unpack[AutoOptions]) -> None:
        self._tuning = FrameworkTuning(**options)

    @property
    def report(self) -> ScriptReport | None:
        """Report of the present or the last fit, or None before the first fit."""
        return self._tuning.report

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin before the Trainer makes the iterator of its first epoch, so that flatout finds the loader."""
        self._tuning.begin(
            sets_precision=trainer.precision != FULL_PRECISION,
            scales_losses=getattr(trainer.precision_plugin, "scaler", None) is not None,
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End a fit without training steps."""
        self._end(trainer)

    def _end(self, trainer: Any) -> None:
        self._tuning.end(shows_report=trainer.is_global_zero)
