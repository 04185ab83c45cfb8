"""Losses that train or average another module: trials restore that module too, or refuse the job."""

import copy
import functools
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

import flatout
from flatout.core.snapshot import Snapshot
from tests.helpers import bits, snapshot
from tests.jobs import NO_TECHNIQUES, QUICK, train, tried
from tests.unseen import Unseen


def make_job():
    """Return a job whose batches differ in size, so that a forced technique steps each of them."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in (8, 7, 6, 5)]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.1)


def operators(work):
    """Return the names of the operators of a call. A profiler sees those that flatout hides from modes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return [event.name for event in profile.events()]


def make_critic():
    """Make a module with buffers and random draws, and its optimizer. Both already have gradients and state."""
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)
    critic(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    return critic, optimizer


def gan_loss(model, batch, critic, optimizer):
    output = model(batch[0])
    optimizer.zero_grad()
    critic(output.detach()).mean().backward()
    optimizer.step()
    return functional.cross_entropy(output, batch[1]) - critic(output).mean()


def by_closure(critic, optimizer):
    return lambda model, batch: gan_loss(model, batch, critic, optimizer)


def by_defaults(critic, optimizer):
    def compute_loss(model, batch, critic=critic, *, optimizer=optimizer):
        return gan_loss(model, batch, critic, optimizer)

    return compute_loss


def by_partial(critic, optimizer):
    return functools.partial(gan_loss, critic=critic, optimizer=optimizer)


class Trainer:
    """Loss object that keeps the critic in attributes, and steps in a method that the loss calls."""

    def __init__(self, critic, optimizer):
        self.parts = {"critic": critic}
        self.optimizers = [None, optimizer]

    def compute_loss(self, model, batch):
        return gan_loss(model, batch, self.parts["critic"], self.optimizers[1])

    __call__ = compute_loss


def by_method(critic, optimizer):
    return Trainer(critic, optimizer).compute_loss


def by_global(critic, optimizer):
    globals().update(CRITIC=critic, CRITICS_OPTIMIZER=optimizer)

    def compute_loss(model, batch):
        return gan_loss(model, batch, CRITIC, CRITICS_OPTIMIZER)  # noqa: F821

    return compute_loss


def by_attribute(critic, optimizer):
    def compute_loss(model, batch):
        return gan_loss(model, batch, *compute_loss.parts)

    compute_loss.parts = critic, optimizer
    return compute_loss


WAYS = (by_closure, by_defaults, by_partial, Trainer, by_method, by_global, by_attribute)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_optimizer_leaves_no_trace(way):
    model, batches, opt = make_job()
    critic, optimizer = make_critic()
    before = snapshot(critic, optimizer), snapshot(model, opt)
    tried(model, batches, opt, compute_loss=way(critic, optimizer)).undo()
    assert (snapshot(critic, optimizer), snapshot(model, opt)) == before


def test_measured_trials_of_a_second_optimizer_leave_no_trace_and_training_is_the_plain_loop(clock):
    model, batches, opt = make_job()
    critic, optimizer = make_critic()
    torch.manual_seed(1)
    expected = train(model, batches, opt, compute_loss=by_closure(critic, optimizer))
    model, batches, opt = make_job()
    critic, optimizer = make_critic()
    before = snapshot(critic, optimizer)

    def loss(model, batch):
        clock.advance(0.001 * len(batch[0]))
        return gan_loss(model, batch, critic, optimizer)

    techniques = QUICK | {"fused_optimizer": False, "cpu_threads": False}  # these may change the last bits
    run = flatout.optimize(model, batches, opt, compute_loss=loss, techniques=techniques, budget=2)
    assert snapshot(critic, optimizer) == before
    torch.manual_seed(1)
    assert [run.step(batch).item() for batch in run.loader] == expected


def test_an_optimizer_inside_the_model_leaves_no_trace():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.critic, self.critics = make_critic()

        def forward(self, x):
            return self.body(x)

    _, batches, _ = make_job()
    model = Model()
    opt = torch.optim.SGD(model.body.parameters(), lr=0.1)
    before = snapshot(model, model.critics)
    loss = lambda model, batch: gan_loss(model.body, batch, model.critic, model.critics)  # noqa: E731
    tried(model, batches, opt, compute_loss=loss).undo()
    assert snapshot(model, model.critics) == before


def test_optimizers_that_step_in_the_backward_leave_no_trace():
    model, batches, _ = make_job()
    extra = nn.Linear(3, 3)
    model = nn.Sequential(model, extra)
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizers = {p: torch.optim.Adam([p]) for p in extra.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in extra.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = snapshot(model)
    tried(model, batches, opt, functional.cross_entropy).undo()
    assert snapshot(model) == before
    assert not any(optimizer.state for optimizer in optimizers.values())


@pytest.mark.parametrize("from_call", [1, 6])
def test_an_optimizer_that_is_not_found_raises_before_its_first_step(from_call):
    model, batches, opt = make_job()
    critic, optimizer = make_critic()
    hidden, unseen = weakref.ref(optimizer), Unseen(calls=0)

    def compute_loss(model, batch):
        unseen.calls += 1
        optimizer = (
            hidden() if unseen.calls >= from_call else torch.optim.SGD(copy.deepcopy(critic).parameters(), lr=0.1)
        )
        return gan_loss(model, batch, critic, optimizer)

    before = snapshot(critic, optimizer), snapshot(model, opt), random.getstate()
    with pytest.raises(RuntimeError, match=r"model, loader = flatout\.optimize\(.*flatout\.optim\.fuse"):
        tried(model, batches, opt, compute_loss=compute_loss)
    assert (snapshot(critic, optimizer), snapshot(model, opt), random.getstate()) == before
    assert unseen.calls == from_call
    optimizer.step()  # steps are no longer checked


def test_an_optimizer_that_the_loss_makes_for_itself_may_step():
    model, batches, opt = make_job()
    template = torch.optim.SGD([torch.zeros(1)], lr=0.1)

    def compute_loss(model, batch):
        inner = copy.deepcopy(model)
        for optimizer in (torch.optim.SGD(inner.parameters(), lr=0.1), copy.deepcopy(template)):
            functional.cross_entropy(inner(batch[0]), batch[1]).backward()
            optimizer.step()
        return functional.cross_entropy(model(batch[0]), batch[1])

    tried(model, batches, opt, compute_loss=compute_loss)


class Average:
    """Average of weights in an ordinary object with a ``state_dict``, as in torch-ema."""

    def __init__(self, model):
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for shadow, p in zip(self.shadow, model.parameters(), strict=True):
            shadow.lerp_(p.detach(), 0.5)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]

    def picture(self):
        return [bits(t) for t in self.shadow], self.updates


class Teacher(nn.Linear):
    """Teacher that copies the model through ``.data``, in eval mode."""

    def update(self, model):
        for mine, p in zip(self.parameters(), model.parameters(), strict=True):
            mine.data = 0.5 * mine.data + 0.5 * p.data

    def picture(self):
        return snapshot(self)["parameters"]


class Averaged(AveragedModel):
    def update(self, model):
        self.update_parameters(model)

    def picture(self):
        return snapshot(self)["parameters"], snapshot(self)["buffers"]


@pytest.mark.parametrize("make", [Average, lambda model: Teacher(4, 3).eval(), Averaged])
def test_averages_of_the_weights_leave_no_trace(make):
    model, batches, opt = make_job()
    average = make(model)

    def compute_loss(model, batch):
        average.update(model)
        return functional.cross_entropy(model(batch[0]), batch[1])

    before = average.picture()
    tried(model, batches, opt, compute_loss=compute_loss)
    assert average.picture() == before


def test_an_average_that_is_first_written_to_later_is_an_error():
    model, batches, opt = make_job()
    average, calls = nn.Linear(4, 3), 0

    def compute_loss(model, batch):
        nonlocal calls
        calls += 1
        if calls > 2:
            with torch.no_grad():
                average.weight.copy_(model.weight)
        return functional.cross_entropy(model(batch[0]), batch[1])

    before = snapshot(model, opt)
    with pytest.raises(RuntimeError, match="compute_loss"):
        tried(model, batches, opt, compute_loss=compute_loss)
    assert snapshot(model, opt) == before


def test_a_scaler_and_a_scheduler_in_the_loss_leave_no_trace():
    model, batches, opt = make_job()
    critic, optimizer = make_critic()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def compute_loss(model, batch):
        output = model(batch[0])
        optimizer.zero_grad()
        scaler.scale(critic(output.detach()).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return functional.cross_entropy(output, batch[1])

    before = scaler.state_dict(), scheduler.state_dict(), snapshot(critic, optimizer)
    tried(model, batches, opt, compute_loss=compute_loss)
    assert (scaler.state_dict(), scheduler.state_dict(), snapshot(critic, optimizer)) == before


def test_a_frozen_teacher_costs_no_copy_and_keeps_its_gradients():
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    bias = torch.zeros(3, requires_grad=True)

    def compute_loss(model, batch):
        return functional.mse_loss(model(batch[0]), teacher(batch[0]) + bias)

    seen = operators(lambda: Snapshot.capture([], code=[compute_loss]))
    assert seen.count("aten::clone") == 1  # of the bias, which is no module's
    model, batches, opt = make_job()
    before = snapshot(teacher)
    tried(model, batches, opt, compute_loss=compute_loss)
    assert snapshot(teacher) == before
    assert bias.grad is None


class Observed(nn.Module):
    """Module whose first forward resizes a buffer, as quantization observers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("min_val", torch.tensor([]))

    def forward(self, x):
        self.min_val.resize_(3).copy_(x[0, :3])
        return self.layer(x)


def test_buffers_that_forward_resizes_are_as_before():
    _, batches, _ = make_job()
    model = Observed()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, opt)
    tried(model, batches, opt, functional.cross_entropy).undo()
    assert snapshot(model, opt) == before


class Draws(nn.Linear):
    """Layer that draws in every forward from its own generator."""

    def __init__(self):
        super().__init__(4, 3)
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.noise))


class DrawsInSteps(torch.optim.SGD):
    """Optimizer that draws in every step from its own generator, and keeps sums of weights in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.noise = random.Random(2)
        self.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1 * self.noise.random()
        super().step(closure)
        for total, p in zip(self.sums, self.param_groups[0]["params"], strict=True):
            total += p.detach()


def test_what_model_and_optimizer_keep_in_attributes_is_as_before():
    _, batches, _ = make_job()
    model = Draws()
    opt = DrawsInSteps(model.parameters())

    def picture():
        return bits(model.noise.get_state()), opt.noise.getstate(), [bits(t) for t in opt.sums], snapshot(model, opt)

    before = picture()
    run = tried(model, batches, opt, functional.cross_entropy)
    run.undo()
    assert picture() == before
    run.step(batches[0])
    assert all(new != old for new, old in zip(picture(), before, strict=True))


class Frees(nn.Linear):
    """Layer that fails after it has freed a buffer's memory, which cannot be allocated again."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("freed", torch.zeros(2))

    def forward(self, x):
        self.weight.data.add_(1)
        self.freed.resize_(0).untyped_storage().resize_(0)
        self.freed.numpy()
        raise KeyError("labels")


def test_a_failure_restores_everything_but_what_cannot_be_restored():
    _, batches, _ = make_job()
    model = Frees()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = bits(model.weight)
    with pytest.raises(KeyError, match="labels") as failed:
        tried(model, batches, opt, functional.cross_entropy, deterministic=True)
    assert "resiz" in failed.value.__notes__[0]
    assert bits(model.weight) == before
    assert not torch.are_deterministic_algorithms_enabled()  # turned off after the state is restored


@pytest.mark.filterwarnings("error")
def test_buffers_that_forward_resizes_are_counted_and_computed_in_parts():
    _, batches, _ = make_job()
    model = Observed()
    run = flatout.optimize(
        model,
        batches,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        techniques=NO_TECHNIQUES | {"batch_size": {"micro_batch": 4}},
        budget=0,
    )
    assert model.min_val.shape == (0,)
    run.step(batches[0])
    assert model.min_val.shape == (3,)


def test_looking_at_steps_keeps_no_update_from_its_fast_path():
    """The fast path sets gradients once. A user's hook may change gradients, which must then be set again."""

    def settings_per_update(work):
        seen = operators(work)
        return seen.count("flatout::set_grads") / seen.count("flatout::step_bucket_")

    model, batches, _ = make_job()
    opt = flatout.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    in_trials = settings_per_update(lambda: tried(model, batches, opt, compute_loss=loss))
    loss(model, batches[0]).backward()
    assert in_trials == settings_per_update(lambda: flatout.optim.update(opt))
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: None)
    try:
        assert in_trials < settings_per_update(lambda: flatout.optim.update(opt))
    finally:
        handle.remove()


def test_a_dead_proxy_is_no_obstacle():
    model, batches, opt = make_job()
    opt.owner = proxy = weakref.proxy(nn.Linear(1, 1))

    def compute_loss(model, batch, proxy=proxy):
        return functional.cross_entropy(model(batch[0]), batch[1])

    tried(model, batches, opt, compute_loss=compute_loss)


def test_a_module_that_shares_the_models_memory_is_no_error():
    model, batches, opt = make_job()
    twin = nn.Linear(4, 3)
    twin.weight = nn.Parameter(model.weight.detach())
    lazy = nn.LazyLinear(2)

    def compute_loss(model, batch, unused=lazy):
        return functional.cross_entropy(model(batch[0]) + twin(batch[0]), batch[1])

    before = snapshot(model, opt), snapshot(twin)
    tried(model, batches, opt, compute_loss=compute_loss)
    assert (snapshot(model, opt), snapshot(twin)) == before
    assert lazy.has_uninitialized_params()
