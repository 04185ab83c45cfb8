"""Steps as graphs: which steps are replayed, and bit-identical results of replayed and eager steps."""

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.snapshot import Snapshot
from flatout.mfu import MfuCounter
from flatout.optim import unfuse
from flatout.training.capture_guards import sign
from flatout.training.graphed_step import MOST_CHANGES, MOST_GRAPHS, PAYS_AFTER, WARM_UP
from tests.clock import TimedStep
from tests.helpers import bits, snapshot, trained_state
from tests.jobs import NO_TECHNIQUES, job_of, only
from tests.reasons import reasons
from tests.techniques.harness import (
    change_loss,
    cuda_graph_without_a_gpu,
    decided,
    forced,
    graphed,
    rates_of,
    recorder_of,
    refusal,
    refused,
    unable,
)
from tests.unseen import Unseen

FUSED = NO_TECHNIQUES | {"fused_optimizer": True}
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


def batches_of(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def adamw(model):
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "tensor lr": lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1)),
}


class Pair:
    """Two identical trainings: one eager, one with a graph where possible."""

    def __init__(self, optimizer=adamw, schedule=None, changes=FUSED, **settings):
        self.runs = []
        self.schedulers = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Net()
            opt = optimizer(model)
            scheduler = None if schedule is None else schedule(opt)
            self.schedulers.append(scheduler)
            self.runs.append(
                flatout.optimize(
                    model,
                    batches_of(16, 16),
                    opt,
                    functional.cross_entropy,
                    scheduler=scheduler,
                    techniques=changes,
                    budget=0,
                    **settings,
                )
            )
        self.recorder = recorder_of(self.runs[1])
        self.candidate = graphed(self.runs[1], self.recorder)
        self.candidate.__enter__()
        self.candidate.end_warmup()
        self.random = [torch.get_rng_state()] * 2
        self.losses = []

    def each(self, change):
        for run in self.runs:
            change(run)

    def step(self, batch):
        """Step both trainings and check that their visible states are bit-identical."""
        losses = []
        for i, run in enumerate(self.runs):
            torch.set_rng_state(self.random[i])
            losses.append(run.step(batch))
            self.random[i] = torch.get_rng_state()
        assert bits(losses[0]) == bits(losses[1])
        self.losses.append((losses[1], bits(losses[1])))
        plain, replayed = (trained_state(run.model, run.optimizer) for run in self.runs)
        for part in ("parameters", "buffers", "grads", "groups", "optimizer"):
            assert plain[part] == replayed[part]
        assert bits(self.random[0]) == bits(self.random[1])

    def train(self, *sizes):
        for batch in batches_of(*sizes):
            self.step(batch)

    def warmed(self):
        self.train(*[16] * (WARM_UP + 2))
        assert self.recorder.replayed == 2
        return self


SCHEDULES = {
    "none": None,
    "exponential": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 7),
}


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replayed_training_is_the_eager_one_to_the_bit(optimizer, schedule, max_grad_norm):
    pair = Pair(OPTIMIZERS[optimizer], SCHEDULES[schedule], max_grad_norm=max_grad_norm)
    epoch = [16] * 5 + [7]
    for _ in range(4):
        pair.train(*epoch)
    assert pair.recorder.recorded == 2
    assert pair.recorder.eager == 2 * WARM_UP
    assert pair.recorder.replayed == 24 - 2 * WARM_UP
    assert all(bits(loss) == then for loss, then in pair.losses)


def test_the_graph_follows_warm_up_and_comes_with_its_replay():
    pair = Pair()
    for seen in range(1, WARM_UP + 3):
        pair.train(16)
        assert pair.recorder.recorded == int(seen > WARM_UP)
        assert pair.recorder.replayed == max(0, seen - WARM_UP)


def test_rates_that_lie_on_the_device_are_written_when_they_change_and_groups_get_theirs_back():
    pair = Pair(schedule=SCHEDULES["exponential"]).warmed()
    rates = rates_of(pair.candidate)
    own = [group["lr"] for group in pair.runs[1].optimizer.param_groups]
    assert all(isinstance(lr, float) for lr in own)
    pair.train(16)
    assert [float(rate) for rate in rates] == own  # the schedule has continued
    versions = [rate._version for rate in rates]
    for scheduler in pair.schedulers:
        scheduler.gamma = 1.0
    pair.train(16)
    pair.train(16)
    assert [rate._version for rate in rates] == [v + 2 for v in versions]  # views count as one tensor


def test_more_signatures_than_graphs_run_eagerly():
    pair = Pair()
    for _ in range(WARM_UP + 2):
        pair.train(*range(8, 8 + MOST_GRAPHS + 3))
    assert pair.recorder.recorded == MOST_GRAPHS
    assert pair.recorder.replayed == 2 * MOST_GRAPHS


def test_gradients_that_somebody_holds_are_not_written_by_eager_steps():
    pair = Pair().warmed()
    held = [p.grad for p in pair.runs[1].model.parameters()]
    before = [bits(grad) for grad in held]
    pair.train(7)
    assert [bits(grad) for grad in held] == before
    pair.train(16)
    assert all(p.grad is grad for p, grad in zip(pair.runs[1].model.parameters(), held, strict=True))
    for p in pair.runs[1].model.parameters():
        p.grad = None
    pair.train(16)
    assert all(p.grad is grad for p, grad in zip(pair.runs[1].model.parameters(), held, strict=True))


def test_gradients_that_no_update_uses_keep_accumulating():
    pair = Pair(lambda model: torch.optim.SGD(model.body.parameters(), lr=0.1))
    pair.train(*[16] * (WARM_UP + 4))
    assert pair.recorder.replayed == 4
    pair.each(lambda run: run.model.zero_grad())
    pair.train(16, 16, 16)
    assert pair.recorder.replayed == 6


def assigned(run):
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    run.optimizer.param_groups[0]["params"][:] = run.model.body.parameters()
    run.optimizer.param_groups[1]["params"][:] = run.model.head.parameters()
    run.optimizer.state.clear()


def moved(run):
    with torch.no_grad():
        for p in run.model.parameters():
            p.data = p.data.clone()


def moved_state(run):
    for entry in run.optimizer.state.values():
        entry["exp_avg"].data = entry["exp_avg"].data.clone()


def frozen(run):
    run.model.head.bias.requires_grad_(False)


def replaced(run):
    with torch.random.fork_rng():
        torch.manual_seed(9)
        run.model.body[0] = nn.Linear(8, 16)
    run.optimizer.param_groups[0]["params"][:] = run.model.body.parameters()
    run.optimizer.state.clear()


def other_dropout(run):
    run.model.body[3] = nn.Dropout(0.9)


def other_loss(run):
    change_loss(run, 2.0)


CHANGES = {
    "load_state_dict(assign=True)": assigned,
    "parameters moved": moved,
    "optimizer state moved": moved_state,
    "optimizer loaded": lambda run: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
    "optimizer state cleared": lambda run: run.optimizer.state.clear(),
    "buffer replaced": lambda run: setattr(run.model.body[1], "running_mean", torch.ones(16)),
    "module replaced": replaced,
    "eval": lambda run: run.model.eval(),
    "a part in eval": lambda run: run.model.body[1].eval(),
    "frozen": frozen,
    "weight decay": lambda run: run.optimizer.param_groups[1].update(weight_decay=0.7),
    "betas": lambda run: run.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "dropout": other_dropout,
    "compiled loss": other_loss,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_constants_of_a_graph_are_detected(change):
    pair = Pair().warmed()
    pair.each(CHANGES[change])
    pair.train(16)
    assert pair.recorder.replayed == 2
    pair.train(16, 16, 16)
    assert pair.recorder.recorded == 2
    assert pair.recorder.replayed == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()}),
        lambda run: [p.detach().mul_(0.5) for p in run.model.parameters()],
        lambda run: [group.update(lr=0.7) for group in run.optimizer.param_groups],
        lambda run: [state["exp_avg"].zero_() for state in run.optimizer.state.values()],
    ],
    ids=["loaded in place", "written", "another rate", "state written"],
)
def test_what_a_graph_reads_may_change_under_it(change):
    pair = Pair().warmed()
    pair.each(change)
    pair.train(16, 16)
    assert pair.recorder.recorded == 1
    assert pair.recorder.replayed == 4


def module_hook(run, calls):
    return run.model.body[0].register_forward_hook(lambda *_: calls.append("module"))


def gradient_hook(run, calls):
    return run.model.head.weight.register_hook(lambda grad: calls.append("gradient"))


def accumulated_hook(run, calls):
    return run.model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))


def optimizer_hook(run, calls):
    return run.optimizer.register_step_post_hook(lambda *_: calls.append("optimizer"))


class Patched:
    """Hook that wraps ``optimizer.step``."""

    def __init__(self, run, calls):
        self.optimizer, step = run.optimizer, run.optimizer.step
        run.optimizer.step = lambda: (calls.append("step"), step())

    def remove(self):
        del self.optimizer.step


@pytest.mark.parametrize("hook", [module_hook, gradient_hook, accumulated_hook, optimizer_hook, Patched])
def test_hooks_are_called_in_every_step(hook):
    pair = Pair().warmed()
    calls = []
    handle = hook(pair.runs[1], calls)
    pair.train(16, 16, 16)
    assert len(calls) == 3
    assert pair.recorder.replayed == 2
    handle.remove()
    pair.train(16, 16, 16)
    assert len(calls) == 3
    assert pair.recorder.replayed > 2


def test_a_counter_around_the_model_counts_every_step_and_one_elsewhere_is_no_hindrance():
    elsewhere = MfuCounter(1.0, device="cpu").wrap(nn.Linear(1, 1))
    pair = Pair().warmed()
    assert pair.recorder.replayed == 2
    counter = MfuCounter(1.0, device="cpu")
    counter.wrap(pair.runs[1].model)
    pair.train(16, 16, 16)
    assert pair.recorder.replayed == 2
    assert counter.steps >= 2
    del elsewhere


def test_evaluation_between_steps_changes_nothing():
    pair = Pair().warmed()
    pair.each(lambda run: run.evaluate(batches_of(16, 16)))
    pair.train(16)
    assert pair.recorder.replayed == 3
    assert pair.recorder.recorded == 1


@pytest.mark.parametrize("stepped", [False, True])
def test_state_that_is_put_back_is_trained_from(stepped):
    pair = Pair()
    if stepped:
        pair.train(16)
    states = [Snapshot.capture([run.model], run.optimizer) for run in pair.runs]
    random = list(pair.random)
    for again in range(3):
        pair.train(*[16] * (WARM_UP + 3))
        for state in states:
            state.restore()
        pair.random = list(random)
        assert pair.recorder.recorded == (1 if stepped else again + 1)
    assert not stepped or pair.recorder.eager == WARM_UP


def test_master_weights_follow_what_is_written_into_parameters():
    def bf16(model):
        model.bfloat16()
        return flatout.optim.AdamW(model.parameters(), lr=1e-2, master_weights="float32")

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    torch.manual_seed(0)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        opt = bf16(model)
        runs.append(
            flatout.optimize(
                model, batches_of(16), opt, compute_loss=loss, techniques=FUSED | {"fused_optimizer": False}, budget=0
            )
        )
    recorder = recorder_of(runs[1])
    with graphed(runs[1], recorder) as candidate:
        candidate.end_warmup()
        for i in range(WARM_UP + 9):
            batch = batches_of(16)[0]
            assert bits(runs[0].step(batch)) == bits(runs[1].step(batch))
            if i == WARM_UP + 4:
                with torch.no_grad():
                    for run in runs:
                        run.model.head.weight.fill_(0.25)
            plain, replayed = (trained_state(run.model, run.optimizer) for run in runs)
            assert plain["optimizer"] == replayed["optimizer"]
            assert plain["parameters"] == replayed["parameters"]
    assert recorder.eager == WARM_UP + 1
    assert recorder.replayed == 8


def test_a_replay_shows_in_the_version_of_what_it_writes():
    pair = Pair().warmed()
    weight = pair.runs[1].model.head.weight
    version = weight._version
    loss = weight.square().sum()
    pair.train(16)
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fp16_scaling_continues_and_reports_skipped_steps():
    pair = Pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), changes=FUSED | {"precision": "fp16"})
    huge = [(x * 3e4, y) for x, y in batches_of(16)]
    skipped = []
    for batch in (*batches_of(*[16] * (WARM_UP + 2)), *huge, *batches_of(7, 16), *huge):
        pair.step(batch)
        scales = [float(run.scaler.get_scale()) for run in pair.runs]
        assert scales[0] == scales[1]
        told = [bool(run.scaler.last_step_skipped) for run in pair.runs]
        assert told[0] == told[1]
        skipped.append(told[1])
    assert pair.recorder.replayed > 2
    assert skipped[-1]
    assert set(skipped) == {False, True}


def test_a_capture_that_ends_between_the_update_and_the_scales_is_forgotten():
    pair = Pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), changes=FUSED | {"precision": "fp16"})
    pair.train(*[16] * WARM_UP)
    scaler = pair.runs[1].scaler

    def breaks():
        del scaler.update
        raise RuntimeError("in the middle")

    scaler.update = breaks
    with pytest.warns(RuntimeWarning, match="in the middle"):
        pair.train(16, 16)
    assert pair.recorder.replayed == 0


def test_no_graph_is_used_under_modes_of_the_callers():
    pair = Pair().warmed()
    with torch.autocast("cpu", torch.bfloat16):
        pair.train(16)
    assert pair.recorder.replayed == 2
    pair.train(16)
    assert pair.recorder.replayed == 3
    with pytest.raises(RuntimeError), torch.no_grad():
        pair.runs[1].step(batches_of(16)[0])


def test_numbers_that_change_with_every_step_end_it_with_one_warning():
    pair = Pair()

    def cycle():
        for i in range(WARM_UP + MOST_CHANGES + 3):
            pair.each(lambda run, i=i: run.optimizer.param_groups[0].update(betas=(0.9 - 0.01 * i, 0.99)))
            pair.train(16)

    with pytest.warns(RuntimeWarning, match="param_groups") as said:
        cycle()
    assert len(said) == 1
    assert pair.recorder.recorded == 0
    assert "settings-keep-changing" in pair.candidate.stopped


@pytest.mark.filterwarnings("error")
def test_numbers_that_change_seldom_are_met_by_a_new_graph():
    pair = Pair(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.5))
    for i in range(MOST_CHANGES + 1):
        pair.each(lambda run, i=i: run.optimizer.param_groups[0].update(momentum=0.5 + 0.01 * i))
        for batch in batches_of(16) * (PAYS_AFTER + WARM_UP):
            for run in pair.runs:
                run.step(batch)
    assert pair.recorder.recorded == MOST_CHANGES + 1
    assert not pair.candidate.stopped


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_an_error_in_training_falls_back_once_and_changes_nothing(when):
    pair = Pair(changes=FUSED, max_grad_norm=0.5)
    pair.train(*[16] * WARM_UP)
    if when == "replay":
        pair.train(16)
    pair.recorder.error = RuntimeError("the device is unwell\nand a long trace")
    with pytest.warns(RuntimeWarning, match="RuntimeError: the device is unwell$") as said:
        pair.train(16, 16)
    assert len(said) == 1
    pair.recorder.error = None
    pair.train(16, 16)
    assert pair.recorder.replayed == (1 if when == "replay" else 0)
    assert pair.candidate.stopped


def test_a_mistake_of_the_users_own_stays_theirs():
    pair = Pair().warmed()
    bad = (torch.randn(16, 9), torch.zeros(16, dtype=torch.long))
    for _ in range(WARM_UP + 2):
        with pytest.raises(RuntimeError, match="shapes"):
            pair.runs[1].step(bad)
    assert not pair.candidate.stopped


class Late(nn.Module):
    """Model whose second layer has its first gradient during the recording."""

    def __init__(self):
        super().__init__()
        self.first, self.late = nn.Linear(8, 3), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) + (self.late(x) if self.calls > WARM_UP + 1 else 0)  # 1 for the check of the loss


def test_state_that_a_capture_would_begin_is_refused_and_removed():
    torch.manual_seed(0)
    model = Late()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = flatout.optimize(model, batches_of(16), opt, functional.cross_entropy, techniques=FUSED, budget=0)
    model.calls = 1
    with graphed(run, recorder_of(run)) as candidate:
        candidate.end_warmup()
        for batch in batches_of(16) * WARM_UP:
            run.step(batch)
        assert model.late.weight not in opt.state
        with pytest.warns(RuntimeWarning, match="graph"):
            run.step(batches_of(16)[0])
        assert "begins-state" in candidate.stopped
    assert float(opt.state[model.late.weight]["step"]) == 1


def test_the_warmup_steps_eagerly_and_captures_at_once_and_raises_what_goes_wrong():
    pair = Pair()
    run = pair.runs[1]
    pair.candidate.__exit__()
    recorder = recorder_of(run)
    state = Snapshot.capture([run.model], run.optimizer)
    with graphed(run, recorder) as candidate:
        run.step(batches_of(16)[0])
        assert (recorder.recorded, recorder.eager, recorder.replayed) == (1, WARM_UP, 1)
        run.step(batches_of(7)[0])
        assert recorder.recorded == 2
        recorder.error = unable("a step waits for the device")
        assert "waits-for-device" in refused(lambda: run.step(batches_of(5)[0]))
        assert not candidate.stopped
    state.restore()
    pair.train(16, 16)  # the failed step leaves no state, such as a batch that waits for its update


def test_graphs_that_are_freed_leave_gradients_of_their_own_and_come_again():
    pair = Pair().warmed()
    run = pair.runs[1]
    held = [p.grad for p in run.model.parameters()]
    before = trained_state(run.model, run.optimizer)["grads"]
    pair.candidate.__exit__()
    pair.candidate.free()
    assert pair.recorder.given_back == 1
    assert trained_state(run.model, run.optimizer)["grads"] == before
    assert all(p.grad is not grad for p, grad in zip(run.model.parameters(), held, strict=True))
    pair.train(16)
    assert (pair.recorder.eager, pair.recorder.replayed) == (WARM_UP, 2)  # the technique is off
    pair.candidate.__enter__()
    pair.train(16, 16)
    assert (pair.recorder.recorded, pair.recorder.replayed) == (2, 3)


def test_the_candidate_does_not_keep_the_model_alive():
    pair = Pair().warmed()
    candidate, gone = pair.candidate, weakref.ref(pair.runs[1].model)
    del pair
    gc.collect()
    assert gone() is None
    candidate.__exit__()
    candidate.free()
    candidate.end_warmup()
    assert not candidate.stopped


class Tokens(dict):
    """Subclass of dict, as tokenizers return."""


def test_signatures_are_all_of_a_batch_but_its_numbers():
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))

    def key(batch):
        signed = sign(batch, CPU)
        return None if signed is None else signed[0]

    assert key((x, y)) == key((x + 1, y.clone()))
    others = [[x, y], (x, y, 1), (x, y, 2), (x, y, True), {"x": x, "y": y}, Tokens(x=x, y=y), {"x": x}]
    others += [(x.double(), y), (x.t().contiguous().t(), y), (x[:3], y), (x, (y,)), (x, y, None), (x, y, "a")]
    keys = [key(batch) for batch in ((x, y), *others)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    unsuited = [
        (x.requires_grad_(), y),
        (nn.Parameter(x), y),
        (y, object()),
        (y, torch.zeros(2, device="meta")),
        (y, torch.zeros(2).to_sparse()),
        ("no", 1.0),
    ]
    assert [key(batch) for batch in unsuited] == [None] * len(unsuited)


@pytest.mark.parametrize("kind", [dict, Tokens])
def test_mappings_and_nested_batches_are_replayed(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, parts, scale, **rest):
            return {"loss": (self.layer(parts[0]) - parts[1]).square().mean() * scale}

    torch.manual_seed(0)
    batches = [kind(parts=[torch.randn(4, 8), torch.randn(4, 1)], scale=0.5, name=None) for _ in range(8)]
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(flatout.optimize(model, batches, opt, techniques=FUSED, budget=0))
    recorder = recorder_of(runs[1])
    with graphed(runs[1], recorder) as candidate:
        candidate.end_warmup()
        for batch in batches:
            assert bits(runs[0].step(batch)) == bits(runs[1].step(batch))
        assert recorder.replayed == 8 - WARM_UP
        loss = runs[1].step(kind(parts=batches[0]["parts"], scale=2.0, name=None))
        assert recorder.replayed == 8 - WARM_UP
        assert bits(loss) == bits(runs[0].step(kind(parts=batches[0]["parts"], scale=2.0, name=None)))


def test_inputs_are_copies_that_no_batch_of_the_callers_is():
    pair = Pair()
    batch, *others = batches_of(16, 16, 16)
    before = bits(batch[0])
    for _ in range(WARM_UP + 1):  # captured with this batch
        pair.step(batch)
    assert pair.recorder.recorded == 1
    for other in others:
        pair.step(other)
    pair.step(batch)
    assert pair.recorder.replayed == 4
    assert bits(batch[0]) == before


# -- in optimize() -------------------------------------------------------------------------------------------


@pytest.fixture
def recorders():
    """Technique as on a GPU, with recordings emulated on the CPU."""
    with cuda_graph_without_a_gpu() as made:
        yield made


def test_a_forced_graph_of_a_step_that_cannot_be_recorded_is_an_error(recorders):
    recorders.error = unable("a step waits for the device")
    model = Net()
    opt, techniques = torch.optim.AdamW(model.parameters()), NO_TECHNIQUES | {"cuda_graph": True}
    techniques.pop("fused_optimizer")
    with pytest.raises(ValueError, match=r"techniques\['cuda_graph'\]") as refused:
        flatout.optimize(model, batches_of(16), opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert "waits-for-device" in reasons(str(refused.value))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("error", [None, unable("a step waits for the device")])
def test_a_trial_leaves_no_trace(recorders, error, stepped, clock):
    torch.manual_seed(0)
    model = Net()
    opt = flatout.optim.AdamW(
        [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 3e-3}], lr=1e-2
    )
    batches = batches_of(16, 16, 7, 16)
    if stepped:
        functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        opt.step()
    before = snapshot(model, opt)
    job = job_of(model, batches, optimizer=opt, loss_fn=TimedStep(clock, 0.01))
    recorders.error = error
    with decided("cuda_graph", job=job) as outcome:
        pass
    row = outcome.rows["cuda_graph"]
    (trial,) = row.trials
    assert row.status == "rejected"
    assert trial.candidate_bytes is None
    if error is None:
        assert "not-faster" in reasons(row)
        assert trial.loss_difference == 0
        assert recorders[0].recorded >= 2
    else:
        assert "waits-for-device" in reasons(row)
    assert snapshot(model, opt) == before


def test_asked_for_it_brings_the_fused_optimizer_and_undo_takes_both_away(recorders):
    model = Net()
    opt = adamw(model)
    changes = {name: value for name, value in FUSED.items() if name != "fused_optimizer"} | {"cuda_graph": True}
    before = snapshot(model, opt)
    run = flatout.optimize(model, batches_of(16, 16), opt, functional.cross_entropy, techniques=changes, budget=0)
    assert run.report.row("cuda_graph").status == "kept"
    assert trained_state(model, opt)["parameters"] == before["parameters"]
    recorder = recorders[-1]
    eager, replayed = recorder.eager, recorder.replayed
    for batch in batches_of(16, 16) * 2:
        run.step(batch)
    assert recorder.eager == eager + 1  # shows the state since the trial
    assert recorder.replayed == replayed + 3
    run.undo()
    assert recorder.given_back == 1
    run.step(batches_of(16)[0])
    assert (recorder.eager, recorder.replayed) == (eager + 1, replayed + 3)
    assert type(opt) is torch.optim.AdamW
    again = flatout.optimize(model, batches_of(16, 16), opt, functional.cross_entropy, plan=run.plan, budget=0)
    assert again.report.row("cuda_graph").status == "kept"
    with pytest.raises(ValueError, match=r"cuda_graph.*2"):
        flatout.optimize(model, batches_of(16), opt, functional.cross_entropy, techniques={"cuda_graph": 2})


# -- together with the fused optimizer -----------------------------------------------------------------------


@pytest.fixture
def counts_on_the_host(monkeypatch):
    """Let ``unfuse`` replace the step counts by new tensors, as on a GPU.

    On a GPU, torch's Adam counts steps on the host, and flatout's Adam on the device.
    """

    def unfused(optimizer):
        unfuse(optimizer)
        for entry in optimizer.state.values():
            if "step" in entry:
                entry["step"] = entry["step"].clone()

    monkeypatch.setattr("flatout.techniques.fused_optimizer.unfuse", unfused)


@pytest.fixture
def tuned(recorders, clock, counts_on_the_host):
    """Function that tunes a job with given seconds per plain, fused and replayed step."""

    def tune(plain, fused, replayed, optimizer=adamw, *, budget=1000, noise=0.0, **techniques):
        unseen = Unseen(recorders=recorders, factor=random.Random(0))

        torch.manual_seed(0)
        model = Net()
        opt = optimizer(model)
        before = snapshot(model, opt)

        def seconds(*_):
            is_replayed = any(recorder.is_replaying for recorder in unseen.recorders)
            mean = replayed if is_replayed else fused if isinstance(opt, flatout.optim.AdamW) else plain
            return mean * unseen.factor.lognormvariate(0, noise)

        step = TimedStep(clock, seconds)
        names = {"fused_optimizer", "cuda_graph", *techniques}
        choices = only(*names) | {name: value for name, value in techniques.items() if value is not None}
        run = flatout.optimize(model, batches_of(*[16] * 8), opt, step, techniques=choices, budget=budget)
        return run, before

    return tune


@pytest.mark.parametrize("plain", [1.0, 0.01])  # timed blocks of one update, and of several updates
@pytest.mark.parametrize("fused", [1.0, 1.2])
def test_a_graph_is_tried_with_a_fused_optimizer_that_does_not_pay_alone(tuned, recorders, fused, plain):
    run, before = tuned(plain, fused * plain, 0.5 * plain)
    graph, optimizer = run.report.row("cuda_graph"), run.report.row("fused_optimizer")
    assert run.plan.decisions == {"cuda_graph": True, "fused_optimizer": True}
    assert graph.status == optimizer.status == "kept"
    assert graph.gain.ratio == pytest.approx(2.0, rel=0.1)
    assert optimizer.gain is None
    assert "tried-as-pair" in reasons(optimizer)
    assert run.report.summary.gain.ratio == pytest.approx(2.0, rel=0.1)
    replayed = recorders[-1].replayed
    for batch in run.loader:
        run.step(batch)
    assert recorders[-1].replayed > replayed
    run.undo()
    assert snapshot(run.model, run.optimizer)["optimizer class"] == before["optimizer class"]


def test_close_calls_leave_time_for_a_graph(tuned):
    run, _ = tuned(0.05, 0.05, 0.02, budget=8, noise=0.3, cpu_threads=None)
    assert run.report.row("cuda_graph").trials


def test_a_fused_optimizer_that_pays_alone_is_no_part_of_the_graphs_gain(tuned):
    run, _ = tuned(1.0, 0.8, 0.4)
    graph, optimizer = run.report.row("cuda_graph"), run.report.row("fused_optimizer")
    assert graph.gain.ratio == pytest.approx(2.0, rel=0.01)
    assert optimizer.gain.ratio == pytest.approx(1.25, rel=0.01)


def test_a_graph_that_is_slower_takes_the_fused_optimizer_with_it(tuned):
    run, before = tuned(1.0, 1.2, 1.1)
    assert run.plan.decisions == {}
    assert "not-faster" in reasons(run.report.row("cuda_graph"))
    assert len(run.report.row("cuda_graph").trials) == 1
    run.undo()
    assert snapshot(run.model, run.optimizer) == before


@pytest.mark.parametrize(
    ("optimizer", "techniques", "code"),
    [
        (adamw, {"fused_optimizer": False}, "required-technique-forbidden"),
        (lambda m: torch.optim.RMSprop(m.parameters()), {}, "not-fused"),
    ],
)
def test_without_a_fused_optimizer_there_is_no_graph(tuned, optimizer, techniques, code):
    run, _ = tuned(1.0, 1.0, 0.5, optimizer, **techniques)
    assert run.report.row("cuda_graph").status == "not applicable"
    assert code in reasons(run.report.row("cuda_graph"))
    assert run.plan.decisions == {}


def test_a_graph_without_its_fused_optimizer_is_no_choice(recorders):
    techniques = NO_TECHNIQUES | {"cuda_graph": True}
    model = Net()
    with pytest.raises(ValueError, match=r"techniques\['cuda_graph'\]") as refused:
        flatout.optimize(model, batches_of(16), adamw(model), functional.cross_entropy, techniques=techniques, budget=0)
    assert "required-technique-forbidden" in reasons(str(refused.value))


# -- applicability -------------------------------------------------------------------------------------------


def fused_job(batches=(), model=None, optimizer=None, **settings):
    model = model or Net()
    optimizer = (optimizer or (lambda m: flatout.optim.AdamW(m.parameters(), lr=1e-2)))(model)
    return job_of(model, batches or batches_of(16, 16), optimizer=optimizer, **settings)


def listened(model):
    model.body[0].register_forward_hook(lambda *_: None)
    return model


def scripted(model):
    model.head = torch.jit.script(model.head)
    return model


def one_cycle(model):
    opt = flatout.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
    return opt


def patched(model):
    opt = flatout.optim.SGD(model.parameters(), lr=0.1)
    step = opt.step
    opt.step = lambda: step()
    return opt


def heard(model):
    opt = flatout.optim.SGD(model.parameters(), lr=0.1)
    opt.register_step_post_hook(lambda *_: None)
    return opt


@pytest.mark.usefixtures("recorders")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: fused_job(accumulate=2), "accumulates"),
        (lambda: fused_job(model=listened(Net())), "has-hooks"),
        (lambda: fused_job(model=scripted(Net())), "script-module"),
        (lambda: fused_job(model=nn.DataParallel(Net())), "several-devices"),
        (lambda: fused_job(optimizer=one_cycle), "schedules-momentum"),
        (lambda: fused_job(optimizer=patched), "optimizer-has-hooks"),
        (lambda: fused_job(optimizer=heard), "optimizer-has-hooks"),
        (lambda: fused_job(optimizer=lambda m: torch.optim.RMSprop(m.parameters())), "not-fused"),
        (lambda: job_of(Net(), batches_of(16, 16)), "no-optimizer"),
        (lambda: fused_job(batches_of(3, 4, 5)), "no-shape-twice"),
        (lambda: fused_job([(torch.randn(4, 8), object())]), "not-only-tensors"),
    ],
)
def test_a_step_that_cannot_be_captured_has_a_reason(make, code):
    assert code in refusal("cuda_graph", make())


@pytest.mark.usefixtures("recorders")
def test_a_step_that_can_be_captured_is_tried():
    assert refusal("cuda_graph", fused_job()) is None


def test_a_model_that_is_compiled_as_graphs_is_not_captured_again(recorders, compiler):
    job = fused_job(loss_fn=functional.cross_entropy)
    with forced("compile", "max-autotune", job):
        assert "comes-as-graphs" in refusal("cuda_graph", job)
    with forced("compile", "default", job):
        assert refusal("cuda_graph", job) is None


def test_the_cpu_replays_no_graphs():
    assert "on-cpu" in refusal("cuda_graph", fused_job())


@pytest.mark.usefixtures("recorders")
def test_an_optimizer_that_can_be_fused_is_no_reason():
    assert refusal("cuda_graph", fused_job(optimizer=adamw)) is None


def test_copies_of_the_model_are_plain_ones():
    pair = Pair().warmed()
    copied = copy.deepcopy(pair.runs[1].model)
    assert list(copied.state_dict()) == list(Net().state_dict())
