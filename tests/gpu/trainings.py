"""Small trainings, in plain torch on the CPU and through ``flatout.optimize`` on the device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.training.tolerance import ALLOWED, apart
from tests.emulated_cuda.record import EMULATED
from tests.gpu.kinds import BATCH, KINDS
from tests.gpu.test_cuda_graph import whole_step
from tests.helpers import snapshot
from tests.jobs import NO_TECHNIQUES

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}

EPSILON = torch.finfo(torch.float32).eps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """Configuration of one training, without the techniques.

    Attributes:
        kind: key of ``KINDS``.
        optimizer: key of ``OPTIMIZERS``.
        precision: as for ``optimize``.
        accumulate: batches per update.
        max_grad_norm: as for ``optimize``.
        has_schedule: True to change the learning rate with each update.
        epochs: passes over the data.
        is_shuffled: True to shuffle the samples in each epoch.
    """

    kind: str
    optimizer: str = "sgd"
    precision: str = "fp32"
    accumulate: int = 1
    max_grad_norm: float | None = None
    has_schedule: bool = False
    epochs: int = 2
    is_shuffled: bool = True

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
        """Make model, optimizer, scheduler and loader. Each call gives the same values."""
        torch.manual_seed(0)
        model = KINDS[self.kind].model()
        optimizer = OPTIMIZERS[self.optimizer](model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if self.has_schedule else None
        return model, optimizer, scheduler, self.loader()

    def loader(self) -> DataLoader[Any]:
        """Make a loader with a new random generator, so that each loader gives the same order."""
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.samples(), batch_size=BATCH, shuffle=self.is_shuffled, generator=generator)

    def samples(self) -> TensorDataset:
        """Make the dataset."""
        return TensorDataset(*KINDS[self.kind].data())

    def loss_of(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return KINDS[self.kind].loss_fn(model(x), y)


@dataclass(frozen=True)
class Trained:
    """Result of a training, on the CPU.

    Attributes:
        losses: loss of each step.  # [steps], float32
        weights: parameters and buffers.
        updates: number of updates in each parameter's state, empty for an optimizer without counts.
        rates: learning rates of the groups.
        scaler: state of the loss scaler, None without a scaler.
    """

    losses: Tensor
    weights: Mapping[str, Tensor]
    updates: Sequence[int]
    rates: Sequence[float]
    scaler: Mapping[str, Any] | None


def train_plainly(setup: Setup) -> Trained:
    """Train in plain torch on the CPU, with torch's autocast and loss scaler."""
    model, optimizer, scheduler, loader = setup.parts()
    dtype = DTYPES.get(setup.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    parameters, losses = list(model.parameters()), []

    def update(batches: int) -> None:
        scaler.unscale_(optimizer)
        for parameter in parameters:
            if parameter.grad is not None and batches < setup.accumulate:  # last update of an epoch
                parameter.grad *= setup.accumulate / batches
        if setup.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, setup.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    for _ in range(setup.epochs):
        for i, batch in enumerate(loader, 1):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = setup.loss_of(model, batch)
            scaler.scale(loss / setup.accumulate).backward()
            losses.append(loss.detach())
            if i % setup.accumulate == 0 or i == len(loader):
                update((i - 1) % setup.accumulate + 1)
    return trained(losses, model, optimizer, scaler if scaler.is_enabled() else None)


def optimize(setup: Setup, techniques: Mapping[str, Any], **arguments: Any) -> flatout.Run:
    """Start a training with these techniques, and forbid all others. The default budget of 0 runs no trials."""
    model, optimizer, scheduler, loader = setup.parts()
    others = {name: False for name in NO_TECHNIQUES if name not in ("precision", "tf32")}  # `precision` decides
    settings = {
        "loader": loader,
        "loss_fn": KINDS[setup.kind].loss_fn,
        "scheduler": scheduler,
        "accumulate": setup.accumulate,
        "max_grad_norm": setup.max_grad_norm,
        "precision": setup.precision,
        "budget": 0,
    }
    return flatout.optimize(model, optimizer=optimizer, techniques=others | {**techniques}, **settings | arguments)


def train(run: flatout.Run, epochs: int) -> Trained:
    """Train by ``run.step``."""
    losses = [run.step(batch) for _ in range(epochs) for batch in run.loader]
    return trained(losses, run.model, run.optimizer, run.scaler)


def trained(losses: Sequence[Tensor], model: nn.Module, optimizer: Any, scaler: Any) -> Trained:
    """Return the result of a finished training."""
    state = None if scaler is None else {name: scaler.state_dict()[name] for name in ("scale", "_growth_tracker")}
    return Trained(
        torch.stack([loss.float().cpu() for loss in losses]),
        {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()},
        [int(state["step"]) for state in optimizer.state.values() if "step" in state],
        [float(group["lr"]) for group in optimizer.param_groups],
        state,
    )


def check_same(ours: Trained, plain: Trained, setup: Setup) -> None:
    """Check that a training on the device equals plain torch, except for rounding.

    The emulated devices compute with torch's CPU kernels. In float32 with SGD, only attention and the fused update
    order their operations differently. The limit is then 8 units in the last place.

    Rounding differs more in all other cases. A GPU sums in another order. In 16 bits, other intermediate results are
    rounded. Adam turns the error of a small gradient into a part of an update. The limits are then those of
    ``flatout.training.tolerance``: the limit for gradients applies to the weights, and the limit for losses to the
    mean loss. torch convolves in TF32 on a GPU.
    """
    assert ours.updates == plain.updates
    assert ours.rates == plain.rates
    assert ours.scaler == plain.scaler
    floats = {name for name, value in plain.weights.items() if value.is_floating_point()}
    counts = plain.weights.keys() - floats  # numbers of batches that BatchNorm has seen
    assert {name: int(ours.weights[name]) for name in counts} == {name: int(plain.weights[name]) for name in counts}
    in_tf32 = setup.precision == "tf32" or (setup.precision == "fp32" and setup.kind == "convolutions" and not EMULATED)
    allowed = ALLOWED["tf32" if in_tf32 else DTYPES.get(setup.precision, torch.float32)]
    is_exact = EMULATED and setup.optimizer == "sgd" and setup.precision not in DTYPES
    by = apart(*({name: result.weights[name] for name in floats} for result in (plain, ours)))
    assert by[0] <= (8 * EPSILON if is_exact else allowed.gradients), by
    if is_exact:
        torch.testing.assert_close(ours.losses, plain.losses, rtol=8 * EPSILON, atol=0)
    else:
        assert abs(ours.losses.mean() / plain.losses.mean() - 1) <= allowed.losses


STRUCTURE = ("class", "compiled", "keys", "modes", "hooks", "requires_grad", "flags", "threads", "optimizer class")
"""Parts of a snapshot that training does not change."""


def check(setup: Setup, techniques: Mapping[str, Any], **arguments: Any) -> Trained:
    """Train with these techniques, compare with plain torch, and return the result.

    After ``undo``, no technique may remain in the model, and no tensor may remain on the device.

    Args:
        setup: the training.
        techniques: techniques to force.
        arguments: further arguments of ``optimize``.
    """
    plain = train_plainly(setup)
    with nothing_left():
        run = optimize(setup, techniques, **arguments)
        ours = train(run, setup.epochs)
        if techniques.get("cuda_graph"):
            assert whole_step(run).replays
        undo(run, setup)
        report, kept_alive = run.report, (run.model, run.optimizer)
        del run  # frees the loss scaler, too
    del kept_alive
    check_same(ours, plain, setup)
    assert {name: report.row(name).status for name in techniques} == dict.fromkeys(techniques, "kept")
    return ours


def undo(run: flatout.Run, setup: Setup) -> None:
    """Undo a run, and check that model, optimizer and loader have the structure that ``Setup.parts`` gave them."""
    run.undo()
    model, optimizer, _, loader = setup.parts()
    before, after = snapshot(model, optimizer), snapshot(run.model, run.optimizer)
    assert {part: after[part] for part in STRUCTURE} == {part: before[part] for part in STRUCTURE}
    places = [[(value.device, value.stride()) for value in m.state_dict().values()] for m in (model, run.model)]
    assert places[0] == places[1]
    assert type(run.loader) is type(loader)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that a block leaves no tensor on any device."""
    before = _allocated()
    yield
    assert _allocated() == before


def _allocated() -> list[int]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return [torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())]
