"""Two return values with an optimizer: ``optimize`` does not know the loss of the user's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.optim.native_step import NativeStep
from flatout.training.objective import stand_in
from tests.helpers import trained_state
from tests.jobs import QUICK, train
from tests.own_loops.harness import EXACT, make, sgd

FUSED = EXACT | {"fused_optimizer": True}


@pytest.fixture(autouse=True)
def plans_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", "off")


def trained(tunes: bool) -> tuple[list[float], dict[str, Tensor], torch.optim.Optimizer]:
    model, loader = make()
    optimizer = sgd(model)
    if tunes:
        before = trained_state(model)
        model, loader = flatout.optimize(model, loader, optimizer, techniques=FUSED, budget=0)
        assert trained_state(model) == before
        assert not optimizer.state
    torch.manual_seed(7)
    losses = train(model, loader, optimizer, epochs=2)
    return losses, model.state_dict(), optimizer


def test_the_optimizer_is_fused_and_training_is_the_same() -> None:
    losses, state, _ = trained(tunes=False)
    ours, our_state, optimizer = trained(tunes=True)
    assert isinstance(optimizer, NativeStep)
    assert ours == pytest.approx(losses, rel=1e-4)
    for name, tensor in our_state.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-6)


def test_trials_with_the_optimizer_leave_no_trace() -> None:
    model, loader = make()
    optimizer = sgd(model)
    before, kind = trained_state(model), type(optimizer)
    run = flatout.optimize(model, loader, optimizer, techniques=QUICK | {"fused_optimizer": None}, budget=20)
    assert run.report.row("fused_optimizer").trials
    assert trained_state(model) == before
    assert not optimizer.state
    run.undo()
    assert type(optimizer) is kind


# -- messages ---------------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, **more: Any) -> list[str]:
    """Return the lines on stderr of a run that is unpacked twice."""
    run = flatout.optimize(*arguments, techniques=more.pop("techniques", FUSED), budget=0, **more)
    capsys.readouterr()
    (first, _), (second, _) = run, run
    assert first is second
    told = capsys.readouterr()
    assert not told.out
    return told.err.splitlines()


def test_unpacking_says_once_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model, loader = make()
    lines = said(capsys, model, loader, sgd(model))
    assert len(lines) == 3
    assert all(line.startswith("flatout: ") for line in lines)
    assert "fused_optimizer" in lines[0]
    assert "optimizer.step" in lines[1]


@pytest.mark.parametrize(
    ("argument", "value"), [("max_grad_norm", 1.0), ("accumulate", 2), ("batch_size", 32), ("precision", "fp16")]
)
def test_unpacking_names_what_only_a_step_of_the_run_does(
    argument: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loader = make()
    more = {argument: value, "techniques": {"fused_optimizer": True}}
    lines = said(capsys, model, loader, sgd(model), nn.functional.cross_entropy, **more)
    named = {"precision": "scaler", "batch_size": "learning"}.get(argument, argument)
    assert named in lines[1]
    assert "run.step" in lines[1]


def test_unpacking_without_an_optimizer_shows_how_to_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    model, loader = make()
    assert "(model, loader, optimizer)" in said(capsys, model, loader, techniques=QUICK)[1]


def test_no_progress_means_no_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_PROGRESS", "0")
    model, loader = make()
    assert said(capsys, model, loader, sgd(model)) == []


# -- requirements of a loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 2}, {"max_grad_norm": 1.0}, {"batch_size": "auto"}, {"batch_size": 8}, {"memory_limit": 2**30}],
    ids=str,
)
def test_arguments_of_the_step_of_the_run_need_the_loss(more: dict[str, Any]) -> None:
    model, loader = make()
    before, kind = trained_state(model), type(model)
    with pytest.raises(
        ValueError, match=r"compute_loss=lambda model, batch: loss_fn\(model\(batch\[0\]\), batch\[1\]\)"
    ):
        flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0, **more)
    assert trained_state(model) == before
    assert type(model) is kind


def test_a_scheduler_needs_the_loss() -> None:
    model, loader = make()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match="compute_loss"):
        flatout.optimize(model, loader, optimizer, scheduler=scheduler, budget=0)


def test_step_and_fit_name_the_loss_to_give() -> None:
    model, loader = make()
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0)
    before = trained_state(model)["parameters"]
    with pytest.raises(RuntimeError, match="compute_loss"):
        run.step(next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="compute_loss"):
        run.fit(1, progress=False)
    assert trained_state(model)["parameters"] == before


def test_evaluation_has_no_loss_but_metrics() -> None:
    model, loader = make()
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0)
    accuracy = {"accuracy": lambda output, batch: (output.argmax(-1) == batch[1]).float().mean()}
    assert run.evaluate(loader, accuracy).keys() == {"accuracy"}


def test_rules_are_those_of_a_loop_of_your_own() -> None:
    model, loader = make()
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK | {"evaluation": False}, budget=0)
    assert run.report.row("oom_recovery").status == "not applicable"
    assert run.report.row("evaluation").status == "not tried"


def test_a_model_that_returns_its_loss_still_steps() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    model = WithLoss()
    loader = [{"x": torch.randn(8, 4), "y": torch.randint(0, 2, (8,))} for _ in range(3)]
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0)
    assert run.step(loader[0]).dim() == 0


# -- loss of trials ---------------------------------------------------------------------------------------------------


def test_the_stand_in_moves_outputs_of_zero_and_has_a_minimum() -> None:
    outputs = {
        "a": torch.zeros(3, 2, requires_grad=True),
        "b": torch.zeros(5, requires_grad=True),
        "ids": torch.ones(2),
    }
    stand_in({**outputs, "ids": torch.ones(2, dtype=torch.long)}).backward()
    assert (outputs["a"].grad != 0).all()
    assert (outputs["b"].grad != 0).all()
    assert stand_in([torch.ones(4), torch.ones(2, 2)]) == 0


def test_outputs_without_floating_point_numbers_are_refused() -> None:
    class Labels(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    model = Labels(4, 2)
    with pytest.raises(ValueError, match="trainable"):
        flatout.optimize(model, [(torch.randn(8, 4), torch.zeros(8))] * 3, sgd(model), budget=0)


# -- report_of --------------------------------------------------------------------------------------------------------


def test_report_of_finds_the_report_until_undo() -> None:
    model, loader = make()
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0)
    assert flatout.report_of(model) is run.report
    flatout.undo(model)
    with pytest.raises(ValueError, match="optimize"):
        flatout.report_of(model)


def test_a_failed_tuning_keeps_the_earlier_report() -> None:
    model, loader = make()
    run = flatout.optimize(model, loader, sgd(model), techniques=QUICK, budget=0)
    with pytest.raises(ValueError, match="empty"):
        flatout.optimize(model, [], sgd(model), techniques=QUICK, budget=0)
    assert flatout.report_of(model) is run.report


def test_report_of_a_model_that_auto_tunes() -> None:
    model, loader = make()

    def steps() -> Iterator[Any]:
        while True:
            yield from loader

    optimizer = sgd(model)
    with flatout.auto(techniques=QUICK) as tuning:
        with pytest.raises(ValueError, match="tuned"):
            flatout.report_of(model)
        for x, y in steps():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if tuning.report.modules:
                break
        assert flatout.report_of(model).rows
