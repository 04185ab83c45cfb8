from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.optim.native_step import NativeStep
from tests.clock import Clock
from tests.frameworks import imported
from tests.integrations.harness import (
    FUSED,
    IN_MEMORY,
    QUICK,
    Trained,
    UserError,
    assert_close,
    statuses,
    was_tried,
)

transformers = imported("transformers")
imported("accelerate")

from flatout.integrations.transformers import FlatoutCallback, fused_optimizer  # noqa: E402

SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8, "bos_token_id": 0}


class Steps(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Callback that records the class of the optimizer after each step, and fails at one step.

    Args:
        fails_at: step at which the user's code raises.
        error: the error that it raises.
    """

    def __init__(self, fails_at: int = -1, error: BaseException | None = None) -> None:
        self.classes: list[type] = []
        self._fails_at, self._error = fails_at, error

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.classes.append(type(optimizer.optimizer))
        if state.global_step == self._fails_at and self._error is not None:
            raise self._error


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples for 40 batches of two.

    Args:
        clock: the clock that each sample advances.
        seconds: time to load a sample.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._ids = torch.randint(0, 32, (80, 8), generator=torch.Generator().manual_seed(0))
        self._clock, self._seconds = clock, seconds

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self._clock.advance(self._seconds)
        return {"input_ids": self._ids[i], "labels": self._ids[i]}


def arguments(folder: Path, **settings: Any) -> Any:
    """Return arguments of a short training."""
    quiet = {"disable_tqdm": True, "report_to": [], "logging_steps": 1, "save_strategy": "no"}
    short = {"use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**quiet, **short, **settings})


def trainer(clock: Clock, args: Any, *callbacks: Any, load_seconds: float = 0.0, **given: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, eos_token_id=0))
    clock.slow_down(model, 0.01)
    made = transformers.Trainer(
        model=model, args=args, train_dataset=Sequences(clock, load_seconds), callbacks=[*callbacks], **given
    )
    made.remove_callback(transformers.trainer_callback.PrinterCallback)
    return made


def train(used: Any, **resuming: Any) -> Trained:
    torch.manual_seed(1)
    used.train(**resuming)
    return Trained(used.model, [entry["loss"] for entry in used.state.log_history if "loss" in entry])


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"bf16": True}], ids=str
)
def test_trials_leave_no_trace_in_a_training(
    settings: dict[str, Any], clock: Clock, dry_run: None, tmp_path: Path
) -> None:
    plain = trainer(clock, arguments(tmp_path, **settings))
    expected = train(plain).bits()
    callback = FlatoutCallback(**QUICK)
    tuned = trainer(clock, arguments(tmp_path, **settings), callback)
    assert train(tuned).bits() == expected
    assert was_tried(callback.report)
    assert type(tuned.model) is transformers.GPT2LMHeadModel
    assert vars(tuned.model).keys() == vars(plain.model).keys()
    assert type(tuned.optimizer.optimizer) is torch.optim.AdamW


def test_what_is_kept_is_undone_after_each_training(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(trainer(clock, arguments(tmp_path)))
    steps, callback = Steps(), FlatoutCallback(**FUSED)
    used = trainer(clock, arguments(tmp_path), callback, steps)
    for trainings in range(2):
        steps.classes.clear()
        found = train(used)
        assert steps.classes[0] is torch.optim.AdamW
        assert issubclass(steps.classes[-1], NativeStep)
        assert type(used.optimizer.optimizer) is torch.optim.AdamW
        assert statuses(callback.report)["fused_optimizer"] == "kept"
        assert "flatout: GPT2LMHeadModel" in capsys.readouterr().err
        if not trainings:
            assert_close(found.losses, expected.losses)


@pytest.mark.parametrize("saved_by", ["plain", "tuned"])
def test_a_checkpoint_of_a_tuned_training_resumes_as_that_of_a_plain_one(
    saved_by: str, clock: Clock, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 60}

    def saved(folder: str, *callbacks: Any) -> Path:
        used = trainer(clock, arguments(tmp_path / folder, **saving), *callbacks)
        train(used)
        used.save_model(str(tmp_path / folder / "model"))
        return tmp_path / folder / "checkpoint-60"

    plain, tuned = saved("plain"), saved("tuned", FlatoutCallback(**FUSED))
    assert {path.name for path in plain.iterdir()} == {path.name for path in tuned.iterdir()}
    one, other = (torch.load(path / "optimizer.pt", weights_only=True) for path in (plain, tuned))
    assert one["param_groups"][0].keys() == other["param_groups"][0].keys()
    assert [state.keys() for state in one["state"].values()] == [state.keys() for state in other["state"].values()]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned" / "model")
    assert type(loaded) is transformers.GPT2LMHeadModel

    args = arguments(tmp_path / "resumed")
    expected = train(trainer(clock, args), resume_from_checkpoint=str(plain))
    used = trainer(clock, args, FlatoutCallback(**FUSED))
    found = train(used, resume_from_checkpoint=str(tuned if saved_by == "tuned" else plain))
    assert len(found.losses) == 80
    assert_close(found.losses, expected.losses)


def test_an_error_of_the_user_passes_and_undo_ends_the_tuning(clock: Clock, tmp_path: Path) -> None:
    error, callback = UserError("mine"), FlatoutCallback(**FUSED)
    steps = Steps(70, error)
    used = trainer(clock, arguments(tmp_path), callback, steps)
    with pytest.raises(UserError) as raised:
        train(used)
    assert raised.value is error
    assert issubclass(steps.classes[-1], NativeStep)
    callback.undo()
    assert type(used.optimizer.optimizer) is torch.optim.AdamW
    assert statuses(callback.report)["fused_optimizer"] == "kept"


def test_a_training_after_an_error_is_tuned_anew(clock: Clock, tmp_path: Path) -> None:
    callback, steps = FlatoutCallback(**FUSED), Steps(70, UserError("mine"))
    used = trainer(clock, arguments(tmp_path), callback, steps)
    with pytest.raises(UserError):
        train(used)
    used.remove_callback(steps)
    train(used)
    assert type(used.optimizer.optimizer) is torch.optim.AdamW
    assert statuses(callback.report)["fused_optimizer"] == "kept"


def test_the_loader_of_the_trainer_is_served_from_memory(clock: Clock, tmp_path: Path) -> None:
    args, callback = arguments(tmp_path, num_train_epochs=4), FlatoutCallback(**IN_MEMORY)
    expected = train(trainer(clock, args, load_seconds=0.01))
    found = train(trainer(clock, args, callback, load_seconds=0.01))
    assert found.losses == expected.losses
    assert statuses(callback.report)["in_memory"] == "kept"


@pytest.mark.parametrize("bf16", [False, True])
def test_the_precision_of_the_arguments_stays(bf16: bool, clock: Clock, tmp_path: Path) -> None:
    callback = FlatoutCallback(techniques=dict.fromkeys(["compile", "workers", "in_memory"], False))
    train(trainer(clock, arguments(tmp_path, bf16=bf16), callback))
    assert callback.report is not None
    row = next(row for row in callback.report.modules[0].report.rows if row.technique == "precision")
    assert row.left_out is bf16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_torch", flatout.optim.AdamW),
        ("adamw_torch_fused", flatout.optim.AdamW),
        ("sgd", flatout.optim.SGD),
    ],
)
def test_the_optimizer_of_the_arguments_with_a_native_step(
    name: str, expected: type, clock: Clock, tmp_path: Path
) -> None:
    args = arguments(tmp_path, optim=name, adam_beta2=0.9, weight_decay=0.1)
    plain = trainer(clock, args)
    native = trainer(clock, args, optimizer_cls_and_kwargs=fused_optimizer(args))
    assert_close(train(native).losses, train(plain).losses)
    made = native.optimizer.optimizer
    assert type(made) is expected
    groups = [[len(group["params"]) for group in each.optimizer.optimizer.param_groups] for each in (native, plain)]
    assert groups[0] == groups[1]
    names = [name for name in plain.optimizer.optimizer.defaults if name not in ("fused", "foreach")]
    assert {name: made.defaults[name] for name in names} == {
        name: plain.optimizer.optimizer.defaults[name] for name in names
    }


def test_additions_to_the_optimizer(tmp_path: Path) -> None:
    cls, kwargs = fused_optimizer(arguments(tmp_path), ema_decay=0.9)
    assert cls([nn.Parameter(torch.zeros(2))], **kwargs).defaults["ema_decay"] == 0.9


def test_an_optimizer_without_a_native_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adafactor"):
        fused_optimizer(arguments(tmp_path, optim="adafactor"))
