"""Run: step, fit, evaluate."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.helpers import bits
from tests.jobs import NO_TECHNIQUES
from tests.reasons import reasons


def make(n=48, batch=8, **kwargs):
    torch.manual_seed(0)
    x = torch.randn(n, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=batch)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=NO_TECHNIQUES, budget=0, **kwargs)
    return run, model, loader, opt


def test_step_is_the_textbook_step():
    run, model, loader, _ = make()
    _, twin, _, twin_opt = make()
    for x, y in loader:
        loss = run.step((x, y))
        twin_opt.zero_grad()
        expected = functional.cross_entropy(twin(x), y)
        expected.backward()
        twin_opt.step()
        assert loss.dim() == 0
        assert not loss.requires_grad
        assert bits(loss) == bits(expected)
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in twin.parameters()]


@pytest.mark.parametrize("is_of_the_class", [True, False])
def test_step_calls_the_users_zero_grad(is_of_the_class):
    model, calls = nn.Linear(4, 2), []

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    opt = (Counting if is_of_the_class else torch.optim.SGD)(model.parameters(), lr=0.1)
    if not is_of_the_class:
        opt.zero_grad = lambda set_to_none=True: (calls.append(set_to_none), type(opt).zero_grad(opt, set_to_none))
    batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    run = flatout.optimize(model, [batch], opt, functional.cross_entropy, techniques=NO_TECHNIQUES, budget=0)
    calls.clear()
    run.step(batch)
    run.step(batch)
    assert calls == [True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_equals_the_large_batch_leftover_included(fused):
    # 48 samples, batches of 8, 4 a time: one update of 32 samples, and one of the 16 that are left.
    force = NO_TECHNIQUES | {"fused_optimizer": fused}
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
    models = [nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    loader = DataLoader(data, batch_size=8)
    run = flatout.optimize(
        models[0],
        loader,
        opts[0],
        functional.cross_entropy,
        accumulate=4,
        techniques=force,
        budget=0,
        max_grad_norm=0.3,
    )
    for batch in run.loader:
        run.step(batch)
    for part in (slice(0, 32), slice(32, 48)):
        opts[1].zero_grad()
        functional.cross_entropy(models[1](data.tensors[0][part]), data.tensors[1][part]).backward()
        nn.utils.clip_grad_norm_(models[1].parameters(), 0.3)
        opts[1].step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_scheduler_steps_once_per_update():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    run = flatout.optimize(
        model,
        DataLoader(data, batch_size=8),
        opt,
        functional.cross_entropy,
        scheduler=scheduler,
        accumulate=2,
        techniques=NO_TECHNIQUES | {"fused_optimizer": True},
        budget=0,
    )
    for batch in run.loader:
        run.step(batch)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.5**3)


SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda n: 0.5**n),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 1.0, 1), lr_scheduler.ExponentialLR(opt, 0.5)], [1]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(opt, 0.5)]),
}


def scheduled(scheduler_of, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,))), batch_size=8)
    scheduler = scheduler_of(opt)
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        scheduler=scheduler,
        techniques={name: value for name, value in NO_TECHNIQUES.items() if name != "batch_size"},
        budget=0,
        **kwargs,
    )
    return run, scheduler


def warned_codes(recorded):
    return [code for warning in recorded for code in reasons(str(warning.message))]


@pytest.mark.parametrize("settings", [{}, {"batch_size": 16, "lr_rule": "linear"}], ids=["same size", "scaled"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("per_epoch", [False, True], ids=["per step", "per epoch"])
def test_a_scheduler_that_the_loop_steps_too_is_warned_of_once(per_epoch, name, settings, recwarn):
    run, scheduler = scheduled(SCHEDULERS[name], **settings)
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
            if not per_epoch:
                scheduler.step()
        if per_epoch:
            scheduler.step()
    assert warned_codes(recwarn) == ["scheduler-steps-twice"]
    assert [w.filename for w in recwarn if reasons(str(w.message))] == [__file__]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_only_a_run_steps_or_loads_is_not_warned_of(name, recwarn):
    run, scheduler = scheduled(SCHEDULERS[name])
    scheduler.step()  # a script may set its scheduler before training
    run.fit(2, progress=False)
    state = copy.deepcopy(run.state_dict())
    run.fit(3, progress=False)
    run.load_state_dict(state)
    run.fit(3, progress=False)
    run.step(next(iter(run.loader)))
    other, _ = scheduled(SCHEDULERS[name])
    other.step(next(iter(other.loader)))
    other.load_state_dict(state)
    other.step(next(iter(other.loader)))
    assert warned_codes(recwarn) == []


def test_a_scheduler_of_the_loop_alone_may_step(recwarn):
    run, _, _, opt = make()
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
        scheduler.step()
    assert warned_codes(recwarn) == []


def test_a_model_that_trains_in_eval_mode_is_warned_of_once(recwarn):
    run, model, _, _ = make()
    run.step(next(iter(run.loader)))
    assert warned_codes(recwarn) == []
    model.eval()  # as after an evaluation of the script
    for batch in run.loader:
        run.step(batch)
    assert warned_codes(recwarn) == ["trains-in-eval-mode"]
    assert [w.filename for w in recwarn if reasons(str(w.message))] == [__file__]
    assert not model.training


def test_parts_of_a_model_may_stay_in_eval_mode(recwarn):
    run, model, _, _ = make()
    model[0].eval()
    run.fit(2, eval_loader=run.loader, progress=False)
    assert warned_codes(recwarn) == []


def test_evaluate_weighs_by_samples_and_restores_modes():
    run, model, _, _ = make()
    model[0].eval()
    modes = [m.training for m in model.modules()]
    x, y = torch.randn(10, 4), torch.randint(0, 2, (10,))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    values = run.evaluate(loader, {"accuracy": lambda out, batch: (out.argmax(1) == batch[1]).float().mean()})
    with torch.no_grad():
        out = model(x)
    assert values["loss"] == pytest.approx(functional.cross_entropy(out, y).item(), rel=1e-5)
    assert values["accuracy"] == pytest.approx((out.argmax(1) == y).float().mean().item())
    assert [m.training for m in model.modules()] == modes
    assert not model[0]._forward_hooks
    assert not model._forward_hooks


def test_evaluate_tracks_no_gradients_and_restores_modes_after_an_error():
    run, model, loader, _ = make()
    grads = []
    metric = {"x": lambda out, batch: grads.append(out.requires_grad) or 0.0}
    run.evaluate(loader, metric)
    assert grads
    assert not any(grads)
    with pytest.raises(ZeroDivisionError):
        run.evaluate(loader, {"x": lambda out, batch: 1 / 0})
    assert model.training
    assert not model._forward_hooks
    with pytest.raises(ValueError, match="eval"):
        run.evaluate([])


def test_fit_trains_and_returns_the_history(capsys):
    run, _, loader, _ = make()
    history = run.fit(6, eval_loader=loader, metrics={"one": lambda out, batch: 1.0}, progress=False)
    assert len(history) == 6
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[0].keys() == {"loss", "eval_loss", "eval_one"}
    assert history[0]["eval_one"] == 1.0
    assert run.stats.steps == 36
    assert run.stats.samples == 288
    assert capsys.readouterr().out == ""


def test_a_mapping_batch_goes_through_the_models_own_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x, y):
            out = self.linear(x).squeeze(1)
            return {"loss": (out - y).square().mean(), "out": out}

    model = WithLoss()
    batches = [{"x": torch.randn(4, 4), "y": torch.randn(4)} for _ in range(3)]
    run = flatout.optimize(model, batches, torch.optim.SGD(model.parameters(), 0.1), techniques=NO_TECHNIQUES, budget=0)
    expected = model(**batches[0])["loss"]
    assert bits(run.step(batches[0])) == bits(expected)


def test_compute_loss_sees_model_and_batch():
    model = nn.Linear(4, 1)
    batches = [(torch.randn(4, 4), torch.randn(4), torch.rand(4)) for _ in range(3)]

    def weighted(model, batch):
        x, y, w = batch
        return (w * (model(x).squeeze(1) - y).square()).mean()

    run = flatout.optimize(
        model,
        batches,
        torch.optim.SGD(model.parameters(), 0.1),
        compute_loss=weighted,
        techniques=NO_TECHNIQUES,
        budget=0,
    )
    expected = weighted(model, batches[1])
    assert bits(run.step(batches[1])) == bits(expected)


def test_step_needs_an_optimizer():
    model = nn.Linear(4, 1)
    run = flatout.optimize(model, [torch.randn(2, 4)], techniques=NO_TECHNIQUES, budget=0)
    with pytest.raises(RuntimeError, match="optimizer"):
        run.step(torch.randn(2, 4))


def test_fit_trains_in_train_mode_and_step_leaves_the_mode_alone():
    run, model, *_ = make()
    model.eval()
    run.step(next(iter(run.loader)))
    assert not model.training
    run.fit(1, progress=False)
    assert model.training


def test_what_a_break_left_over_is_updated_with_before_the_next_epoch():
    run, model, _, _ = make(accumulate=4)
    before = bits(model[0].weight)
    for batch in run.loader:
        run.step(batch)
        break
    assert bits(model[0].weight) == before
    next(iter(run.loader))
    assert bits(model[0].weight) != before


def test_the_loader_can_be_copied_and_asked_like_the_users():
    run, _, loader, _ = make()
    assert copy.copy(run.loader).batch_size == loader.batch_size
    assert len(run.loader) == len(loader)
    assert run.loader.dataset is loader.dataset
