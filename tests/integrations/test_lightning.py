from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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

lightning = imported("lightning.pytorch")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from flatout.integrations.lightning import FlatoutCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Classifier with AdamW and a schedule.

    Args:
        fails_at: batch in which the user's code raises.
        error: the error that it raises.
    """

    def __init__(self, fails_at: int = -1, error: BaseException | None = None) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []
        self._fails_at, self._error = fails_at, error

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self._fails_at and self._error is not None:
            raise self._error
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHand(Classifier):
    """Classifier with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class LoggingForward(Classifier):
    """Classifier whose forward logs a metric."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        self.log("mean", output.mean(), on_step=False, on_epoch=True)
        return output


class Steps(Callback):  # type: ignore[misc]
    """Callback that records the class of the optimizer after each batch."""

    def __init__(self) -> None:
        self.classes: list[type] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.classes.append(type(trainer.optimizers[0]))


def trainer(*callbacks: Any, folder: Path | None = None, **settings: Any) -> Any:
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary", "logger"], False)
    settings = {"max_epochs": 2, "enable_checkpointing": folder is not None, "accelerator": "cpu"} | settings
    return lightning.Trainer(callbacks=[*callbacks], default_root_dir=folder, **quiet, **settings)


def fit(
    clock: Clock, *callbacks: Any, model: Classifier | None = None, ckpt_path: Path | None = None, **settings: Any
) -> tuple[Trained, Any]:
    model = model or Classifier()
    clock.slow_down(model, 0.01)
    used = trainer(*callbacks, **settings)
    torch.manual_seed(1)
    used.fit(model, DataLoader(samples(), batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    return Trained(model, model.losses), used


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"precision": "64-true"},
    ],
    ids=str,
)
def test_trials_leave_no_trace_in_a_fit(settings: dict[str, Any], clock: Clock, dry_run: None) -> None:
    expected = fit(clock, **settings)[0].bits()
    callback = FlatoutCallback(**QUICK)
    trained, used = fit(clock, callback, **settings)
    assert trained.bits() == expected
    assert was_tried(callback.report)
    assert type(trained.model) is Classifier
    assert type(used.optimizers[0]) is torch.optim.AdamW


def test_manual_optimization_is_tuned_too(clock: Clock) -> None:
    expected = fit(clock, model=ByHand())[0]
    callback, steps = FlatoutCallback(**FUSED), Steps()
    found = fit(clock, callback, steps, model=ByHand())[0]
    assert issubclass(steps.classes[-1], NativeStep)
    assert_close(found.losses, expected.losses)


def test_a_forward_that_logs_trains_the_same(clock: Clock, dry_run: None) -> None:
    expected, before = fit(clock, model=LoggingForward(), max_epochs=1)
    callback = FlatoutCallback(**QUICK)
    found, after = fit(clock, callback, model=LoggingForward(), max_epochs=1)
    assert was_tried(callback.report)
    assert found.bits() == expected.bits()
    assert after.logged_metrics == before.logged_metrics


def test_what_is_kept_is_undone_after_each_fit(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    expected = fit(clock, gradient_clip_val=0.1)[0]
    callback = FlatoutCallback(**FUSED)
    for _ in range(2):
        steps = Steps()
        found, used = fit(clock, callback, steps, gradient_clip_val=0.1)
        assert steps.classes[0] is torch.optim.AdamW
        assert issubclass(steps.classes[-1], NativeStep)
        assert type(used.optimizers[0]) is torch.optim.AdamW
        assert statuses(callback.report)["fused_optimizer"] == "kept"
        assert_close(found.losses, expected.losses)
        assert vars(found.model).keys() == vars(expected.model).keys()
        assert "flatout: Classifier" in capsys.readouterr().err


def test_one_trainer_fits_twice(clock: Clock) -> None:
    steps = Steps()
    trained, used = fit(clock, FlatoutCallback(**FUSED), steps, max_epochs=1)
    used.fit_loop.max_epochs = 2
    steps.classes.clear()
    used.fit(trained.model, DataLoader(samples(), batch_size=2))
    assert issubclass(steps.classes[-1], NativeStep)
    assert type(used.optimizers[0]) is torch.optim.AdamW


@pytest.mark.parametrize("saved_by", ["plain", "tuned"])
def test_a_checkpoint_of_a_tuned_fit_resumes_as_that_of_a_plain_one(
    saved_by: str, clock: Clock, tmp_path: Path
) -> None:
    def saved(folder: str, *callbacks: Any) -> Path:
        checkpoint = ModelCheckpoint(dirpath=tmp_path / folder, filename="last", every_n_train_steps=UPDATES)
        fit(clock, *callbacks, checkpoint, max_epochs=1, folder=tmp_path)
        return tmp_path / folder / "last.ckpt"

    plain, tuned = saved("plain"), saved("tuned", FlatoutCallback(**FUSED))
    one, other = (torch.load(path, weights_only=True) for path in (plain, tuned))
    assert one.keys() == other.keys()
    assert one["state_dict"].keys() == other["state_dict"].keys()
    states = [each["optimizer_states"][0] for each in (one, other)]
    assert [state.keys() for state in states[0]["state"].values()] == [s.keys() for s in states[1]["state"].values()]
    assert states[0]["param_groups"][0].keys() == states[1]["param_groups"][0].keys()

    resumed = fit(clock, ckpt_path=plain)[0]
    callback = FlatoutCallback(**FUSED)
    found = fit(clock, callback, ckpt_path=tuned if saved_by == "tuned" else plain)[0]
    assert statuses(callback.report)["fused_optimizer"] == "kept"
    assert len(found.losses) == UPDATES
    assert_close(found.losses, resumed.losses)


@pytest.mark.parametrize("error", [UserError("mine"), torch.OutOfMemoryError("mine")], ids=repr)
def test_an_error_of_the_user_passes_and_ends_the_tuning(error: Exception, clock: Clock) -> None:
    model, steps, callback = Classifier(UPDATES - 2, error), Steps(), FlatoutCallback(**FUSED)
    with pytest.raises(type(error)) as raised:
        fit(clock, callback, steps, model=model)
    assert raised.value is error
    assert issubclass(steps.classes[-1], NativeStep)
    optimizer = model.optimizers(use_pl_optimizer=False)
    assert type(optimizer) is torch.optim.AdamW
    assert statuses(callback.report)["fused_optimizer"] == "kept"


def test_a_fit_that_trains_nothing_ends_the_tuning(clock: Clock) -> None:
    callback = FlatoutCallback()
    fit(clock, callback, max_epochs=0)
    assert callback.report is not None
    assert callback.report.updates == 0


def test_the_loader_of_the_first_epoch_is_known(clock: Clock) -> None:
    seen: list[list[float]] = []
    for callbacks in ([], [FlatoutCallback(**IN_MEMORY)]):
        seen.append(fit(clock, *callbacks, max_epochs=4)[0].losses)
    assert seen[0] == seen[1]
    (callback,) = callbacks
    assert statuses(callback.report)["in_memory"] == "kept"


def test_validation_between_does_not_matter(clock: Clock, dry_run: None) -> None:
    losses = []
    for callbacks in ([], [FlatoutCallback(**QUICK)]):
        model = Classifier()
        clock.slow_down(model, 0.01)
        torch.manual_seed(1)
        used = trainer(*callbacks, val_check_interval=7)
        used.fit(model, DataLoader(samples(), batch_size=2, shuffle=True), DataLoader(samples(), batch_size=8))
        losses.append((model.losses, used.callback_metrics["val_loss"].item()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_scaler_of_the_trainer_excludes_the_native_step(scaled: bool, clock: Clock) -> None:
    """Lightning refuses to clip gradients that a native step would unscale."""

    class Slow(Classifier):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            slow_without_native_step(clock, self, [made["optimizer"]])
            return made

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    callback = FlatoutCallback(techniques=dict.fromkeys(["compile", "workers", "in_memory", "precision"], False))
    fit(clock, callback, model=Slow(), plugins=plugins, gradient_clip_val=0.1, max_epochs=20)
    assert (statuses(callback.report).get("fused_optimizer") == "kept") is not scaled


@pytest.mark.parametrize(("precision", "options", "is_open"), [
    ("32-true", {}, True),
    ("bf16-mixed", {}, False),
    ("32-true", {"precision": "fp32"}, False),
])  # fmt: skip
def test_the_precision_of_the_trainer_stays(
    precision: str, options: dict[str, Any], is_open: bool, clock: Clock
) -> None:
    dtypes: set[torch.dtype] = set()

    class Seen(Classifier):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            dtypes.add(output.dtype)
            return output

    techniques = dict.fromkeys(["compile", "workers", "in_memory"], False)
    callback = FlatoutCallback(techniques=techniques, **options)
    fit(clock, callback, model=Seen(), precision=precision)
    row = next(row for row in callback.report.modules[0].report.rows if row.technique == "precision")  # type: ignore[union-attr]
    assert row.left_out is not is_open
    assert (torch.float32 in dtypes) is (precision == "32-true")


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="no_such"):
        FlatoutCallback(techniques={"no_such": True})
    with pytest.raises(TypeError, match="budget"):
        FlatoutCallback(budget=3)  # type: ignore[call-arg]


def test_the_trainer_of_pytorch_lightning_is_served(clock: Clock) -> None:
    other = imported("pytorch_lightning")

    class Plain(other.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = network()

        def training_step(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    model, callback = Plain(), FlatoutCallback(**FUSED)
    clock.slow_down(model.net, 0.01)
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"], False)
    used = other.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet)
    used.fit(model, DataLoader(samples(), batch_size=2))
    assert statuses(callback.report)["fused_optimizer"] == "kept"
