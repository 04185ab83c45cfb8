"""No side effects of ``optimize``, and full reverts by ``undo``."""

import copy
import gc
import multiprocessing
import pickle
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from tests.clock import TimedSamples, TimedStep
from tests.helpers import bits, snapshot, trained_state
from tests.jobs import FORCED, FORCED_IN_OWN_LOOP, OPTIMIZERS, QUICK, Net, make_data, make_job, train
from tests.unseen import Unseen


def each_pays(samples, active):
    """Return the seconds of a step in which each active technique saves a fifth."""
    return 0.8 ** len(active)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trials_leave_no_trace(name, warm, clock):
    generator = torch.Generator().manual_seed(5)
    model, loader, opt = make_job(OPTIMIZERS[name], generator=generator)
    if warm:
        train(model, loader, opt)
    random.random(), np.random.rand()
    step = TimedStep(clock, each_pays).watch(model, opt)
    everything, before = snapshot(model, opt), trained_state(model, opt)
    generator_before, threads = bits(generator.get_state()), threading.active_count()
    run = flatout.optimize(model, loader, opt, step, techniques=QUICK, budget=1000)
    assert any(row.trials for row in run.report.rows) or name == "rmsprop"  # RMSprop has no fused version to try
    assert trained_state(model, opt) == before
    assert bits(generator.get_state()) == generator_before
    assert threading.active_count() == threads
    assert run.model is model
    assert run.optimizer is opt
    run.undo()
    assert snapshot(model, opt) == everything


@pytest.mark.slow
def test_compile_precision_and_worker_trials_leave_no_trace(clock):
    """Worker processes do not advance this clock, so workers are tried and pay."""
    model, _, opt = make_job()
    opt.register_step_post_hook(lambda *_: clock.advance(1.0))  # compiled code cannot advance the clock
    loader = DataLoader(TimedSamples(clock, 0.1), batch_size=16, shuffle=True)
    train(model, loader, opt)
    everything, before = snapshot(model, opt), trained_state(model, opt)
    settings = {"techniques": {"in_memory": False}, "budget": 10**6, "expected_steps": 10**6}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, **settings)
    assert trained_state(model, opt) == before
    timed = {row.technique for row in run.report.rows if any(trial.gain is not None for trial in row.trials)}
    assert {"compile", "precision", "workers", "fused_optimizer"} <= timed
    assert not multiprocessing.active_children()
    run.undo()
    assert snapshot(model, opt) == everything


def test_parameters_outside_the_model_are_left_as_they_were(clock):
    model, head = Net(), nn.Linear(3, 1)
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5)
    loader = DataLoader(make_data(), batch_size=16)
    before = [bits(p) for p in head.parameters()]
    clock.slow_down(model)
    run = flatout.optimize(
        model, loader, opt, compute_loss=lambda m, b: head(m(b[0])).square().mean(), techniques=QUICK, budget=1000
    )
    assert any(row.trials for row in run.report.rows)
    assert [bits(p) for p in head.parameters()] == before


@pytest.mark.parametrize("when", [3, 10, "precision", "cpu_threads", "fused_optimizer"])
def test_an_interrupt_in_the_middle_of_a_trial_leaves_no_trace(when, clock):
    """The interrupt comes in the third or tenth step, or in a candidate's first step."""
    model, loader, opt = make_job()
    step, unseen = TimedStep(clock).watch(model, opt), Unseen(calls=0)
    before = snapshot(model, opt)

    def interrupted(output, target):
        unseen.calls += 1
        if unseen.calls == when or when in step.active:
            raise KeyboardInterrupt
        return step(output, target)

    with pytest.raises(KeyboardInterrupt):
        flatout.optimize(model, loader, opt, interrupted, techniques={"compile": False, "workers": False}, budget=1000)
    assert snapshot(model, opt) == before


def test_a_failing_second_call_leaves_the_first_in_place():
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    kinds = type(model), type(opt)
    with pytest.raises(ValueError, match="loader"):
        flatout.optimize(model, [], opt, functional.cross_entropy)
    assert (type(model), type(opt)) == kinds
    flatout.undo(model)
    assert (type(model), type(opt)) == (Net, torch.optim.Adam)


def test_an_earlier_runs_undo_does_not_touch_a_later_one():
    model, loader, opt = make_job()
    runs = [
        flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0) for _ in range(2)
    ]
    runs[0].undo()
    assert type(model) is not Net
    runs[1].undo()
    assert type(model) is Net


def test_training_afterwards_matches_the_plain_loop(clock):
    model, loader, opt = make_job()
    plain_model, plain_loader, plain_opt = make_job()
    torch.manual_seed(7)
    expected = train(plain_model, plain_loader, plain_opt, epochs=3)
    techniques = QUICK | {"in_memory": True, "fused_optimizer": True}
    run = flatout.optimize(model, loader, opt, TimedStep(clock), techniques=techniques, budget=1000)
    torch.manual_seed(7)
    losses = [run.step(batch).item() for _ in range(3) for batch in run.loader]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_undo_gives_back_the_original_behaviour():
    model, loader, opt = make_job()
    kind, step = type(opt), opt.step.__func__
    keys = list(model.state_dict())
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    assert type(opt) is not kind
    assert list(model.state_dict()) == keys
    run.undo()
    assert type(model) is Net
    assert type(opt) is kind
    assert opt.step.__func__ is step
    assert run.loader is loader
    plain_model, plain_loader, plain_opt = make_job()
    torch.manual_seed(7)
    expected = train(plain_model, plain_loader, plain_opt)
    torch.manual_seed(7)
    assert train(model, loader, opt) == expected


def test_undo_works_without_the_run():
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    gc.collect()
    assert type(model) is not Net
    flatout.undo(model)
    assert type(model) is Net
    flatout.undo(model)
    flatout.undo(nn.Linear(1, 1))


def test_nothing_keeps_the_model_alive():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    gone = weakref.ref(model)
    del model, run, opt
    gc.collect()
    assert gone() is None


def test_optimizing_twice_is_the_same_as_once():
    model, loader, opt = make_job()
    for _ in range(2):
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
        assert type(model).__mro__[1] is Net
    run.undo()
    assert type(model) is Net


def test_copies_and_pickles_are_plain_models():
    model, loader, _ = make_job()
    model, loader = flatout.optimize(model, loader, techniques=FORCED_IN_OWN_LOOP, budget=0)
    x = torch.randn(4, 8)
    model.eval()
    assert model(x).dtype is torch.float32
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net
        with torch.no_grad():
            copied.body[0].weight.zero_()
        assert not torch.equal(copied(x), model(x))
    assert isinstance(model, Net)
    assert repr(model) == repr(Net())


def test_two_value_form_keeps_the_users_loop(clock):
    model, loader, opt = make_job()
    clock.slow_down(model)
    model, loader = flatout.optimize(model, loader, techniques=QUICK, budget=1000)
    losses = train(model, loader, opt, epochs=8)
    assert len(losses) == 8 * 6
    assert losses[-1] < losses[0]


def test_the_users_own_autocast_wins():
    model, loader, _ = make_job()
    model, loader = flatout.optimize(model, loader, techniques=FORCED_IN_OWN_LOOP, budget=0)
    with torch.autocast("cpu", torch.float16):
        assert model.body[0](torch.randn(4, 8)).dtype is torch.float16
        assert model(torch.randn(4, 8)).dtype is torch.float16
