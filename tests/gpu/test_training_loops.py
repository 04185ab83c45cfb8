"""Training loops: other forms of batches, a user's own loop, ``fit`` with checkpoints, evaluation, commands."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import flatout
from flatout.cli import main
from tests.gpu.kinds import BATCH, KINDS
from tests.gpu.trainings import (
    Setup,
    check_same,
    nothing_left,
    optimize,
    train,
    train_plainly,
    trained,
    undo,
    whole_step,
)
from tests.jobs import NO_TECHNIQUES

GRAPHED = {"fused_optimizer": True, "cuda_graph": True}
IN_ORDER = Setup("convolutions", "adamw", max_grad_norm=0.5, is_shuffled=False)


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Iterable dataset of the samples of a setup."""

    def __init__(self, setup: Setup) -> None:
        self._samples = setup.samples()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._samples[i] for i in range(len(self._samples)))


def batches_of(setup: Setup, form: str) -> Any:
    """Return the batches of a setup, in order, in one of several forms."""
    loader = setup.loader()
    if form == "stream":
        return DataLoader(Rows(setup), batch_size=BATCH)
    if form == "list":
        return list(loader)
    return [{"x": x, "labels": {"y": y}} for x, y in loader]


def loss_of_mapping(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return KINDS["convolutions"].loss_fn(model(batch["x"]), batch["labels"]["y"])


@pytest.mark.parametrize("form", ["stream", "list", "mapping"])
def test_batches_of_other_forms(form: str) -> None:
    setup = IN_ORDER
    loss = {"compute_loss": loss_of_mapping, "loss_fn": None} if form == "mapping" else {}
    with nothing_left():
        run = optimize(setup, GRAPHED, loader=batches_of(setup, form), **loss)
        ours = train(run, setup.epochs)
        assert whole_step(run).replays
        run.undo()
        del run
    check_same(ours, train_plainly(setup), setup)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_that_a_user_writes(precision: str) -> None:
    setup = Setup("convolutions", "adamw", precision)
    with nothing_left():
        model, optimizer, _, own_loader = setup.parts()
        techniques = {name: False for name in NO_TECHNIQUES if name not in ("precision", "tf32")}
        techniques |= {"fused_optimizer": True, "channels_last": True}
        tuned, loader = flatout.optimize(
            model, own_loader, optimizer, precision=precision, techniques=techniques, budget=0
        )
        assert tuned is model
        losses = []
        for batch in (batch for _ in range(setup.epochs) for batch in loader):
            loss = setup.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        ours = trained(losses, model, optimizer, None)
        del batch, loss, losses
        flatout.undo(model)
        assert type(optimizer) is torch.optim.AdamW
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    check_same(ours, train_plainly(setup), setup)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fit_resumes_with_the_same_bits(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    setup = Setup("convolutions", "adamw", precision, has_schedule=True)
    histories, states = [], []
    with nothing_left():
        for folder, pieces in ((tmp_path / "whole", [3]), (tmp_path / "pieces", [1, 3])):
            for epochs in pieces:  # each run simulates a new process
                run = optimize(setup, GRAPHED)
                history = run.fit(epochs, IN_ORDER.loader(), progress=False, checkpoint_dir=folder, checkpoint_every=4)
                assert whole_step(run).replays
                state = io.BytesIO()
                torch.save(trained([torch.zeros(())], run.model, run.optimizer, run.scaler), state)
                undo(run, setup)
                del run
            histories.append(history)
            states.append(state.getvalue())
    assert len(histories[0]) == 3
    assert histories[0] == histories[1]
    assert states[0] == states[1]


def test_evaluation_is_that_of_the_cpu() -> None:
    setup = IN_ORDER

    def accuracy(output: Tensor, batch: Any) -> Tensor:
        return (output.argmax(1) == batch[1]).float().mean()

    with nothing_left():
        run = optimize(setup, GRAPHED)
        train(run, 1)
        found = run.evaluate(setup.loader(), {"accuracy": accuracy})
        undo(run, setup)
        model = run.model
        del run
    model.eval()
    x, y = KINDS[setup.kind].data()
    with torch.inference_mode():
        output = model(x)
    assert found["loss"] == pytest.approx(float(KINDS[setup.kind].loss_fn(output, y)), rel=1e-3)
    assert found["accuracy"] == pytest.approx(float(accuracy(output, (x, y))), abs=1 / len(y))


def test_a_profile_takes_real_steps() -> None:
    setup = Setup("convolutions")
    with nothing_left():
        run = optimize(setup, {"fused_optimizer": True})
        profile = run.profile(2, warmup=1)
        assert len(profile.steps) == 2
        assert run.steps == run.stats.steps
        undo(run, setup)
        del run, profile


@pytest.mark.parametrize("arguments", [["doctor"], ["monitor", "--once"]], ids=" ".join)
def test_commands_about_the_machine(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    assert main(["demo", "--job", "digits", "--quick", "--json", str(file)]) == 0
    assert file.exists()
