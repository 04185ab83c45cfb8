"""Loaders that cannot be rewound: ``optimize`` reads batches, restores the generators, and loses no batch."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler

import flatout
from tests.clock import TimedStep
from tests.helpers import bits
from tests.jobs import QUICK, Net, make_data, train
from tests.loaders import OwnIterator


def make_job(*, own_generator):
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(3) if own_generator else None
    loader = OwnIterator(make_data(64), batch_size=8, shuffle=True, generator=generator)
    return model, loader, torch.optim.SGD(model.parameters(), lr=0.1), generator


def generators(own):
    return [bits(torch.get_rng_state()), own and bits(own.get_state())]


@pytest.mark.parametrize("budget", [0, 1000])
@pytest.mark.parametrize("own_generator", [False, True])
def test_generators_stay_and_training_is_the_plain_loop(own_generator, budget, clock):
    plain, loader, opt, _ = make_job(own_generator=own_generator)
    expected = train(plain, loader, opt, epochs=3)
    model, loader, opt, generator = make_job(own_generator=own_generator)
    before = generators(generator)
    techniques = QUICK | {"fused_optimizer": False, "cpu_threads": False}
    run = flatout.optimize(model, loader, opt, TimedStep(clock), techniques=techniques, budget=budget)
    assert generators(generator) == before
    assert [run.step(batch).item() for _ in range(3) for batch in run.loader] == expected


def test_generators_that_were_seeded_in_between_stay_as_they_are():
    model, loader, opt, generator = make_job(own_generator=True)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
    torch.manual_seed(7)
    before = generators(generator)
    batches = iter(run.loader)
    next(batches)
    assert generators(generator)[0] == before[0]
    assert generators(generator)[1] != before[1]  # otherwise the next epoch would have the same order


def test_a_failure_leaves_the_generators_as_they_were():
    model, loader, opt, generator = make_job(own_generator=True)
    before = generators(generator)

    def fails(output, target):
        raise KeyError

    with pytest.raises(KeyError):
        flatout.optimize(model, loader, opt, fails, techniques=QUICK, budget=0)
    assert generators(generator) == before


def test_an_iterator_that_is_left_before_its_first_batch_takes_nothing():
    model, loader, opt, _ = make_job(own_generator=False)
    expected = [bits(x) for x, _ in loader]
    model, loader, opt, _ = make_job(own_generator=False)
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
    run.undo()
    iter(run.loader)
    assert [bits(x) for x, _ in run.loader] == expected


class Drawn(Sampler):
    """Loader that draws with the global generator."""

    def __iter__(self):
        yield from torch.randperm(64).tolist()

    def __len__(self):
        return 64


def test_a_run_that_was_saved_before_its_first_batch_goes_on_with_the_same_draws():
    def tuned():
        model = Net()
        loader = DataLoader(make_data(64), batch_size=8, sampler=Drawn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return flatout.optimize(model, loader, optimizer, functional.cross_entropy, techniques=QUICK, budget=0)

    def trained(run):
        return [run.step(batch).item() for _ in range(3) for batch in run.loader]

    run = tuned()
    state = copy.deepcopy(run.state_dict())
    expected = trained(run)
    torch.manual_seed(7)
    again = tuned()
    again.load_state_dict(state)
    assert trained(again) == expected
