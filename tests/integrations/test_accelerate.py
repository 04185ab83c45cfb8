from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from flatout.optim.native_step import NativeStep
from tests.clock import Clock
from tests.frameworks import imported
from tests.integrations.harness import (
    FUSED,
    IN_MEMORY,
    QUICK,
    UPDATES,
    Trained,
    UserError,
    assert_close,
    network,
    samples,
    slow_without_native_step,
    statuses,
    was_tried,
)

accelerate = imported("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402

from flatout.integrations.accelerate import tuned  # noqa: E402


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    """Reset accelerate's state, which all accelerators of a process share."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """Training loop from accelerate's documentation.

    Args:
        clock: the clock that each forward advances.
        scaler: loss scaler of the accelerator, as with ``mixed_precision="fp16"`` on a GPU.
        settings: arguments of the accelerator.
    """

    def __init__(self, clock: Clock, scaler: torch.amp.GradScaler | None = None, **settings: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        self.accelerator.scaler = scaler
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        slow_without_native_step(clock, model, [optimizer])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        loader = DataLoader(samples(), batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.losses: list[float] = []

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Optimizer that accelerate wraps."""
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer

    def epoch(self, at_end: Callable[[], object] = lambda: None) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
        at_end()

    def train(self, epochs: int = 2, **options: Any) -> tuple[Trained, Any]:
        torch.manual_seed(1)
        with tuned(self.accelerator, **options) if options else contextlib.nullcontext() as tuning:
            for _ in range(epochs):
                self.epoch()
        return Trained(self.model, self.losses), tuning and tuning.report


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str
)  # fmt: skip
def test_trials_leave_no_trace_in_a_loop(settings: dict[str, Any], clock: Clock, dry_run: None) -> None:
    expected = Loop(clock, **settings).train()[0].bits()
    loop = Loop(clock, **settings)
    attributes = vars(loop.model).keys()
    trained, report = loop.train(**QUICK)
    assert trained.bits() == expected
    assert was_tried(report)
    assert type(loop.model) is nn.Sequential
    assert vars(loop.model).keys() == attributes
    assert type(loop.inner) is torch.optim.AdamW


def test_what_is_kept_is_undone_after_each_block(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    plain, loop, classes = Loop(clock), Loop(clock), list[type]()
    for _ in range(2):
        expected, _ = plain.train()
        torch.manual_seed(1)
        with tuned(loop.accelerator, **FUSED) as tuning:
            for _ in range(2):
                loop.epoch(lambda: classes.append(type(loop.inner)))
        assert issubclass(classes[-1], NativeStep)
        assert type(loop.inner) is torch.optim.AdamW
        assert statuses(tuning.report)["fused_optimizer"] == "kept"
        assert_close(loop.losses, expected.losses)
        assert "flatout: Sequential" in capsys.readouterr().err


@pytest.mark.parametrize("saved_by", ["plain", "tuned"])
def test_a_state_that_is_saved_while_tuned_is_loaded_by_plain_loops(
    saved_by: str, clock: Clock, tmp_path: Path
) -> None:
    def resumed(loop: Loop, options: dict[str, Any]) -> list[float]:
        loop.accelerator.load_state(tmp_path)
        loop.losses.clear()
        return loop.train(**options)[0].losses

    saving = Loop(clock)
    with tuned(saving.accelerator, **FUSED) if saved_by == "tuned" else contextlib.nullcontext():
        saving.epoch(lambda: saving.accelerator.save_state(tmp_path))
    assert torch.load(tmp_path / "optimizer.bin", weights_only=True).keys() == {"state", "param_groups"}
    expected = resumed(Loop(clock), {})
    assert len(expected) == 2 * UPDATES
    assert_close(resumed(Loop(clock), FUSED), expected)


def test_an_error_of_the_user_passes_and_ends_the_tuning(clock: Clock) -> None:
    loop, error, classes = Loop(clock), UserError("mine"), list[type]()

    def fail() -> None:
        classes.append(type(loop.inner))
        raise error

    with pytest.raises(UserError) as raised, tuned(loop.accelerator, **FUSED) as tuning:
        loop.epoch(fail)
    assert raised.value is error
    assert issubclass(classes[0], NativeStep)
    assert type(loop.inner) is torch.optim.AdamW
    assert statuses(tuning.report)["fused_optimizer"] == "kept"


def test_the_loader_behind_accelerates_is_served_from_memory(clock: Clock) -> None:
    expected = Loop(clock).train(epochs=4)[0].losses
    trained, report = Loop(clock).train(epochs=4, **IN_MEMORY)
    assert statuses(report)["in_memory"] == "kept"
    assert trained.losses == expected


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_scaler_of_the_accelerator_excludes_the_native_step(scaled: bool, clock: Clock) -> None:
    """accelerate replaces the ``step`` of the instance around each update. A native step would be lost."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    techniques = dict.fromkeys(["compile", "workers", "in_memory", "precision"], False)
    _, report = Loop(clock, scaler).train(epochs=20, techniques=techniques)
    assert (statuses(report).get("fused_optimizer") == "kept") is not scaled


@pytest.mark.parametrize(("mixed_precision", "precision", "is_open"), [
    ("no", "auto", True),
    ("bf16", "auto", False),
    ("no", "fp32", False),
])  # fmt: skip
def test_the_precision_of_the_accelerator_stays(
    mixed_precision: str, precision: str, is_open: bool, clock: Clock
) -> None:
    techniques = dict.fromkeys(["compile", "workers", "in_memory"], False)
    loop = Loop(clock, mixed_precision=mixed_precision)
    _, report = loop.train(techniques=techniques, precision=precision)
    row = next(row for row in report.modules[0].report.rows if row.technique == "precision")
    assert row.left_out is not is_open


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="no_such"), tuned(accelerate.Accelerator(cpu=True), techniques={"no_such": 1}):
        pass
