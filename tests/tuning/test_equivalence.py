"""Comparison of outputs, gradients and losses between a candidate and the baseline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.snapshot import Snapshot
from flatout.techniques import Candidate
from flatout.techniques.precision import autocast_candidate
from flatout.training.job import Job
from flatout.training.tolerance import ALLOWED, apart, compute_dtype
from flatout.tuning.numerics import Observed, compare, nudge, observe
from tests.clock import Clock, TimedStep
from tests.helpers import snapshot
from tests.jobs import Net, job_of, make_data, make_job
from tests.reasons import reasons
from tests.tuning.harness import Change, OneCandidate


def make(model: nn.Module, *, optimizer: bool = True, **settings: Any) -> tuple[Job, list[Any]]:
    batches = list(DataLoader(make_data(64), batch_size=16))
    opt = torch.optim.Adam(model.parameters(), 0.01) if optimizer else None
    return job_of(model, batches, opt, loss_fn=functional.cross_entropy, **settings), batches


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_shows_all_three(accumulate: int) -> None:
    job, batches = make(Net(), accumulate=accumulate)
    seen = observe(job, batches, evaluation=True)
    assert [t.shape for t in seen.outputs.values()] == [(16, 3)] * 4
    assert sum("in eval mode" in name for name in seen.outputs) == 2
    assert seen.gradients.keys() == dict(job.spec.model.named_parameters()).keys()
    assert len(seen.losses) == 8 * accumulate
    assert job.spec.model.training


def test_what_there_is_without_an_optimizer_and_in_inference() -> None:
    job, batches = make(Net(), optimizer=False)
    seen = observe(job, batches)
    assert (len(seen.outputs), len(seen.losses)) == (4, 0)
    assert seen.gradients
    job, batches = make(Net().eval(), optimizer=False, inference=True)
    seen = observe(job, batches)
    assert (len(seen.outputs), len(seen.gradients), len(seen.losses)) == (4, 0, 0)


@pytest.mark.parametrize("reads_updates", [False, True])
def test_an_optimizer_of_the_last_layer_has_its_own_gradients(reads_updates: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    batches = list(DataLoader(make_data(64), batch_size=16))
    job = job_of(model, batches, torch.optim.SGD(model[1].parameters(), 0.01), loss_fn=functional.cross_entropy)
    assert observe(job, batches, reads_updates=reads_updates).gradients.keys() == {"1.weight", "1.bias"}


def test_gradients_are_those_of_the_first_batch() -> None:
    job, batches = make(nn.Linear(8, 3), optimizer=False)
    several, one = observe(job, batches), observe(job, batches[:1])
    assert apart(one.gradients, several.gradients)[0] == 0


def test_gradients_and_losses_are_those_of_the_loss_that_steps_compute() -> None:
    job, batches = make(Net())
    state = Snapshot.capture(job.spec.modules, job.spec.optimizer)
    plain = observe(job, batches)
    state.restore()
    job.objective.compiled = lambda batch: 3 * job.objective.loss(batch)
    by = {d.what: d.by for d in compare(plain, observe(job, batches))}
    assert by["gradients"] == pytest.approx(2)
    assert by["losses"] == pytest.approx(2, rel=0.01)  # Adam's steps hardly depend on the gradients' size


def test_each_of_the_three_differences_fails_alone_with_its_reason() -> None:
    ones = {"a": torch.ones(4), "b": torch.ones(2)}
    same = Observed(torch.float32, ones, ones, {"1": torch.ones(())})
    assert not any(d.fails for d in compare(same, same))
    wrong = {"a": torch.ones(4), "b": torch.tensor([1.0, 1.5])}
    cases = {
        "outputs": (Observed(torch.float32, wrong, ones, same.losses), 0.125**0.5, "b"),
        "gradients": (Observed(torch.float32, ones, wrong, same.losses), 0.125**0.5, "b"),
        "losses": (Observed(torch.float32, ones, ones, {"1": torch.tensor(1.25)}), 0.25, ""),
    }
    for what, (candidate, by, where) in cases.items():
        (failing,) = [d for d in compare(same, candidate) if d.fails]
        allowed = getattr(ALLOWED[torch.float32], what)
        assert (failing.what, failing.where, failing.allowed) == (what, where, allowed)
        assert failing.by == pytest.approx(by)
        assert "numerics-differ" in reasons(str(failing))


@pytest.mark.parametrize("other", [{}, {"a": torch.ones(3)}, {"a": torch.full((2,), torch.nan)}])
def test_missing_tensors_other_shapes_and_nan_are_infinitely_far(other: dict[str, torch.Tensor]) -> None:
    here = {"a": torch.ones(2)}
    assert apart(here, other) == (float("inf"), "a")
    assert apart(other, here)[0] == float("inf")


@given(st.floats(0.01, 10.0), st.integers(1, 30), st.sampled_from(["a", "b"]))
def test_the_difference_is_relative_to_the_tensor(by: float, size: int, where: str) -> None:
    generator = torch.Generator().manual_seed(size)
    old = {name: torch.randn(size, generator=generator) for name in ("a", "b")}
    new = {name: t * (1 + by) if name == where else t for name, t in old.items()}
    far, name = apart(old, new)
    assert name == where
    assert far <= by * 1.001
    if old[where].norm() > 0.1 * max(t.norm() for t in old.values()):
        assert far == pytest.approx(by, rel=1e-3)


def test_a_tensor_of_nothing_but_rounding_does_not_count_by_its_own_size() -> None:
    old = {"weight": torch.ones(100), "bias": torch.full((10,), 1e-9)}
    assert apart(old, old | {"bias": torch.full((10,), -1e-9)})[0] < 1e-6
    assert apart(old, old | {"bias": torch.full((10,), 0.1)})[0] > 0.5


@pytest.mark.parametrize("nothing", [{}, {"a": torch.empty(0, 3)}])
def test_nothing_does_not_differ_from_nothing(nothing: dict[str, torch.Tensor]) -> None:
    assert apart(nothing, nothing) == (0.0, "")


def test_differences_are_computed_on_the_device_of_the_tensors() -> None:
    old, new = {"a": torch.ones(4)}, {"a": torch.full((4,), 1.5)}
    with torch.device("meta"):
        assert apart(old, new) == (0.5, "a")


def test_the_coarser_of_the_two_dtypes_sets_the_tolerance() -> None:
    model = Net()
    switch = autocast_candidate(model, "cpu", "bf16")
    assert compute_dtype(model) is torch.float32
    switch.enable()
    assert compute_dtype(model) is torch.bfloat16
    ones = {"a": torch.ones(())}
    fine, coarse = Observed(torch.float32, ones, ones, ones), Observed(torch.bfloat16, ones, ones, ones)
    for pair in ((fine, coarse), (coarse, fine), (coarse, coarse)):
        allowed = ALLOWED[torch.bfloat16]
        assert [d.allowed for d in compare(*pair)] == [allowed.outputs, allowed.gradients, allowed.losses]
    assert ALLOWED[torch.float32].losses < ALLOWED[torch.bfloat16].losses
    assert compute_dtype(Net().double()) is torch.float64


def test_nudging_stays_within_half_a_unit_in_the_last_place() -> None:
    model = Net()
    before = [p.clone() for p in model.parameters()]
    nudge(model, torch.bfloat16)
    for old, new in zip(before, model.parameters(), strict=True):
        assert ((new - old).abs() <= old.abs() * 2.0**-8 * 1.001).all()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Wrong(OneCandidate):
    """Candidate that changes the outputs, only the gradients, or the updates of a model."""

    def __init__(self, how: str) -> None:
        self._how = how

    def change(self, job: Any) -> Candidate:
        layer, hooks = job.spec.model.body[-1], []

        def on() -> None:
            if self._how == "outputs":
                hooks.append(layer.register_forward_hook(lambda module, args, output: output * 1.2))
            elif self._how == "gradients":
                hooks.append(layer.weight.register_hook(lambda gradient: gradient * 1.2))
            else:
                hooks.append(job.spec.optimizer.register_step_post_hook(lambda *_: layer.weight.data.mul_(3)))

        return Change("wrong", on, lambda: hooks.pop().remove())


@pytest.mark.parametrize("how", ["outputs", "gradients", "losses"])
def test_a_failing_candidates_row_shows_how_far_it_was_off(how: str, the_only_techniques: Any, clock: Clock) -> None:
    the_only_techniques(Wrong(how))
    model, loader, opt = make_job()
    before = snapshot(model, opt)
    run = flatout.optimize(model, loader, opt, TimedStep(clock), budget=1000)
    row = run.report.row(Wrong.name)
    assert row.status == "rejected"
    (trial,) = row.trials
    assert "numerics-differ" in reasons(trial.failure)
    far = {
        "outputs": trial.output_difference,
        "gradients": trial.gradient_difference,
        "losses": trial.loss_difference,
    }
    assert far[how] > getattr(ALLOWED[torch.float32], how)
    assert (trial.output_difference > 0.1) == (how == "outputs")
    run.undo()
    assert snapshot(model, opt) == before


def test_a_model_that_multiplies_rounding_errors_keeps_its_16_bits(clock: Clock) -> None:
    """A failed comparison is repeated against nudged weights. Fixed tolerances alone would reject the candidate."""

    class Fragile(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float() - 30

    torch.manual_seed(0)
    model = Fragile(8, 3)
    nn.init.constant_(model.bias, 30.0)
    data = TensorDataset(torch.randn(64, 8) / 3, torch.randn(64, 3))
    run = flatout.optimize(
        model,
        DataLoader(data, batch_size=16),
        torch.optim.SGD(model.parameters(), 1e-9),
        TimedStep(clock, 1.0, functional.mse_loss),
        techniques={"compile": False, "workers": False, "in_memory": False, "fused_optimizer": False},
        budget=1000,
    )
    (trial,) = run.report.row("precision").trials
    assert trial.output_difference > ALLOWED[torch.bfloat16].outputs
    assert not trial.failure
