"""Activation checkpointing: the same gradients from less memory, kept only where the memory is needed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.techniques.activation_checkpointing import ActivationCheckpointing
from flatout.tuning.batch_sizes import SizeTrials
from flatout.tuning.stopwatch import step_memory
from tests.helpers import bits
from tests.jobs import NO_TECHNIQUES, job_of
from tests.reasons import reasons
from tests.techniques.harness import forced, refusal

SAMPLES, TOKENS = 32, 64


class Block(nn.Module):
    """Block with small weights and large activations."""

    def __init__(self, *extra):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8), *extra)

    def forward(self, x):
        return x + self.layers(x)


class LastToken(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, -1])


def blocks(*extra, count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*extra) for _ in range(count)), LastToken(8, 4))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(SAMPLES, TOKENS, 8), torch.arange(SAMPLES) % 4) for _ in range(3)]


def job(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return job_of(model, batches(), optimizer, loss_fn=functional.cross_entropy, **settings)


def trained(model, candidate=None):
    """Return the loss of a step and the gradients. Each call draws the same random numbers."""
    torch.manual_seed(2)
    x, y = batches()[0]
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return [bits(loss.detach()), *(bits(p.grad) for p in model.parameters())]


def test_losses_and_gradients_are_the_same_bits_from_less_memory():
    model = blocks()
    plain, twin = trained(model), copy.deepcopy(model)
    model.zero_grad()
    with forced("activation_checkpointing", True, job(model)):
        assert trained(model) == plain
        less = step_memory(lambda: trained(model), torch.device("cpu"))
    more = step_memory(lambda: trained(twin), torch.device("cpu"))
    assert less < 0.6 * more


def test_the_model_stays_what_it_is():
    model = blocks()
    keys, pickled = list(model.state_dict()), pickle.dumps(model)
    with forced("activation_checkpointing", True, job(model)):
        assert list(model.state_dict()) == keys
        assert pickle.dumps(model) == pickled
        assert isinstance(model[0], Block)
        with torch.no_grad():
            assert not model.eval()(batches()[0][0]).requires_grad
    assert all(type(block) is Block for block in model[:-1])


def test_the_candidate_keeps_no_model_alive():
    model = blocks()
    candidate = forced("activation_checkpointing", True, job(model))
    with candidate:
        alive = [block.__class__.__name__ for block in model[:-1]]
        del model
    assert alive == ["Block"] * 6


@pytest.mark.parametrize(
    ("model", "optimizer", "code"),
    [
        (blocks(nn.BatchNorm1d(TOKENS)), True, "no-blocks"),
        (nn.Sequential(nn.Linear(8, 8), LastToken(8, 4)), True, "no-blocks"),
        (blocks(count=1), True, "no-blocks"),
        (blocks(), False, "no-optimizer"),
    ],
    ids=["batch norm", "plain layers", "one block", "no optimizer"],
)
def test_models_that_it_does_not_serve(model, optimizer, code):
    its_job = job(model) if optimizer else job_of(model, batches(), loss_fn=functional.cross_entropy)
    assert code in refusal("activation_checkpointing", its_job)


def limit_for(samples, **candidate):
    """Return the bytes that training needs for this number of samples at once."""
    its_job = job(blocks())
    with forced("activation_checkpointing", True, its_job):
        return SizeTrials(its_job).height(samples)


def optimized(clock, seconds_of, **settings):
    """Return a run of blocks whose forward takes ``seconds_of(samples, is_checkpointed)``."""
    model = blocks()

    def timed(block, args, output):
        if torch.is_grad_enabled():
            clock.advance(seconds_of(len(args[0]), type(block) is not Block))

    for block in model[:-1]:
        block.register_forward_hook(timed)
    settings = {"budget": 1000, "techniques": NO_TECHNIQUES | {"activation_checkpointing": None}} | settings
    settings["techniques"].pop("batch_size", None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(model, batches(), optimizer, functional.cross_entropy, **settings)


def test_it_is_kept_if_the_larger_parts_that_it_makes_room_for_are_faster(clock):
    run = optimized(clock, lambda samples, checkpointed: 0.02, memory_limit=limit_for(SAMPLES))
    row = run.report.row("activation_checkpointing")
    assert row.status == "kept", row
    assert run.micro_batch is None
    assert all(type(block) is not Block for block in run.model[:-1])
    run.undo()
    assert all(type(block) is Block for block in run.model[:-1])


def test_it_is_rejected_if_small_parts_are_faster(clock):
    run = optimized(clock, lambda samples, on: (2e-3 if on else 1e-3) * samples, memory_limit=limit_for(SAMPLES))
    assert run.report.row("activation_checkpointing").status == "rejected"
    assert run.micro_batch is not None
    assert all(type(block) is Block for block in run.model[:-1])


def test_it_is_not_tried_if_memory_holds_whole_batches(clock):
    row = optimized(clock, lambda samples, on: 0.02).report.row("activation_checkpointing")
    assert row.status == "not tried"
    assert "enough-memory" in reasons(row.why)


def test_it_is_kept_if_a_single_sample_does_not_fit_otherwise(clock):
    run = optimized(clock, lambda samples, on: 0.02, memory_limit=limit_for(1), budget=0)
    row = run.report.row("activation_checkpointing")
    assert row.status == "kept"
    assert "needed-to-fit" in reasons(row.why)
    assert run.plan.decisions["activation_checkpointing"] is True


def test_forbidden_it_does_not_come_to_the_rescue(clock):
    with pytest.raises(torch.OutOfMemoryError):
        optimized(
            clock,
            lambda samples, on: 0.02,
            memory_limit=limit_for(1),
            techniques=dict(NO_TECHNIQUES),
        )


def test_it_is_kept_on_request(clock):
    run = optimized(clock, lambda samples, on: 0.02, techniques=NO_TECHNIQUES | {"activation_checkpointing": True})
    assert run.report.row("activation_checkpointing").status == "kept"
    losses = [run.step(batch) for batch in run.loader]
    assert all(loss.isfinite() for loss in losses)


class Small(nn.Sequential):
    """Model whose memory ends above 8 samples with checkpoints, and above none without."""

    def forward(self, x):
        most = 0 if type(self[0]) is Block else 8
        if torch.is_grad_enabled() and len(x) > most:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x)


def tuned(**settings):
    model = Small(*blocks())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # torch defines this loss as a mean, which memory does not let flatout show.
    return flatout.optimize(model, batches(), optimizer, nn.MultiMarginLoss(), **{"budget": 0} | settings)


def test_its_plan_can_be_applied():
    run = tuned(memory_limit=10**12)
    assert run.report.row("activation_checkpointing").status == "kept"
    assert run.micro_batch is not None
    again = tuned(plan=run.plan)
    assert again.micro_batch == run.micro_batch
    assert again.plan.decisions == run.plan.decisions


def test_batches_are_split_where_they_need_both():
    run = tuned(techniques={"activation_checkpointing": True}, memory_limit=10**12)
    assert run.micro_batch is not None
    assert run.micro_batch <= 8


class Fickle(Block):
    """Block that keeps other tensors in each forward, which a checkpoint refuses."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x if self.calls % 2 else torch.where(x == x, x, 0))


def test_blocks_that_cannot_be_repeated_stay_as_they_are(clock):
    model = nn.Sequential(*(Fickle() for _ in range(4)), LastToken(8, 4))
    model.register_forward_hook(lambda *_: clock.advance(0.02))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    its_job = job(blocks(count=4))
    limit = SizeTrials(its_job).height(SAMPLES // 2)
    techniques = NO_TECHNIQUES | {"activation_checkpointing": None}
    techniques.pop("batch_size")
    run = flatout.optimize(
        model,
        batches(),
        optimizer,
        functional.cross_entropy,
        techniques=techniques,
        memory_limit=limit,
        budget=1000,
    )
    assert run.report.row("activation_checkpointing").status == "rejected"
    assert run.micro_batch is not None


def test_a_forward_that_fails_leaves_no_hooks_behind():
    """torch 2.11 keeps the hooks of ``checkpoint`` as long as the error is alive."""

    class Failing(Block):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise RuntimeError("no memory")
            return y

    model = nn.Sequential(*(Failing() for _ in range(3)))
    (candidate,) = ActivationCheckpointing().candidates(job(model))
    candidate.enable()
    model[2].fails = True
    with pytest.raises(RuntimeError, match="no memory") as error:
        model(torch.randn(2, 8))
    other = nn.Linear(8, 2)
    other(torch.randn(2, 8)).sum().backward()
    assert other.weight.grad is not None
    candidate.disable()
    assert error.value.__traceback__ is not None  # the error lives until here


def test_the_blocks_are_compiled_in_one_graph():
    model = blocks().eval()  # compiled code draws other dropout masks
    x, y = batches()[0]
    functional.cross_entropy(model(x), y).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with forced("activation_checkpointing", True, job(model)):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        functional.cross_entropy(compiled(x), y).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
