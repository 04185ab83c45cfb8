"""Trial steps with other batch sizes: their measurements, and no side effects."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.core.machine import available_memory
from flatout.tuning.batch_sizes import MARGIN, SizeTrials, memory_limit, resident_bytes
from tests.helpers import bits
from tests.jobs import job_of
from tests.trap import Trap

WIDTH = 256


def make(*extra, **settings):
    """Return a job with one batch of 32 samples. ``extra`` layers follow the first layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), *extra, nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
    batches = [(torch.randn(32, 16), torch.arange(32) % 4)]
    optimizer = torch.optim.AdamW(model.parameters())
    return job_of(model, batches, optimizer, loss_fn=functional.cross_entropy, **settings)


def test_what_stays_is_parameters_buffers_and_optimizer_state():
    job = make()
    weights = sum(p.nbytes for p in job.spec.model.parameters())
    buffers = sum(b.nbytes for b in job.spec.model.buffers())
    assert resident_bytes(job) == weights + buffers
    job.stepper.step(job.data.batches[0])
    steps = len(list(job.spec.model.parameters())) * 4
    assert resident_bytes(job) == 3 * weights + buffers + steps


def test_memory_grows_by_what_a_sample_takes():
    job = make()
    trials = SizeTrials(job)
    heights = {n: trials.height(n) for n in (64, 128, 256, 512)}
    slopes = [(heights[2 * n] - heights[n]) / n for n in (64, 128, 256)]
    assert slopes == [pytest.approx(slopes[0], rel=0.02)] * 3
    # At least the float32 activations before and after tanh, the BatchNorm's output, and the sample.
    assert 3 * 4 * WIDTH < slopes[0] < 8 * 4 * WIDTH
    assert heights[64] > resident_bytes(job)


def test_a_probe_measures_as_much_memory_as_an_unhurried_look_and_its_faster_step(clock):
    job = make()
    trials = SizeTrials(job)
    expected = trials.height(64)
    durations = iter([9.0, 3.0, 2.0])  # the measured step, and two timed steps
    job.spec.model.register_forward_hook(lambda *_: clock.advance(next(durations)))
    probe = trials.probe(64)
    assert probe.bytes == expected
    assert probe.seconds == pytest.approx(2.0, rel=1e-3)


def test_a_search_takes_fewer_than_20_steps():
    trials = SizeTrials(make())
    found = trials.find(32, smallest=8, largest=4096)
    assert trials.steps < 20
    assert trials.steps == 1 + 3 * len(found.probes)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_returns_none_and_the_job_continues(where):
    trap = Trap()
    job = make(trap)
    trap.arm(where, 40)
    trials = SizeTrials(job)
    assert trials.probe(64) is None
    assert not trials.fits(64)
    assert trials.fits(40)
    assert trials.probe(40).samples == 40
    assert job.stepper.pending == 0


def test_other_errors_are_the_users():
    trap = Trap()
    job = make(trap)
    trap.arm("forward", 40, error=lambda: RuntimeError("no such index"))
    with pytest.raises(RuntimeError, match="no such index"):
        SizeTrials(job).probe(64)


def test_how_the_job_steps_comes_back_after_an_error_too():
    trap = Trap()
    job = make(trap, accumulate=3)
    job.stepper.micro_batches.size = 5
    SizeTrials(job).probe(32)
    trap.arm("forward", 8, error=lambda: ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        SizeTrials(job).probe(32)
    stepper = job.stepper
    assert (stepper.accumulate, stepper.micro_batches.size, stepper.runner, stepper.pending) == (3, 5, None, 0)


def test_a_step_is_an_update_of_a_batch_in_one():
    job = make(accumulate=3)
    job.stepper.micro_batches.size = 4
    seen = []
    job.spec.model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    before = bits(job.spec.model[0].weight)
    SizeTrials(job).probe(24)
    assert seen == [24] * 3
    assert bits(job.spec.model[0].weight) != before


def test_the_limit_is_the_users_or_what_there_is():
    assert memory_limit(make(memory_limit=10**9)) == 10**9
    assert 0 < memory_limit(make(memory_limit=10**18)) <= (1 - MARGIN) * (available_memory() + 2**30)
    assert memory_limit(make()) < 10**18
