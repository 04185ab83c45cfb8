"""Callback and optimizer for the Trainer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flatout import optim
from flatout.autotune.script_report import ScriptReport
from flatout.integrations.framework_tuning import AutoOptions, FrameworkTuning

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "flatout.integrations.transformers needs the packages transformers and accelerate: "
        "pip install 'flatout[transformers]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

FUSED: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.SGD: optim.SGD,
}
"""Native class for each of torch's optimizers that ``TrainingArguments.optim`` can name."""


class FlatoutCallback(TrainerCallback):
    """Callback that tunes each ``trainer.train`` while it trains.

    Write ``Trainer(..., callbacks=[FlatoutCallback()])``. ``bf16=True`` and ``fp16=True`` of the arguments do not
    change. When the training ends, model and optimizer are as before, and the first process shows the report. The
    Trainer does not call callbacks after an error in ``train``. Tuning then lasts until the next ``train``, or until
    :meth:`undo`.

    Args:
        options: ``techniques``, ``precision``, ``deterministic`` and ``plan``, as in :func:`flatout.auto`.

    Raises:
        ValueError: a technique or a precision is unknown.
    """

    def __init__(self, **options: Unpack[AutoOptions]) -> None:
        self._tuning = FrameworkTuning(**options)

    @property
    def report(self) -> ScriptReport | None:
        """Report of the present or the last training, or None before the first training."""
        return self._tuning.report

    def undo(self) -> None:
        """Stop tuning, and turn off all kept techniques. Call this after an error in ``train``."""
        self._tuning.end(shows_report=False)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tuning.begin(sets_precision=args.bf16 or args.fp16)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tuning.end(shows_report=state.is_world_process_zero)


def fused_optimizer(args: TrainingArguments, **additions: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the native form of the optimizer that ``args`` name, for ``Trainer(..., optimizer_cls_and_kwargs=...)``.

    Args:
        args: arguments of the Trainer. ``optim`` names AdamW or SGD of torch.
        additions: additional options of :class:`flatout.optim.AdamW`, such as ``moment_dtype``.

    Returns:
        The class and its keyword arguments.

    Raises:
        ValueError: flatout has no native form of ``args.optim``.
    """
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    if cls not in FUSED:
        raise ValueError(
            f"args.optim must be 'adamw_torch', 'adamw_torch_fused' or 'sgd', got {args.optim!r}. "
            "Leave out optimizer_cls_and_kwargs for this optimizer"
        )
    return FUSED[cls], {**kwargs, **additions}
