"""Steps that run out of memory are repeated in smaller parts, and nobody can tell from the weights."""

import contextlib
import gc
import itertools
import subprocess
import sys
import textwrap
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import flatout
from flatout import _gradients
from flatout.data import batch_size_of
from flatout.mfu.signatures import Work
from flatout.micro_batches import part_sizes
from flatout.optim import UpdateCutInHalf, base, bucket
from flatout.techniques import REGISTRY, Measured
from flatout.techniques.cuda_graph import GraphSwitch
from tests.helpers import bits
from tests.techniques.test_cuda_graph import Rerun

PLAIN = {t.name: False for t in REGISTRY if isinstance(t, Measured)}
FUSED = PLAIN | {"fused_optimizer": True}
MESSAGE = "CUDA out of memory. Tried to allocate 1.00 GiB."

pytestmark = pytest.mark.filterwarnings("ignore:a step of .* ran out of memory:RuntimeWarning")


def out_of_memory():
    return torch.OutOfMemoryError(MESSAGE)


class Trap(nn.Module):
    """Passes on what it gets, unless that is too much.

    Attributes:
        sprung: how often it was too much.
        seen: samples of each forward.
    """

    def __init__(self):
        super().__init__()
        self.where, self.limit, self.spared, self.error = "", 0, 0, out_of_memory
        self.sprung, self.seen = 0, []

    def arm(self, where, limit, spared=0, error=out_of_memory):
        """From here on more than ``limit`` samples fail in the forward or the backward, but for the first ones."""
        self.where, self.limit, self.spared, self.error = where, limit, spared, error
        self.sprung, self.seen = 0, []

    def passes(self, where, samples):
        if where != self.where or samples <= self.limit:
            return
        if self.spared:
            self.spared -= 1
            return
        self.sprung += 1
        raise self.error()

    def forward(self, x):
        self.seen.append(len(x))
        self.passes("forward", len(x))
        return _Passed.apply(x if x.requires_grad else x.detach().requires_grad_(), self)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.trap.passes("backward", len(grad))
        return grad, None


def net(depth=3, place=1, extra=None):
    """Layers, and a trap before the layer at ``place``; ``extra`` behind each layer."""
    torch.manual_seed(0)
    layers = []
    for i in range(depth):
        if i == place:
            layers.append(Trap())
        layers += [nn.Linear(6, 6), *([] if extra is None else [extra()]), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def trap_of(run):
    return next(m for m in run.model.modules() if isinstance(m, Trap))


def batches_of(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {"sgd": (sgd, PLAIN), "adamw": (adamw, PLAIN), "fused sgd": (sgd, FUSED), "fused adamw": (adamw, FUSED)}


def make(model=None, optimizer="adamw", loss_fn=functional.cross_entropy, **settings):
    model = net() if model is None else model
    build, choices = OPTIMIZERS[optimizer]
    run = flatout.optimize(model, batches_of(16), build(model), loss_fn, techniques=choices, budget=0, **settings)
    # Counting FLOPs takes steps of its own where it has the time.
    run._job.work = lambda batch: Work(batch_size_of(batch), 0, None)
    return run


def train(run, batches):
    losses = [run.step(batch) for batch in batches]
    run._flush()
    return losses


def assert_same(run, twin):
    for (name, ours), theirs in zip(run.model.named_parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def assert_recovers(make_run, batches, *armed, **how):
    """Trains with and without a trap; returns the run that met it, whose weights and losses are the other's."""
    run, twin = make_run(), make_run()
    trap_of(run).arm(*armed, **how)
    losses, expected = train(run, batches), train(twin, batches)
    assert trap_of(run).sprung
    assert not trap_of(twin).sprung
    assert_same(run, twin)
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours.dim() == 0
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert run._job.pending == twin._job.pending == 0
    return run


@contextlib.contextmanager
def scaled(on=True):
    """Inside, gradients are scaled as those of a model in fp16 are; it computes in float64 all the same."""
    with pytest.MonkeyPatch.context() as patch:
        if on:
            patch.setattr("flatout.job.autocast_dtype", lambda model: torch.float16)
        yield


# -- forward and backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_is_the_unsplit_one(where, place, optimizer):
    run = assert_recovers(lambda: make(net(place=place), optimizer), batches_of(16, 16, 16), where, 8)
    assert run.micro_batch == 8
    assert trap_of(run).sprung == 1  # what was learnt is kept


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("spared", range(4))
def test_finished_batches_of_an_accumulation_keep_what_they_gave(where, spared):
    run = assert_recovers(lambda: make(accumulate=4), batches_of(*[16] * 9), where, 8, spared=spared)
    assert trap_of(run).sprung == 1
    assert trap_of(run).seen == [16] * (spared + 1) + [8, 8] * (9 - spared)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_halves_are_halved_again(where):
    run = assert_recovers(make, batches_of(32, 32), where, 5)
    assert run.micro_batch == 4
    assert trap_of(run).seen == [32, 16, 8, *[4] * 16]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_part_is_halved_and_those_before_it_stay(where):
    # The whole, then the first and the second of three parts pass; the third does not.
    run = make()
    trap = trap_of(run)
    trap.arm(where, 4, spared=0)
    failures = itertools.chain([True, False, True], itertools.repeat(False))
    trap.passes = lambda at, samples: _fail(trap) if at == where and samples > 4 and next(failures) else None
    twin = make()
    batches = batches_of(16)
    train(run, batches)
    train(twin, batches)
    assert trap.seen == [16, 8, 8, 4, 4]
    assert run.micro_batch == 4
    assert_same(run, twin)


def _fail(trap):
    trap.sprung += 1
    raise out_of_memory()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_half_done_backward_of_an_accumulation_fails_twice(place):
    # Layers behind the trap have their gradient of the batch, and then of a part, when the others fail.
    run = assert_recovers(lambda: make(net(place=place), accumulate=3), batches_of(16, 16, 16), "backward", 3, spared=1)
    assert run.micro_batch == 2


def test_smaller_batches_are_not_taken_apart():
    run = assert_recovers(make, batches_of(16, 8, 5, 16), "forward", 8)
    assert trap_of(run).seen == [16, 8, 8, 8, 5, 8, 8]


def test_an_epochs_leftover_has_its_own_weight():
    assert_recovers(lambda: make(optimizer="fused sgd", accumulate=4), batches_of(16, 16, 16, 16, 16, 7), "backward", 8)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loss_scaler_and_the_clip_see_the_whole_gradient(optimizer, max_grad_norm):
    with scaled():
        run = assert_recovers(
            lambda: make(optimizer=optimizer, accumulate=2, max_grad_norm=max_grad_norm),
            batches_of(*[16] * 5),
            "backward",
            8,
            spared=1,
        )
        assert run.scaler.get_scale() == 65536
        assert not run.scaler.last_step_skipped


@pytest.mark.slow
@settings(max_examples=200)
@given(
    depth=st.integers(1, 4),
    data=st.data(),
    sizes=st.lists(st.integers(2, 33), min_size=1, max_size=5),
    accumulate=st.integers(1, 3),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    max_grad_norm=st.sampled_from([None, 0.05, 10.0]),
    is_scaled=st.booleans(),
    where=st.sampled_from(["forward", "backward"]),
)
def test_whatever_is_trained(depth, data, sizes, accumulate, optimizer, max_grad_norm, is_scaled, where):
    place = data.draw(st.integers(0, depth - 1))
    limit = data.draw(st.integers(1, max(sizes) - 1))
    with scaled(is_scaled):
        assert_recovers(
            lambda: make(net(depth, place), optimizer, accumulate=accumulate, max_grad_norm=max_grad_norm),
            batches_of(*sizes),
            where,
            limit,
            spared=data.draw(st.integers(0, sum(size > limit for size in sizes) - 1)),
        )


@pytest.mark.parametrize("frozen", [2, 5])
def test_frozen_and_tied_weights(frozen):
    def made():
        model = net(4, 2)
        model[0].weight = model[7].weight  # one leaf in front of the trap and behind it
        model[frozen].requires_grad_(False)
        return make(model, "sgd", accumulate=2)

    assert_recovers(made, batches_of(16, 16), "backward", 4, spared=1)


def test_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.trap, self.head = nn.Embedding(50, 6, sparse=True), Trap(), nn.Linear(6, 3)
            self.double()

        def forward(self, x):
            return self.head(self.trap(self.words(x[:, 0].abs().long())) + self.words(x[:, 1].abs().long()))

    assert_recovers(
        lambda: make_with(Words(), lambda m: torch.optim.SGD(m.parameters(), lr=0.3), accumulate=2),
        batches_of(16, 16, 16, 16),
        "backward",
        4,
        spared=1,
    )


def make_with(model, build, techniques=PLAIN, **settings):
    run = flatout.optimize(
        model, batches_of(16), build(model), functional.cross_entropy, techniques=techniques, budget=0, **settings
    )
    run._job.work = lambda batch: Work(batch_size_of(batch), 0, None)
    return run


def test_gradients_that_no_update_uses_up_grow_once():
    def made():
        model = net()
        run = make_with(model, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1))
        return run

    run = assert_recovers(made, batches_of(16, 16), "backward", 8, spared=1)
    twin = made()
    train(twin, batches_of(16, 16))
    torch.testing.assert_close(run.model[-1].weight.grad, twin.model[-1].weight.grad, rtol=1e-9, atol=1e-12)


# -- losses ----------------------------------------------------------------------------------------------------


def tokens_of(*lengths):
    """Batches of 8 samples, with targets of which only the first ones count."""
    batches = []
    for (x, y), length in zip(batches_of(*[8] * len(lengths)), lengths, strict=True):
        y[length:] = -100
        batches.append((x, y))
    return batches


@pytest.mark.parametrize(
    "weight",
    [lambda batch: int((batch[1] != -100).sum()), lambda batch: (batch[1] != -100).sum()],
    ids=["number", "tensor"],
)
def test_token_means(weight):
    # Of the first batch the last parts weigh nothing: their own mean is 0 / 0.
    run = assert_recovers(lambda: make(loss_weight=weight, accumulate=2), tokens_of(3, 5, 8, 1), "backward", 2)
    assert run.micro_batch == 2


def test_token_means_need_to_be_told():
    run, twin = make(), make()
    trap_of(run).arm("forward", 4)
    batches = tokens_of(5)
    train(run, batches)
    train(twin, batches)
    with pytest.raises(AssertionError):
        assert_same(run, twin)


def test_sums_are_summed():
    loss = nn.CrossEntropyLoss(reduction="sum")
    assert_recovers(lambda: make(optimizer="sgd", loss_fn=loss), batches_of(16, 7), "forward", 3)


@pytest.mark.parametrize("loss_weight", [3, "samples"])
def test_a_loss_weight_has_to_be_callable(loss_weight):
    with pytest.raises(TypeError, match="loss_weight must be callable"):
        make(loss_weight=loss_weight)


def test_a_loss_weight_needs_an_optimizer():
    with pytest.raises(ValueError, match="loss_weight is used by"):
        flatout.optimize(net(), batches_of(8), loss_weight=len, budget=0)


# -- what else a step changes ----------------------------------------------------------------------------------


def test_batchnorm_counts_once_and_knows_the_samples_once():
    def norm():
        return nn.BatchNorm1d(6)

    run, twin = make(net(3, 1, norm)), make(net(3, 1, norm))
    batch = batches_of(16)[0]
    before = [bits(b) for b in twin.model.buffers()]
    trap_of(run).arm("forward", 8)
    run.step(batch)
    twin.step(batch)
    ours, theirs = ([m for m in r.model.modules() if isinstance(m, nn.BatchNorm1d)] for r in (run, twin))
    for mine, other in zip(ours, theirs, strict=True):
        assert int(mine.num_batches_tracked) == int(other.num_batches_tracked) == 1
    assert before != [bits(b) for b in twin.model.buffers()]
    # In front of the trap: what the whole batch has made of it.
    assert bits(ours[0].running_mean) == bits(theirs[0].running_mean)
    assert bits(ours[0].running_var) == bits(theirs[0].running_var)


def test_statistics_behind_the_failure_are_the_means_over_the_parts():
    model = nn.Sequential(Trap(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    run = make(model, "sgd")
    x, y = batches_of(24)[0]
    trap_of(run).arm("forward", 10)
    for step in (1, 2):
        start = model[1].running_mean.clone()
        run.step((x, y))
        torch.testing.assert_close(model[1].running_mean, 0.9 * start + 0.1 * x.mean(0), rtol=1e-9, atol=1e-12)
        assert int(model[1].num_batches_tracked) == step
    variances = torch.stack([part.var(0) for part in x.split(8)]).mean(0)
    torch.testing.assert_close(model[1].running_var, 0.81 + 0.19 * variances, rtol=1e-9, atol=1e-12)


class Remembers(nn.Module):
    """Buffers of every make: infinite, replaced in each forward, growing, of other dtypes, none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("replaced", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.replaced = 0.5 * self.replaced + 0.5 * x.detach().mean(0)
        self.last = x.detach()[:, 0]
        self.calls += 1
        return x


def test_buffers_of_every_make():
    def remembering():
        torch.manual_seed(0)
        return make(nn.Sequential(Trap(), Remembers(), nn.Linear(6, 3)).double(), "sgd")

    run = assert_recovers(remembering, batches_of(16, 16), "forward", 8)
    kept, twin = run.model[1], remembering()
    train(twin, batches_of(16, 16))
    torch.testing.assert_close(kept.replaced, twin.model[1].replaced)
    assert bits(kept.mask) == bits(twin.model[1].mask)
    assert int(kept.calls) == 2
    assert len(kept.last) == 8
    assert kept.nothing is None


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(()).item())
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_first_part_draws_what_the_batch_drew(where):
    run = make(nn.Sequential(Draws(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm(where, 4)
    torch.manual_seed(7)
    expected = torch.rand(4).tolist()
    torch.manual_seed(7)
    run.model[0].drawn.clear()
    run.step(batches_of(16)[0])
    assert run.model[0].drawn == [expected[0]] * 3 + expected[1:]


def test_a_step_is_counted_once_with_its_samples():
    run = make(accumulate=2, scheduler=None)
    trap_of(run).arm("backward", 3)
    train(run, batches_of(16, 16, 16))
    assert run.stats.total.steps == 3
    assert run.stats.total.samples == 48


def test_the_scheduler_steps_once_per_update():
    model = net()
    opt = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    run = flatout.optimize(
        model,
        batches_of(16),
        opt,
        functional.cross_entropy,
        scheduler=scheduler,
        accumulate=2,
        techniques=PLAIN,
        budget=0,
    )
    trap_of(run).arm("forward", 4)
    train(run, batches_of(16, 16, 16))
    assert opt.param_groups[0]["lr"] == pytest.approx(0.3 * 0.25)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_failed_graph_is_gone_before_parts_are_tried(where, monkeypatch):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.activations = []

        def forward(self, x):
            assert not any(reference() is not None for reference in self.activations)
            y = x * 2
            self.activations.append(weakref.ref(y))
            return y * y

    run = make(nn.Sequential(nn.Linear(6, 6), Holds(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm(where, 4)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        run.model[1].activations.clear()
        run.step(batches_of(16)[0])
    finally:
        gc.enable()
    assert len(run.model[1].activations) == 6


def test_gradients_end_up_in_the_tensors_that_somebody_holds():
    run = make(accumulate=2)
    batches = batches_of(16, 16)
    run.step(batches[0])
    held = [p.grad for p in run.model.parameters()]
    trap_of(run).arm("backward", 4)
    run.step(batches[1])
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), held, strict=True))


# -- what is said ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default:a step of .* ran out of memory:RuntimeWarning")
class TestWarning:
    def told(self, run, *sizes, limit=8):
        trap_of(run).arm("forward", limit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(run, batches_of(*sizes))
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    def test_it_tells_once_what_happened(self):
        (told,) = self.told(make(loss_fn=nn.MultiMarginLoss()), 16, 16, 16)
        assert told == (
            "a step of 16 samples ran out of memory: it is computed in parts of 8 from here on, with the same result"
        )

    def test_it_tells_each_time_that_parts_become_smaller(self):
        run = make()
        assert len(self.told(run, 16, 16)) == 1
        assert "parts of 2" in self.told(run, 16, limit=2)[0]

    @pytest.mark.parametrize(
        ("layer", "difference"),
        [
            (lambda: nn.BatchNorm1d(6), "except that BatchNorm normalises each part by itself"),
            (lambda: nn.Dropout(0.1), "except that random numbers (Dropout's masks) are drawn for each part"),
        ],
        ids=["batchnorm", "dropout"],
    )
    def test_it_names_what_differs(self, layer, difference):
        (told,) = self.told(make(net(3, 1, layer)), 16)
        assert difference in told

    def test_nothing_differs_in_eval_mode(self):
        run = make(net(3, 1, lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.1))))
        run.model.eval()
        (told,) = self.told(run, 16)
        assert "except" not in told

    def test_a_loss_of_unknown_weight_is_named(self):
        assert "if the loss is a mean over samples" in self.told(make(), 16)[0]
        assert "if the loss" not in self.told(make(loss_weight=batch_size_of), 16)[0]


def test_no_step_fails_no_word():
    run = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, batches_of(16, 16))
    assert run.micro_batch is None


# -- what is not recovered from --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, MemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_other_errors_pass(where, error):
    run = make()
    mine = error("mine")

    def raised():
        return mine

    trap_of(run).arm(where, 8, error=raised)
    with pytest.raises(error, match="mine"):
        run.step(batches_of(16)[0])
    assert trap_of(run).seen == [16]
    assert run.micro_batch is None


def picture(run):
    return [bits(t) for t in (*run.model.parameters(), *run.model.buffers())], bits(torch.get_rng_state())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_when_a_sample_does_not_fit_nothing_has_happened(where):
    run, twin = make(net(3, 1, lambda: nn.Dropout(0.2)), "sgd"), make(net(3, 1, lambda: nn.Dropout(0.2)), "sgd")
    torch.manual_seed(5)
    before = picture(run)
    trap_of(run).arm(where, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batches_of(16)[0])
    assert picture(run) == before
    assert run._job.pending == 0
    assert run.micro_batch is None
    assert all(p.grad is None for p in run.model.parameters())
    told = str(caught.value)
    assert "a single sample does not fit" in told
    assert MESSAGE in told
    assert "gradients as much" in told
    for rung in ("smaller batches", "precision='bf16'", "torch.utils.checkpoint"):
        assert rung in told
    trap_of(run).arm("", 0)
    train(run, batches_of(8, 16))  # and training goes on
    torch.manual_seed(5)
    train(twin, batches_of(8, 16))
    assert_same(run, twin)


def test_the_batches_before_a_final_error_wait_on_where_that_can_be():
    run, twin = make(accumulate=3), make(accumulate=3)
    first, bad, *rest = batches_of(16, 16, 16, 16)
    run.step(first)
    trap_of(run).arm("forward", 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(bad)
    assert "lost" not in str(caught.value)
    assert run._job.pending == 1
    trap_of(run).arm("", 0)
    train(run, rest)
    train(twin, [first, *rest])
    assert_same(run, twin)


def test_batches_that_are_lost_with_a_final_error_are_told():
    run, twin = make(net(place=1), "sgd", accumulate=3), make(net(place=1), "sgd", accumulate=3)
    first, second, bad, *rest = batches_of(*[16] * 6)
    run.step(first)
    run.step(second)
    trap_of(run).arm("backward", 0)
    with pytest.raises(torch.OutOfMemoryError, match="those of 2 before it are lost"):
        run.step(bad)
    assert run._job.pending == 0
    trap_of(run).arm("", 0)
    train(run, rest)
    train(twin, rest)
    assert_same(run, twin)


def test_a_batch_that_cannot_be_taken_apart():
    model = nn.Sequential(Trap(), nn.Linear(6, 3)).double()
    batch = {"x": batches_of(16)[0][0], "words": nn.utils.rnn.pack_sequence([torch.ones(2)] * 16)}
    run = flatout.optimize(
        model, [batch], sgd(model), compute_loss=lambda model, b: model(b["x"]).sum(), techniques=PLAIN, budget=0
    )
    trap_of(run).arm("forward", 8)
    with pytest.raises(torch.OutOfMemoryError, match="the batch cannot be taken apart"):
        run.step(batch)
    assert run.micro_batch is None


def test_a_model_that_takes_no_parts():
    class Rigid(nn.Module):
        def forward(self, x):
            return x.view(16, 6)

    run = make(nn.Sequential(Rigid(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm("forward", 8)
    before = picture(run)
    with pytest.raises(torch.OutOfMemoryError, match=r"in parts of 8 it fails: RuntimeError.*shape") as caught:
        run.step(batches_of(16)[0])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert picture(run) == before
    assert run.micro_batch is None


def test_later_errors_in_parts_pass_as_they_are():
    run = make(optimizer="sgd")
    trap_of(run).arm("forward", 8)
    run.step(batches_of(16)[0])
    before = picture(run)
    trap_of(run).arm("backward", 7, spared=1, error=lambda: ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        run.step(batches_of(16)[0])
    assert picture(run) == before
    assert all(p.grad is None for p in run.model.parameters())
    assert run.micro_batch == 8


def test_hooks_that_use_gradients_in_the_backward():
    run = make(optimizer="sgd")
    run.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    trap_of(run).arm("forward", 8)
    with pytest.raises(torch.OutOfMemoryError, match="hooks use the gradients"):
        run.step(batches_of(16)[0])


# -- the update ------------------------------------------------------------------------------------------------


class Fails:
    """Stands in the place of a function, and runs out of memory at some of its calls."""

    def __init__(self, function, *calls):
        self.function, self.failing, self.calls = function, calls, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls in self.failing:
            raise out_of_memory()
        return self.function(*args, **kwargs)


UPDATES = [
    {},
    {"accumulate": 3},
    {"accumulate": 3, "max_grad_norm": 0.05},
]


@pytest.mark.filterwarnings("ignore:an update ran out of memory:RuntimeWarning")
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 3, 8])
def test_an_update_of_ours_is_tried_again(failing, settings, is_scaled, monkeypatch):
    monkeypatch.setattr("flatout.job.autocast_dtype", lambda model: torch.float16 if is_scaled else None)
    run, twin = make(optimizer="fused adamw", **settings), make(optimizer="fused adamw", **settings)
    batches = batches_of(*[16] * 5)
    fails = Fails(bucket.keep_moment, failing)
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "keep_moment", fails)
        losses = train(run, batches)
    assert fails.calls > failing
    assert [bits(loss) for loss in losses] == [bits(loss) for loss in train(twin, batches)]
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]
    assert run.micro_batch is None


class Hungry(torch.optim.SGD):
    """Momentum that is begun entry by entry, and a step that may fail behind some of its writes."""

    begins = staticmethod(torch.zeros_like)
    fails_behind = None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            if len(self.state[p]) == 0:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["momentum"] = self.begins(p)
        for i, p in enumerate(parameters):
            if i == self.fails_behind:
                raise out_of_memory()
            self.state[p]["momentum"].mul_(0.9).add_(p.grad)
            p.add_(self.state[p]["momentum"], alpha=-self.param_groups[0]["lr"])


def hungry(model):
    return Hungry(model.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:an update ran out of memory:RuntimeWarning")
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 4])
def test_an_update_of_anybodys_that_has_written_nothing_is_tried_again(failing, settings, is_scaled, monkeypatch):
    monkeypatch.setattr("flatout.job.autocast_dtype", lambda model: torch.float16 if is_scaled else None)
    run, twin = (make_with(net(), hungry, **settings) for _ in range(2))
    run.optimizer.begins = Fails(torch.zeros_like, failing)
    batches = batches_of(*[16] * 5)
    train(run, batches)
    train(twin, batches)
    assert run.optimizer.begins.calls > failing
    # A clip that is done twice is exact to 1e-6 of the norm, as torch's own is.
    for ours, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert run.micro_batch is None


def test_an_epochs_leftover_is_averaged_once(monkeypatch):
    monkeypatch.setattr("flatout.job.autocast_dtype", lambda model: torch.float16)
    run, twin = (make(optimizer="fused adamw", accumulate=4) for _ in range(2))
    batches = batches_of(16, 16, 16)
    for batch in batches:
        run.step(batch)
    monkeypatch.setattr(bucket, "keep_moment", Fails(bucket.keep_moment, 1))
    with pytest.warns(RuntimeWarning, match="an update ran out of memory, and went well"):
        run._flush()
    train(twin, batches)
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]


@pytest.mark.parametrize("behind", [1, 3])
def test_an_update_cut_in_half_says_so(behind):
    run = make_with(net(), hungry)
    run.optimizer.fails_behind = behind
    with pytest.raises(UpdateCutInHalf, match=r"Hungry ran out of memory in the middle.*checkpoint") as caught:
        run.step(batches_of(16)[0])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert run._job.pending == 0


def test_an_update_of_ours_has_its_memory_before_the_first_write(monkeypatch):
    model = net()
    optimizer = flatout.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1)  # a bucket for each
    model(batches_of(16)[0][0]).sum().backward()
    order = []
    for name in ("empty", "zeros", "full", "ones", "zeros_like", "empty_like", "full_like"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, made=made, **k: order.append("memory") or made(*a, **k))
    moved = _gradients.on_device  # where tensors of learning rates and factors are made, too
    monkeypatch.setattr(_gradients, "on_device", lambda *a: order.append("memory") or moved(*a))
    step = bucket.Bucket.step
    monkeypatch.setattr(bucket.Bucket, "step", lambda *a, **k: order.append("write") or step(*a, **k))
    for _ in range(2):
        order.clear()
        flatout.optim.update(optimizer, inv_scale=0.5, max_grad_norm=0.1)
        assert order[-8:] == ["write"] * 8
        assert "write" not in order[:-8]


def test_an_update_of_ours_that_fails_between_buckets_says_so(monkeypatch):
    model = net()
    optimizer = flatout.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    model(batches_of(16)[0][0]).sum().backward()
    fails = Fails(bucket.Bucket.step, 1, 3)
    monkeypatch.setattr(bucket.Bucket, "step", lambda *a, **k: fails(*a, **k))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    with pytest.raises(UpdateCutInHalf):
        optimizer.step()


@pytest.mark.parametrize("inv_scale", [None, 0.5])
def test_torchs_step_in_the_place_of_ours(inv_scale, monkeypatch):
    words = nn.Embedding(5, 3, sparse=True)
    optimizer = flatout.optim.SGD(words.parameters(), lr=0.1)
    words(torch.tensor([1, 2])).sum().backward()
    before = bits(words.weight)
    fails = Fails(base.unhooked_step(torch.optim.SGD), 1)
    monkeypatch.setattr(base, "unhooked_step", lambda cls: lambda *a: fails(*a))
    with pytest.raises(torch.OutOfMemoryError if inv_scale is None else UpdateCutInHalf):
        flatout.optim.update(optimizer, inv_scale=inv_scale)  # gradients that were scaled would be scaled once more
    assert bits(words.weight) == before
    if inv_scale is None:
        flatout.optim.update(optimizer)
        assert bits(words.weight) != before


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_an_update_that_fails_for_good_is_left_out(optimizer, monkeypatch):
    run, twin = make(optimizer=optimizer), make(optimizer=optimizer)
    batch, *rest = batches_of(16, 16, 16)
    before = picture(run)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", Fails(torch.zeros_like, *range(1, 99)))
        with pytest.raises(torch.OutOfMemoryError, match="the update ran out of memory, and was left out"):
            run.step(batch)
    assert picture(run) == before
    train(run, rest)
    train(twin, rest)
    assert_same(run, twin)


# -- whole steps -----------------------------------------------------------------------------------------------


def test_a_recorded_step_goes_the_same_way():
    run, twin = make(optimizer="fused adamw"), make(optimizer="fused adamw")
    recorder = Rerun(run._job)
    switch = GraphSwitch(run._job, recorder)
    switch.enable()
    switch.freeze()
    batches = batches_of(*[16] * 6, 8, 16)
    for batch in batches[:5]:
        run.step(batch)
    replays = switch.whole_step.replays
    assert replays
    trap_of(run).arm("backward", 8)
    for batch in batches[5:]:
        run.step(batch)
    assert switch.whole_step.replays == replays
    assert recorder.given_back == 1  # the memory of graphs is the parts' to use
    assert run.micro_batch == 8
    train(twin, batches)
    assert_same(run, twin)


# -- sizes -----------------------------------------------------------------------------------------------------


@given(samples=st.integers(1, 300), data=st.data())
def test_parts_are_even_and_no_larger_than_they_may_be(samples, data):
    most = data.draw(st.integers(1, samples))
    sizes = part_sizes(samples, most)
    assert sum(sizes) == samples
    assert max(sizes) <= most
    assert min(sizes) >= 1
    unit = 8 if samples % 8 == 0 and most >= 8 else 1
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    assert part_sizes(samples, max(sizes)) == sizes


# -- a real ceiling --------------------------------------------------------------------------------------------

CEILING = """
    import resource, sys, warnings
    import torch
    from torch import nn
    from torch.nn import functional
    import flatout

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # What a forward keeps for the backward: 24 x 2048 x 512 doubles, 201 MB.
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh())]).double()
    x, y = torch.randn(6144, 512, dtype=torch.float64), torch.randn(6144, 512, dtype=torch.float64)
    batches = list(zip(x.split(2048), y.split(2048)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    techniques = {"compile": False, "precision": False, "fused_optimizer": True}
    run = flatout.optimize(model, [(x[:8], y[:8])], optimizer, functional.mse_loss, techniques=techniques, budget=0)
    run.step((x[:64], y[:64]))
    if sys.argv[1] == "limited":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    losses = [float(run.step(batch)) for batch in batches]
    print(run.micro_batch, *[repr(float(p.double().sum())) for p in model.parameters()], *map(repr, losses))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux alone")
def test_a_real_ceiling():
    told = {}
    for name in ("limited", "free"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CEILING), name], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        micro_batch, *numbers = done.stdout.split()
        told[name] = list(map(float, numbers))
        if name == "free":
            assert micro_batch == "None"
            assert "ran out of memory" not in done.stderr
        else:
            assert int(micro_batch) < 2048
            assert "a step of 2048 samples ran out of memory" in done.stderr
    assert told["limited"] == pytest.approx(told["free"], rel=1e-8, abs=1e-10)
