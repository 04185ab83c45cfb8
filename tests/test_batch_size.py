"""Changed numbers of samples per update or per forward, with the requested training."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout import Plan
from flatout.data import batch_size_of
from flatout.tuning.stopwatch import step_memory
from tests.clock import TimedSamples, TimedStep
from tests.helpers import snapshot
from tests.jobs import only
from tests.reasons import reasons
from tests.trap import Trap

pytestmark = pytest.mark.usefixtures("clock")

OTHERS = only("batch_size")


def data(samples=64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator), torch.arange(samples))


def pairs(samples=64):
    return TensorDataset(*data(samples).tensors[:2])


def net(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loader_of(dataset=None, batch_size=4, **settings):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(dataset or pairs(), batch_size=batch_size, generator=generator, **settings)


def optimize(loader, model=None, optimizer=None, loss_fn=functional.cross_entropy, **settings):
    model = model or net()
    settings.setdefault("techniques", OTHERS)
    settings.setdefault("budget", 0)
    return flatout.optimize(model, loader, optimizer or sgd(model), loss_fn, **settings)


def row_of(run):
    return run.report.row("batch_size")


def resident_bytes(run):
    """Return the bytes of parameters, buffers and optimizer state."""
    state = [value for entry in run.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return sum(t.nbytes for t in (*run.model.parameters(), *run.model.buffers(), *state))


@pytest.fixture
def steps_take(clock):
    """Function ``steps_take(seconds)`` that returns a loss function with ``seconds(samples)`` per step."""
    return lambda seconds: TimedStep(clock, lambda samples, active: seconds(samples))


def as_long_for_many(samples):
    return 1.0


def beyond_a_cache(samples):
    return samples * (0.1 if samples <= 16 else 0.5)


# -- another number of samples per update ----------------------------------------------------------------------


def test_a_number_of_samples_rebuilds_the_loader_with_the_same_order():
    ordered = [batch[2] for batch in loader_of(data(), shuffle=True)]
    model = net()
    run = flatout.optimize(
        model,
        loader_of(data(), shuffle=True),
        sgd(model),
        compute_loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16,
        techniques=OTHERS,
        budget=0,
    )
    batches = [batch[2] for batch in run.loader]
    assert [len(batch) for batch in batches] == [16] * 4
    assert len(run.loader) == 4
    assert run.loader.batch_size == 16
    assert torch.cat(batches).tolist() == torch.cat(ordered).tolist()


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2), ("none", 1)])
def test_learning_rates_follow_the_rule_after_the_warm_up(rule, factor):
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.02}]
    )
    run = optimize(loader_of(), model, optimizer, batch_size=16, lr_rule=rule)
    rates = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)
            rates.append([group["lr"] for group in optimizer.param_groups])
    # 10 epochs of 4 updates are expected, and 4 of these updates warm up.
    weights = [1 + (factor - 1) * min(1, u / 4) for u in range(13)]
    assert rates == [[pytest.approx(0.1 * w, rel=1e-12), pytest.approx(0.02 * w, rel=1e-12)] for w in weights]


def test_a_smaller_batch_has_its_smaller_rate_at_once():
    run = optimize(loader_of(batch_size=16), batch_size=4)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_the_users_schedule_ends_where_it_would_have():
    model = net()
    optimizer = sgd(model)
    # OneCycleLR raises when it is stepped further than its own loop would have stepped it.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3 * 17)
    bare_optimizer = sgd(net())
    bare = torch.optim.lr_scheduler.OneCycleLR(bare_optimizer, max_lr=0.1, total_steps=3 * 17)
    run = optimize(loader_of(pairs(66)), model, optimizer, scheduler=scheduler, batch_size=16)
    assert len(run.loader) == 5
    for epoch in range(3):
        for batch in run.loader:
            run.step(batch)
        while bare.last_epoch < min(17 * (epoch + 1), 50):
            bare_optimizer.step()
            bare.step()
        if epoch < 2:
            assert scheduler.last_epoch == bare.last_epoch
            assert optimizer.param_groups[0]["lr"] == pytest.approx(4 * bare_optimizer.param_groups[0]["lr"])
            assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_accumulated_batches_share_the_samples():
    run = optimize(loader_of(), batch_size=16, accumulate=2)
    assert [batch_size_of(batch) for batch in run.loader] == [8] * 8
    assert "update-resized" in reasons(row_of(run))


def test_undo_gives_loader_and_rates_back():
    model, loader = net(), loader_of()
    optimizer = sgd(model)
    run = optimize(loader, model, optimizer, batch_size=16)
    for batch in run.loader:
        run.step(batch)
    assert optimizer.param_groups[0]["lr"] != 0.1
    run.undo()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert run.loader is loader
    assert loader.batch_size == 4


def test_optimizing_again_starts_from_the_users_rates():
    model, loader = net(), loader_of()
    optimizer = sgd(model)
    first = optimize(loader, model, optimizer, batch_size=16)
    for batch in first.loader:
        first.step(batch)
    again = optimize(first.loader, model, optimizer)
    assert [batch_size_of(batch) for batch in again.loader] == [4] * 16
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert again.loader.original is loader


def test_the_report_shows_the_scaled_rate_and_warns_of_large_batches():
    large = reasons(row_of(optimize(loader_of(pairs(4096), batch_size=64), batch_size=1024)))
    assert {"update-resized", "lr-scaled", "lr-warmup", "large-batch-warning"} <= large
    smaller = reasons(row_of(optimize(loader_of(pairs(4096), batch_size=64), batch_size=512)))
    assert smaller == large - {"large-batch-warning"}
    assert "lr-kept" in reasons(row_of(optimize(loader_of(), batch_size=16, lr_rule="none")))


@pytest.mark.parametrize(("name", "is_needed"), [("Adam", True), ("RMSprop", True), ("Adagrad", True), ("SGD", False)])
def test_the_report_names_the_square_root_rule_where_the_linear_one_is_asked_for(name, is_needed):
    model = net()
    optimizer = getattr(torch.optim, name)(model.parameters())
    found = reasons(row_of(optimize(loader_of(), model, optimizer, batch_size=16, lr_rule="linear")))
    assert ("adam-needs-sqrt-rule" in found) == is_needed
    assert "linear-rule" in found


@pytest.mark.parametrize(
    ("name", "rule"), [("SGD", "linear"), ("ASGD", "linear"), ("Adam", "sqrt"), ("AdamW", "sqrt"), ("RMSprop", "sqrt")]
)
@pytest.mark.parametrize("settings", [{}, {"lr_rule": "auto"}])
def test_the_rule_follows_the_optimizer_and_stands_in_row_and_plan(name, rule, settings):
    model = net()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    run = optimize(loader_of(batch_size=16), model, optimizer, batch_size=4, **settings)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (4 if rule == "linear" else 2))
    assert f"{rule}-rule" in reasons(row_of(run))
    assert run.plan.decisions["batch_size"]["lr_rule"] == rule


def test_a_plan_without_a_rule_keeps_the_linear_one(tmp_path):
    """Plans did not store the rule while "linear" was the default."""
    path = tmp_path / "plan.json"

    def training(**settings):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run = optimize(loader_of(batch_size=16), model, optimizer, **settings)
        return run, optimizer.param_groups[0]["lr"]

    run, rate = training(batch_size=4)
    assert rate == pytest.approx(0.1 / 2)
    run.plan.save(path)
    assert training(techniques=None, plan=path)[1] == rate
    plan = json.loads(path.read_text())
    del plan["decisions"]["batch_size"]["lr_rule"]
    path.write_text(json.dumps(plan))
    old, rate = training(techniques=None, plan=path, batch_size=4)
    assert rate == pytest.approx(0.1 / 4)
    assert old.plan.decisions["batch_size"]["lr_rule"] == "linear"
    assert training(techniques=None, plan=path, lr_rule="sqrt")[1] == pytest.approx(0.1 / 2)


def test_a_plan_has_the_batch_size_and_refuses_another(tmp_path):
    run = optimize(loader_of(), batch_size=16)
    run.plan.save(tmp_path / "plan.json")
    again = optimize(loader_of(), techniques=None, plan=tmp_path / "plan.json", batch_size="auto")
    assert [batch_size_of(batch) for batch in again.loader] == [16] * 4
    assert "lr-scaled" in reasons(row_of(again))
    with pytest.raises(ValueError, match=r"batch_size=16.*32"):
        optimize(loader_of(), techniques=None, plan=tmp_path / "plan.json", batch_size=32)
    kept = optimize(loader_of())
    assert "batch_size" not in kept.plan.decisions
    asked = optimize(loader_of(), techniques=None, plan=kept.plan, batch_size=32)
    assert [batch_size_of(batch) for batch in asked.loader] == [32] * 2


def test_training_resumes_from_a_checkpoint_with_its_rates(tmp_path):
    def training(plan=None):
        model = net()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        techniques = OTHERS if plan is None else None
        settings = {"scheduler": scheduler, "batch_size": 16, "techniques": techniques, "plan": plan}
        return optimize(loader_of(shuffle=True), model, optimizer, **settings)

    whole = training()
    whole.fit(4, progress=False)
    first = training()
    first.fit(2, progress=False, checkpoint_dir=tmp_path)
    second = training(Plan.from_checkpoints(tmp_path))
    second.fit(4, progress=False, checkpoint_dir=tmp_path)
    assert snapshot(second.model, second.optimizer)["parameters"] == snapshot(whole.model)["parameters"]
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("loader", "settings", "facts"),
    [
        (loader_of(), {"batch_size": 0}, "batch_size.*0"),
        (loader_of(), {"batch_size": True}, "batch_size.*True"),
        (loader_of(), {"batch_size": "large"}, "batch_size.*'large'"),
        (loader_of(), {"batch_size": 10, "accumulate": 4}, "accumulate=4.*10"),
        (loader_of(), {"lr_rule": "cubic"}, "rule.*'cubic'"),
        (loader_of(), {"memory_limit": 0}, "memory_limit.*0"),
        (loader_of(), {"batch_size": 8, "techniques": {"batch_size": False}}, "batch_size"),
        (list(loader_of()), {"batch_size": 8}, "loader.*list"),
        (DataLoader(pairs(), batch_sampler=[[0, 1], [2, 3]]), {"batch_size": 8}, "batch_sampler"),
        (loader_of(), {"techniques": {"batch_size": 64}}, "batch_size.*64"),
        (loader_of(), {"techniques": {"batch_size": {"micro": 1}}}, "batch_size.*'micro'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(loader, settings, facts):
    model = net()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=facts):
        optimize(loader, model, optimizer, **settings)
    assert snapshot(model, optimizer) == before


def test_without_an_optimizer_there_is_no_rate_to_scale():
    with pytest.raises(ValueError, match=r"batch_size.*optimizer"):
        flatout.optimize(net(), loader_of(), batch_size=8)


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(ValueError, match=r"128.*64"):
        optimize(loader_of(), batch_size=128)


@pytest.mark.parametrize("workers", [0, 1])
def test_seeded_samples_are_those_of_a_loader_of_that_size(workers):
    class Augmented(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.rand(()), y

    def batches(own, **settings):
        dataset = Augmented(*pairs().tensors)
        loader = loader_of(dataset, batch_size=own, shuffle=True, num_workers=workers)
        run = optimize(loader, deterministic=True, seed=3, **settings)
        try:
            return torch.cat([batch[0] for batch in run.loader]), run.loader.batch_size
        finally:
            run.undo()

    ours, size = batches(4, batch_size=16)
    assert size == 16
    assert torch.equal(ours, batches(16)[0])


def test_trials_copy_what_a_collate_keeps():
    dataset = pairs()
    before = dataset.tensors[0].clone()

    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    model = net()
    model.insert(0, InPlace())
    optimize(loader_of(dataset, collate_fn=lambda samples: dataset[: len(samples)]), model, batch_size=16)
    assert torch.equal(dataset.tensors[0], before)


def test_flatouts_undo_gives_the_users_batches_back():
    model = net()
    run = optimize(loader_of(), model, batch_size=16)
    flatout.undo(model)
    assert [batch_size_of(batch) for batch in run.loader] == [4] * 16


def test_the_error_for_a_checkpoint_of_another_batch_size_has_a_remedy(tmp_path):
    optimize(loader_of(), batch_size=16).save(tmp_path / "a.pt")
    other = optimize(loader_of(), batch_size=32)
    with pytest.raises(ValueError, match=r"16.*32.*Plan\.from_checkpoints"):
        other.load(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="16"):
        optimize(loader_of()).load(tmp_path / "a.pt")


def test_batches_of_an_accumulated_update_count_in_updates():
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    # 17 batches of 4 give 6 updates per epoch, and 5 batches of 16 give 2.
    run = optimize(loader_of(pairs(66)), model, optimizer, scheduler=scheduler, accumulate=3, batch_size=48)
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
    assert scheduler.last_epoch == 12
    # 20 updates are expected, and 2 of these updates warm up.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(4 * 0.1 * 0.9**12)


# -- the fastest -----------------------------------------------------------------------------------------------


def test_auto_takes_larger_batches_where_they_are_faster_and_leaves_no_other_trace(steps_take):
    model, loader = net(), loader_of(pairs(1024), shuffle=True)
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    loss_fn = steps_take(as_long_for_many)
    run = optimize(loader, model, optimizer, loss_fn, batch_size="auto", budget=1000, expected_steps=10**6)
    after = snapshot(model, optimizer)
    assert {k: v for k, v in after.items() if k != "groups"} == {k: v for k, v in before.items() if k != "groups"}
    row = row_of(run)
    assert row.status == "kept"
    assert row.gain.ratio == pytest.approx(128 / 4, rel=1e-2)
    assert run.loader.batch_size == 128  # an epoch keeps 8 updates
    assert run.plan.decisions["batch_size"] == {"samples": 128, "micro_batch": None, "lr_rule": "linear"}
    assert "update-resized" in reasons(row)
    assert [len(batch[0]) for batch in run.loader] == [128] * 8


def test_auto_keeps_to_the_memory_limit(steps_take):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 3)).double()
    limit, loader = 600_000, loader_of(pairs(4096))
    settings = {"memory_limit": limit, "budget": 1000, "expected_steps": 10**6}
    run = optimize(loader, model, loss_fn=steps_take(as_long_for_many), batch_size="auto", **settings)
    samples = run.loader.batch_size
    batch = next(iter(run.loader))
    took = step_memory(lambda: run.step(batch), torch.device("cpu"))
    assert took + resident_bytes(run) <= limit
    # 512 activations, their tanh, and the gradient of one of them.
    assert samples > 0.8 * (limit - 2 * resident_bytes(run)) / (3 * 512 * 8)


def test_auto_is_not_tried_where_no_timing_may_decide(steps_take):
    loss_fn = steps_take(as_long_for_many)
    run = optimize(loader_of(), loss_fn=loss_fn, batch_size="auto", deterministic=True, budget=1000)
    assert row_of(run).status == "not tried"
    assert run.loader.batch_size == 4
    run.undo()


@pytest.mark.parametrize("loader", [list(loader_of()), DataLoader(pairs(), batch_sampler=[[0, 1], [2, 3]])])
def test_auto_names_the_loader_that_cannot_be_rebuilt(loader):
    row = row_of(optimize(loader, batch_size="auto", expected_steps=10**6, budget=60))
    assert row.status == "not applicable"
    assert "loader-not-resizable" in reasons(row)


def test_a_model_with_a_fixed_batch_size_keeps_it(steps_take):
    class Rigid(nn.Module):
        def forward(self, x):
            return x.view(4, 6)

    model = net()
    model.insert(0, Rigid())
    settings = {"batch_size": "auto", "expected_steps": 10**6, "budget": 1000}
    row = row_of(optimize(loader_of(), model, loss_fn=steps_take(as_long_for_many), **settings))
    assert row.status == "rejected"
    assert "other-sizes-fail" in reasons(row)


# -- the same samples in parts ---------------------------------------------------------------------------------


def in_parts(size):
    return OTHERS | {"batch_size": {"micro_batch": size}}


def trained(batches, techniques, **settings):
    run = optimize(batches, techniques=techniques, **settings)
    return run, [float(run.step(batch)) for batch in run.loader]


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"max_grad_norm": 0.1}, {"accumulate": 3}])
def test_parts_have_the_gradients_of_the_whole(settings):
    # The last batch is uneven, and with accumulate=3 it waits alone for its update at the end.
    batches = list(loader_of(pairs(70), batch_size=16))
    whole, expected = trained(batches, OTHERS, **settings)
    parts, losses = trained(batches, in_parts(6), **settings)
    assert parts.micro_batch == 6
    assert losses == pytest.approx(expected, rel=1e-12)
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_parts_of_token_means_weigh_as_much_as_they_have_tokens():
    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0)

    batches = list(loader_of(batch_size=16))
    settings = {"loss_fn": None, "compute_loss": loss, "loss_weight": lambda batch: (batch[1] != 0).sum()}
    whole, expected = trained(batches, OTHERS, **settings)
    parts, losses = trained(batches, in_parts(5), **settings)
    assert losses == pytest.approx(expected, rel=1e-12)
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_parts_update_the_buffers_of_a_batch_norm_once():
    batches = list(loader_of(batch_size=16))
    model = net(nn.BatchNorm1d(8))
    run = optimize(batches, model, techniques=in_parts(8))
    before = model[1].running_mean.clone()
    with torch.no_grad():
        activations = model[0](batches[0][0])
    run.step(batches[0])
    assert model[1].num_batches_tracked == 1
    torch.testing.assert_close(model[1].running_mean, 0.9 * before + 0.1 * activations.mean(0))


def test_parts_that_a_batch_norm_would_see_are_not_tried():
    row = row_of(optimize(list(loader_of(batch_size=16)), net(nn.BatchNorm1d(8)), budget=60, expected_steps=10**6))
    assert row.status == "not applicable"
    assert "batchnorm-sees-parts" in reasons(row)


def packed_batch():
    return {"x": pairs()[:8][0], "words": nn.utils.rnn.pack_sequence([torch.ones(2)] * 8)}


BY_X = {"loss_fn": None, "compute_loss": lambda model, batch: model(batch["x"]).square().mean()}


def test_a_batch_that_cannot_be_taken_apart_is_computed_as_a_whole():
    run = optimize([{"x": pairs()[:8][0]}], techniques=in_parts(2), **BY_X)
    seen = []
    run.model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    run.step({"x": pairs()[:8][0]})
    assert seen[-4:] == [2] * 4
    run.step(packed_batch())
    assert seen[-1] == 8
    run.undo()
    with pytest.raises(ValueError, match="batch_size"):
        optimize([packed_batch()], techniques=in_parts(2), **BY_X)


def test_parts_are_for_memory_where_whole_batches_do_not_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 3)).double()
    batches = list(loader_of(pairs(1024), batch_size=256))
    free = optimize(batches, model)
    whole = step_memory(lambda: free.step(batches[0]), torch.device("cpu"))
    assert free.micro_batch is None
    limit = whole // 2 + resident_bytes(free)
    before = snapshot(model, free.optimizer)
    run = optimize(batches, model, free.optimizer, memory_limit=limit)
    assert snapshot(model, run.optimizer) == before
    assert 80 <= run.micro_batch <= 128  # half of a step's memory, minus memory independent of samples
    assert "batch-exceeds-memory" in reasons(row_of(run))
    assert step_memory(lambda: run.step(batches[0]), torch.device("cpu")) + resident_bytes(run) <= limit
    before = snapshot(model, free.optimizer)
    with pytest.raises(torch.OutOfMemoryError, match="256"):
        optimize(batches, model, free.optimizer, memory_limit=1000)
    assert snapshot(model, free.optimizer) == before


def test_a_batch_that_fits_nowhere_and_cannot_be_taken_apart():
    assert optimize([packed_batch()], memory_limit=10**9, **BY_X).micro_batch is None
    with pytest.raises(torch.OutOfMemoryError, match="8"):
        optimize([packed_batch()], memory_limit=1000, **BY_X)


def test_a_step_that_runs_out_of_memory_while_tuning_is_taken_apart(steps_take):
    model = net(Trap())
    model[1].arm("forward", 8)
    batches = list(loader_of(batch_size=32))
    run = optimize(batches, model, loss_fn=steps_take(as_long_for_many), budget=1000)
    assert 1 <= run.micro_batch <= 8
    model[1].seen.clear()
    run.step(batches[0])
    assert sum(model[1].seen) == 32
    assert max(model[1].seen) == run.micro_batch


def test_parts_that_are_faster_are_found(steps_take):
    loss_fn = steps_take(beyond_a_cache)
    run = optimize(list(loader_of(pairs(256), batch_size=64)), loss_fn=loss_fn, budget=10**4, expected_steps=10**6)
    row = row_of(run)
    assert row.status == "kept"
    assert run.micro_batch == 8  # a sample costs the same in parts of 8 and of 16
    assert row.gain.ratio == pytest.approx(0.5 / 0.1, rel=1e-2)
    run.undo()
    assert run.micro_batch is None


def test_whole_batches_stay_where_parts_are_slower(steps_take):
    loss_fn = steps_take(as_long_for_many)
    run = optimize(list(loader_of(pairs(256), batch_size=64)), loss_fn=loss_fn, budget=1000, expected_steps=10**6)
    assert row_of(run).status == "rejected"
    assert run.micro_batch is None


def test_forbidden_parts_are_not_made_for_memory_either():
    run = optimize(list(loader_of(batch_size=16)), techniques=OTHERS | {"batch_size": False}, memory_limit=1000)
    assert run.micro_batch is None
    assert row_of(run).status == "not tried"


@pytest.mark.parametrize("kind", [list, lambda loader: DataLoader(pairs(), batch_sampler=[[*range(16)]] * 2)])
def test_a_plan_has_the_parts_of_loaders_without_a_batch_size(kind):
    batches = kind(loader_of(batch_size=16))
    run = optimize(batches, techniques=in_parts(6))
    assert run.plan.decisions == {"batch_size": {"samples": None, "micro_batch": 6}}
    again = optimize(batches, techniques=None, plan=run.plan)
    assert again.micro_batch == 6


def test_a_plan_has_its_parts_before_anything_else_is_tried():
    def trapped():
        model = net(Trap())
        model[1].arm("forward", 8)
        return model

    batches = list(loader_of(batch_size=32))
    techniques = OTHERS | {"fused_optimizer": True, "batch_size": {"micro_batch": 8}}
    run = optimize(batches, trapped(), techniques=techniques)
    again = optimize(batches, trapped(), techniques=None, plan=run.plan)
    assert again.micro_batch == 8
    assert again.plan.decisions == run.plan.decisions


def test_parts_for_memory_name_what_they_change():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.BatchNorm1d(512), nn.Linear(512, 3)).double()
    run = optimize(list(loader_of(batch_size=32)), model, memory_limit=400_000)
    assert run.micro_batch is not None
    assert "batchnorm-sees-parts" in reasons(row_of(run))


def test_in_16_bits_parts_are_tried_where_the_loss_is_known(steps_take):
    batches = [(x.float(), y) for x, y in loader_of(batch_size=64)]
    techniques = only("batch_size", "precision")

    def row(**settings):
        settings |= {"precision": "bf16", "techniques": techniques, "budget": 1000, "expected_steps": 10**6}
        return row_of(optimize(batches, net().float(), loss_fn=steps_take(as_long_for_many), **settings))

    assert "loss-unknown-in-16-bits" in reasons(row())
    assert "loss-unknown-in-16-bits" not in reasons(row(loss_weight=len))


def test_the_requested_size_stays_when_parts_are_reverted(clock):
    computed = [64]

    def seconds(samples, active):
        computed.append(samples)
        return beyond_a_cache(samples) / 100

    class Samples(TimedSamples):
        def __len__(self):
            return 512

    # Only the race reads the loader, whose samples take longer with steps in parts.
    samples = Samples(clock, lambda: 5e-3 if computed[-1] < 64 else 1e-4)
    model = nn.Linear(8, 3)
    settings = {"batch_size": 64, "budget": 10**5, "expected_steps": 10**6}
    run = optimize(DataLoader(samples, batch_size=4), model, loss_fn=TimedStep(clock, seconds), **settings)
    row = row_of(run)
    assert row.status == "kept"
    assert "asked-for" in reasons(row)
    assert run.micro_batch is None
    assert run.plan.decisions["batch_size"] == {"samples": 64, "micro_batch": None, "lr_rule": "linear"}


def test_an_undone_batch_size_needs_no_run():
    """The model outlives the run and keeps no part of the run alive."""
    model, loader = net(), loader_of()
    optimizer, gone = sgd(model), weakref.ref(loader)
    optimize(loader, model, optimizer, batch_size=16)
    del loader
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="loader"):  # disables the active techniques, and enables them again
        optimize([], model, optimizer)
    flatout.undo(model)
    assert optimizer.param_groups[0]["lr"] == 0.1
