"""Ranks of a script that wraps its model in ``DistributedDataParallel``, and tunes it on all ranks together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.autotune.recorder import RecordedUpdate, linearized_loss
from flatout.distributed.agreement import Agreement, GroupAgreement
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import StepClock
from flatout.tuning.ranks import comes_wrapped

PATIENCE = timedelta(seconds=20)
"""Time after which a rank that does not come to an agreed update counts as lost.

All ranks come from the same backward, whose gradients they average.
"""

TURN_PATIENCE = timedelta(minutes=10)
"""Time after which a rank counts as lost in a turn. A rank may compile for minutes while the others wait."""

_LIGHTNING = "lightning.", "pytorch_lightning."
"""Packages whose strategies call ``training_step`` in place of ``forward`` inside of their DDP."""

_ADVICE = "Call flatout.optimize() in the script"


class Replica:
    """Module inside a script's ``DistributedDataParallel``, which all ranks tune together.

    The recorded calls are those of the DDP, which averages gradients in the backwards of trials as in the script.

    Args:
        ddp: the module that the script calls.
        ranks: all ranks.

    Attributes:
        module: the module to tune.
        ranks: the argument.
        sync: averages gradients over the ranks.
    """

    def __init__(self, ddp: DistributedDataParallel, ranks: Agreement) -> None:
        self.module: nn.Module = ddp.module
        self.ranks = ranks
        self._ddp = ddp
        device = next(ddp.parameters()).device
        self.sync = GradientSync([ddp.module], ranks, StepClock(device), ddp)

    def loss(self, _: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the loss of recorded calls of the DDP."""
        return linearized_loss(self._ddp, batch)


def ddp_of(update: RecordedUpdate) -> DistributedDataParallel | None:
    """Return the DDP with most parameters among the recorded modules, or None without one. All ranks find the same."""
    found = [module for module in update.batches if isinstance(module, DistributedDataParallel)]
    return max(found, key=lambda module: sum(p.numel() for p in module.parameters()), default=None)


def why_not_together(update: RecordedUpdate) -> str:
    """Return the reason why no module of an update is tuned on several ranks; empty if the ranks may be connected."""
    if not (dist.is_available() and dist.is_initialized()):
        return f"the script has no process group. {_ADVICE}"
    ddp: Any = ddp_of(update)
    if ddp is None and any(map(comes_wrapped, update.batches)):
        return "the model is sharded by FSDP or fully_shard, or has DistributedDataParallel inside"
    if ddp is None:
        return f"the model is not in DistributedDataParallel. {_ADVICE}"
    if type(ddp.module).__module__.startswith("flatout."):
        return "flatout.optimize() has tuned them"
    if any(kind.__module__.startswith(_LIGHTNING) for kind in type(ddp.module).__mro__):
        return "Lightning replaces the forward of its module during each call, which cannot be repeated"
    if ddp.process_group is not dist.group.WORLD:
        return "the model has a process group that is not the default one"
    if ddp._join_config.enable:
        return "model.join() allows them different numbers of updates"
    if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()):
        return "SyncBatchNorm waits for all of them inside the forward"
    if ddp.mixed_precision is not None:
        return "DistributedDataParallel has mixed_precision="
    if comes_wrapped(ddp.module) or any(p._post_accumulate_grad_hooks for p in ddp.parameters()):
        return "parameters inside DistributedDataParallel are sharded, or have hooks after their gradients"
    return ""


def connected() -> Agreement:
    """Connect all ranks of the default process group. All ranks must call this after the same update.

    The ranks get a group of their own. Its end is not monitored, so that a rank fails as it does without flatout.

    Raises:
        RuntimeError: a rank did not come.
    """
    group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    return GroupAgreement(group)
