"""optimize(): harmless, clear about bad input, honest in its report."""

import copy
import gc
import multiprocessing
import pickle
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatout
from flatout.measure.bench import Bench
from flatout.measure.track import Track
from flatout.report.model import Pace
from flatout.techniques import PLANNED, REGISTRY, Measured
from tests.helpers import bits, snapshot, trained_state

QUICK = {"compile": False, "precision": False, "workers": False}
"""Without what takes seconds; compile and precision have tests of their own."""

FORCED = {"compile": False, "workers": False, "precision": "bf16", "fused_optimizer": True, "in_memory": True}
"""Everything quick turned on and nothing measured."""


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    """What trials leave behind does not depend on how long they take."""
    monkeypatch.setattr("flatout.measure.bench.TRIAL_SECONDS", 0.2)


class Net(nn.Module):
    """BatchNorm and Dropout: a trial that leaves a trace leaves it here."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


def make_data(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class SlowSamples(Dataset):
    """A deterministic map-style dataset with Python per sample."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([float(i + k) for k in range(8)]), i % 3


def make_job(optimizer=torch.optim.Adam, **changes):
    torch.manual_seed(0)
    model = Net()
    opt = optimizer(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True, **changes)
    return model, loader, opt


def train(model, loader, opt, epochs=1):
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trials_leave_no_trace(name, warm):
    generator = torch.Generator().manual_seed(5)
    model, loader, opt = make_job(OPTIMIZERS[name], generator=generator)
    if warm:
        train(model, loader, opt)
    random.random(), np.random.rand()
    everything, before = snapshot(model, opt), trained_state(model, opt)
    generator_before, threads = bits(generator.get_state()), threading.active_count()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=60)
    assert any(row.trials for row in run.report.rows) or name == "rmsprop"  # which has no fused form to try
    assert trained_state(model, opt) == before
    assert bits(generator.get_state()) == generator_before
    assert threading.active_count() == threads
    assert run.model is model
    assert run.optimizer is opt
    run.undo()
    assert snapshot(model, opt) == everything


@pytest.mark.slow
def test_compile_precision_and_worker_trials_leave_no_trace():
    model, _, opt = make_job()
    loader = DataLoader(SlowSamples(), batch_size=16, shuffle=True)
    train(model, loader, opt)
    everything, before = snapshot(model, opt), trained_state(model, opt)
    forbid = {"in_memory": False}
    run = flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=forbid, budget=120, expected_steps=10**6
    )
    assert trained_state(model, opt) == before
    tried = {row.technique for row in run.report.rows if row.trials}
    assert {"compile", "precision", "workers", "fused_optimizer"} <= tried
    assert not multiprocessing.active_children()
    run.undo()
    assert snapshot(model, opt) == everything


def test_parameters_outside_the_model_are_left_as_they_were():
    model, head = Net(), nn.Linear(3, 1)
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5)
    loader = DataLoader(make_data(), batch_size=16)
    before = [bits(p) for p in head.parameters()]
    flatout.optimize(
        model, loader, opt, compute_loss=lambda m, b: head(m(b[0])).square().mean(), techniques=QUICK, budget=20
    )
    assert [bits(p) for p in head.parameters()] == before


@pytest.mark.parametrize("when", [3, 10, 25, 60])
def test_an_interrupt_in_the_middle_of_a_trial_leaves_no_trace(when):
    model, loader, opt = make_job()
    before, calls = snapshot(model, opt), 0

    def interrupted(output, target):
        nonlocal calls
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        return functional.cross_entropy(output, target)

    with pytest.raises(KeyboardInterrupt):
        flatout.optimize(model, loader, opt, interrupted, techniques={"compile": False}, budget=20)
    assert snapshot(model, opt) == before


def test_a_failing_second_call_leaves_the_first_in_place():
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    kinds = type(model), type(opt)
    with pytest.raises(ValueError, match="empty"):
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


def test_what_is_slower_together_is_taken_back_and_the_rows_say_so(monkeypatch):
    model, loader, opt = make_job()
    monkeypatch.setattr(Track, "pace", Pace(step_ms=1.0, load_ms=1.0, samples_per_second=1.0))
    monkeypatch.setattr(Bench, "interleave", lambda self, old, new: ([2.0] * 10, [1.0] * 10))
    monkeypatch.setattr(Bench, "alternate", lambda self, old, new, to_new: ([1.0] * 10, [2.0] * 10))
    run = flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=QUICK | {"in_memory": False}, budget=30
    )
    row = next(row for row in run.report.rows if row.technique == "fused_optimizer")
    assert row.status == "rejected"
    assert "together" in row.why
    assert row.trials
    assert run.plan.decisions == {}
    assert type(opt) is torch.optim.Adam


def test_training_afterwards_matches_the_plain_loop():
    model, loader, opt = make_job()
    plain_model, plain_loader, plain_opt = make_job()
    torch.manual_seed(7)
    expected = train(plain_model, plain_loader, plain_opt, epochs=3)
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        techniques=QUICK | {"in_memory": True, "fused_optimizer": True},
    )
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
    model, loader = flatout.optimize(model, loader, techniques=FORCED, budget=0)
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


def test_two_value_form_keeps_the_users_loop():
    model, loader, opt = make_job()
    model, loader = flatout.optimize(model, loader, techniques=QUICK, budget=2)
    losses = train(model, loader, opt, epochs=8)
    assert len(losses) == 8 * 6
    assert losses[-1] < losses[0]


def test_the_users_own_autocast_wins():
    model, loader, _ = make_job()
    model, loader = flatout.optimize(model, loader, techniques=FORCED, budget=0)
    with torch.autocast("cpu", torch.float16):
        assert model.body[0](torch.randn(4, 8)).dtype is torch.float16
        assert model(torch.randn(4, 8)).dtype is torch.float16


# -- bad input: one clear error, and nothing changes ---------------------------------------------------------


def bad_jobs():
    net, opt = Net(), torch.optim.Adam
    other = torch.optim.Adam(Net().parameters())
    frozen = Net().requires_grad_(False)
    loader = DataLoader(make_data(), batch_size=16)
    ce = functional.cross_entropy
    words = [["a", "b"], ["c", "d"]]
    yield "empty loader", (net, [], opt(net.parameters()), ce), {}, ValueError, "empty"
    yield "nothing to train", (frozen, loader, None, ce), {}, ValueError, "nothing to train"
    yield "no tensors", (net, words, opt(net.parameters()), ce), {}, ValueError, "no tensor"
    yield "foreign optimizer", (net, loader, other, ce), {}, ValueError, "none of the model's"
    vector = lambda out, y: functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    yield "vector loss", (net, loader, opt(net.parameters()), vector), {}, ValueError, r"scalar.*\(16,\)"
    number = lambda out, y: 1.0  # noqa: E731
    yield (
        "loss not a tensor",
        (net, loader, opt(net.parameters()), number),
        {},
        TypeError,
        "must be a tensor, got float",
    )
    detached = lambda out, y: ce(out.detach(), y)  # noqa: E731
    yield "detached loss", (net, loader, opt(net.parameters()), detached), {}, ValueError, "does not depend"
    job = (net, loader, opt(net.parameters()), ce)
    yield "misspelt", job, {"techniques": {"compil": False}}, ValueError, "did you mean 'compile'"
    yield "bad value", job, {"techniques": {"workers": -1}}, ValueError, "number of workers"
    yield "bad precision", job, {"precision": "fp8"}, ValueError, "'fp8'"
    yield "bad norm", job, {"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be > 0, got -1.0"
    yield "bad accumulate", job, {"accumulate": 0}, ValueError, "accumulate must be >= 1, got 0"
    yield "bad budget", job, {"budget": -1.0}, ValueError, "budget must be >= 0"
    yield "not a model", (ce, *job[1:]), {}, TypeError, "torch.nn.Module"
    yield "not a loader", (net, 3, *job[2:]), {}, TypeError, "iterable of batches"
    no_opt = (net, loader, None, ce)
    yield "norm without optimizer", no_opt, {"max_grad_norm": 1.0}, ValueError, "max_grad_norm is used by run.step"
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt(net.parameters()))
    yield "plateau", job, {"scheduler": plateau}, ValueError, "ReduceLROnPlateau"
    lbfgs = torch.optim.LBFGS(net.parameters())
    yield "lbfgs", (net, loader, lbfgs, ce), {}, ValueError, "LBFGS"
    yield "plan and techniques", job, {"plan": flatout.Plan({}, {}), "precision": "fp32"}, ValueError, "a plan decides"
    yield "no loss", (net, loader, opt(net.parameters())), {}, ValueError, "loss_fn or compute_loss"
    yield "two losses", job, {"compute_loss": ce}, ValueError, "not both"
    yield "triple", (net, [(torch.ones(2, 8),) * 3], opt(net.parameters()), ce), {}, TypeError, "compute_loss"


@pytest.mark.parametrize(("args", "kwargs", "error", "words"), [pytest.param(*c[1:], id=c[0]) for c in bad_jobs()])
def test_bad_input_is_refused_and_changes_nothing(args, kwargs, error, words):
    model, optimizer = args[0], args[2] if len(args) > 2 else None
    before = snapshot(model, optimizer) if isinstance(model, Net) and words != "none of the model's" else None
    kind = type(model)
    with pytest.raises(error, match=words):
        flatout.optimize(*args, **kwargs)
    assert type(model) is kind
    if before:
        assert snapshot(model, optimizer) == before


def test_an_error_in_the_users_model_passes_through_whole():
    class Broken(Net):
        def forward(self, x):
            raise RuntimeError("mine")

    model = Broken()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        flatout.optimize(model, DataLoader(make_data(), batch_size=16), None, functional.cross_entropy)
    assert snapshot(model) == before


# -- loaders ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Each sample is seen once, whatever is iterated how often."""

    def __init__(self, n):
        self.left = iter(range(n))

    def __iter__(self):
        for i in self.left:
            yield torch.full((8,), float(i)), i % 3


def test_a_source_that_cannot_rewind_loses_no_sample():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Stream(64), batch_size=8)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=2)
    seen = [value for x, _ in run.loader for value in x[:, 0].tolist()]
    assert seen == [float(i) for i in range(64)]
    status = {row.technique: row.status for row in run.report.rows}
    assert status["in_memory"] in ("not tried", "not applicable")


def test_a_stream_is_not_lost_by_force_or_by_undo():
    for undone in (False, True):
        model = Net()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(Stream(64), batch_size=8)
        force = QUICK | {"workers": 1}
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=force, budget=0)
        if undone:
            run.undo()
        assert [value for x, _ in run.loader for value in x[:, 0].tolist()] == [float(i) for i in range(64)]


class Subclassed(DataLoader):
    """What libraries make of a DataLoader: not known to be rewindable."""


def test_epochs_of_a_loader_that_is_not_rewound_keep_their_own_orders():
    torch.manual_seed(0)
    model = Net()
    loader = Subclassed(make_data(), batch_size=16, shuffle=True)
    run = flatout.optimize(
        model, loader, torch.optim.SGD(model.parameters(), 0.1), functional.cross_entropy, techniques=QUICK, budget=1
    )
    epochs = [[bits(y) for _, y in run.loader] for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_optimizing_an_optimized_loader_starts_from_the_users_own():
    model, own, opt = make_job()
    loader = own
    for _ in range(2):
        _, loader = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
        assert loader.original is own


class OnlyAtHome(Dataset):
    """Cannot run in a worker process."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("not in a worker")
        time.sleep(0.001)
        return torch.ones(8), i % 3


def test_a_loader_that_fails_in_its_trial_is_rejected_with_the_reason():
    model = Net()
    run = flatout.optimize(
        model,
        DataLoader(OnlyAtHome(), batch_size=16),
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques={"compile": False, "precision": False, "in_memory": False, "fused_optimizer": False},
        budget=20,
    )
    row = next(row for row in run.report.rows if row.technique == "workers")
    assert row.status == "rejected"
    assert "not in a worker" in " ".join(trial.failure for trial in row.trials)
    assert len(list(run.loader)) == 4


def test_random_augmentation_is_not_moved_to_workers():
    class Augmented(SlowSamples):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + torch.rand(8), i % 3

    model = Net()
    run = flatout.optimize(
        model,
        DataLoader(Augmented(), batch_size=16),
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques={"compile": False, "precision": False, "fused_optimizer": False},
        budget=60,
    )
    rows = {row.technique: row for row in run.report.rows}
    assert rows["workers"].status == "not applicable"
    assert rows["in_memory"].status == "not applicable"
    assert "draws" in rows["workers"].why


def test_plain_iterators_and_lists_of_batches_are_loaders():
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)]
    for loader in (batches, iter(batches)):
        model = Net()
        run = flatout.optimize(
            model,
            loader,
            torch.optim.SGD(model.parameters(), 0.1),
            functional.cross_entropy,
            techniques=QUICK,
        )
        assert [bits(x) for x, _ in run.loader] == [bits(x) for x, _ in batches]


def test_the_cached_loader_yields_what_the_dataloader_does():
    model = Net()
    loader = DataLoader(SlowSamples(), batch_size=10, shuffle=True)
    run = flatout.optimize(
        model,
        loader,
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques=QUICK | {"in_memory": True},
        budget=0,
    )
    torch.manual_seed(3)
    expected = [(bits(x), bits(y)) for x, y in loader]
    torch.manual_seed(3)
    assert [(bits(x), bits(y)) for x, y in run.loader] == expected


# -- the report and the plan ------------------------------------------------------------------------------------


def test_every_row_is_in_the_report():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0)
    rows = {row.technique: row for row in run.report.rows}
    assert rows.keys() == {t.name for t in REGISTRY} | {name for _, name, _, _ in PLANNED}
    assert sorted(r.number for r in rows.values() if r.number) == list(range(1, 14))
    assert all(row.why for row in rows.values())
    assert all(rows[name].status == "not built yet" for _, name, _, _ in PLANNED)
    measured = [rows[t.name] for t in REGISTRY if isinstance(t, Measured)]
    assert {row.status for row in measured} <= {"not tried", "not applicable"}
    text = str(run.report)
    assert all(row.title in text for row in rows.values())


def test_forbidden_and_forced_rows_say_so():
    model, loader, opt = make_job()
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        techniques={"compile": False, "in_memory": True},
        budget=0,
    )
    rows = {row.technique: row for row in run.report.rows}
    assert "does without it" in rows["compile"].why
    assert rows["in_memory"].status == "kept"
    assert "asks for it" in rows["in_memory"].why


def test_deterministic_mode_times_only_what_is_bit_identical():
    model, loader, opt = make_job()
    try:
        run = flatout.optimize(
            model,
            loader,
            opt,
            functional.cross_entropy,
            deterministic=True,
            seed=3,
            techniques={"workers": False},
        )
        tried = {row.technique for row in run.report.rows if row.trials}
        assert tried <= {"in_memory"}
        first = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(3), first)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        flatout.undo(model)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_plan_is_applied_without_measuring_and_refused_elsewhere(tmp_path):
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
    assert run.plan.decisions == {"fused_optimizer": True, "in_memory": True, "precision": "bf16"}
    run.plan.save(tmp_path / "plan.json")

    model, loader, opt = make_job()
    again = flatout.optimize(model, loader, opt, functional.cross_entropy, plan=tmp_path / "plan.json")
    assert again.plan == run.plan
    assert not any(row.trials for row in again.report.rows)
    assert type(model) is not Net

    wider = nn.Linear(8, 3)
    before = snapshot(wider)
    with pytest.raises(ValueError, match="another model"):
        flatout.optimize(wider, loader, torch.optim.Adam(wider.parameters()), functional.cross_entropy, plan=run.plan)
    assert snapshot(wider) == before
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a flatout plan"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, plan=tmp_path / "other.json")
