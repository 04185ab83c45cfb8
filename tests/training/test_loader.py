"""optimize() and loaders: no sample is lost, repeated or reordered."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import flatout
from tests.helpers import bits
from tests.jobs import FORCED, NO_TECHNIQUES, QUICK, Net, SlowSamples, Stream, make_data, make_job, tried
from tests.loaders import OwnIterator
from tests.reasons import reasons


def test_a_source_that_cannot_rewind_loses_no_sample_and_is_not_replaced(clock):
    model = Net()
    clock.slow_down(model, 0.01)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Stream(64), batch_size=8)
    techniques = NO_TECHNIQUES | {"in_memory": None, "workers": None}
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=techniques, budget=2)
    seen = [value for x, _ in run.loader for value in x[:, 0].tolist()]
    assert seen == [float(i) for i in range(64)]
    assert run.report.row("in_memory").status == "not tried"
    assert "not-rewindable" in reasons(run.report.row("in_memory"))
    assert run.report.row("workers").status == "not applicable"


def test_a_stream_is_not_lost_by_force_or_by_undo():
    for undone in (False, True):
        model = Net()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(Stream(64), batch_size=8)
        with pytest.raises(ValueError, match="workers"):
            flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK | {"workers": 1}, budget=0)
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
        if undone:
            run.undo()
        assert [value for x, _ in run.loader for value in x[:, 0].tolist()] == [float(i) for i in range(64)]


def test_epochs_of_a_loader_that_is_not_rewound_keep_their_own_orders():
    torch.manual_seed(0)
    model = Net()
    loader = OwnIterator(make_data(), batch_size=16, shuffle=True)
    run = tried(model, loader, torch.optim.SGD(model.parameters(), 0.1), functional.cross_entropy)
    epochs = [[bits(y) for _, y in run.loader] for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_optimizing_an_optimized_loader_starts_from_the_users_own():
    model, own, opt = make_job()
    loader = own
    for _ in range(2):
        _, loader = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=FORCED, budget=0)
        assert loader.original is own


class OnlyAtHome(Dataset):
    """Dataset that fails in worker processes. Each sample takes a millisecond of a simulated clock."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("not in a worker")
        self.clock.advance(0.001)
        return torch.ones(8), i % 3


def test_a_loader_that_fails_in_its_trial_is_rejected_with_the_reason(clock):
    model = Net()
    run = flatout.optimize(
        model,
        DataLoader(OnlyAtHome(clock), batch_size=16),
        torch.optim.SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        techniques=NO_TECHNIQUES | {"workers": None},
        budget=20,
        expected_steps=10**6,
    )
    row = run.report.row("workers")
    assert row.status == "rejected"
    assert "not in a worker" in row.why  # the dataset's message
    assert len(list(run.loader)) == 4


def test_random_augmentation_is_not_frozen_in_memory():
    class Augmented(SlowSamples):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + torch.rand(8), i % 3

    model = Net()
    given = model, DataLoader(Augmented(), batch_size=16), torch.optim.SGD(model.parameters(), 0.1)
    techniques = {"compile": False, "in_memory": True}
    with pytest.raises(ValueError, match="in_memory") as refused:
        flatout.optimize(*given, functional.cross_entropy, techniques=techniques, budget=0)
    assert "random-samples" in reasons(str(refused.value))


def test_a_list_of_batches_is_a_loader():
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)]
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=QUICK, budget=0)
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


class Shuffled(Sampler):
    """User's sampler."""

    def __len__(self):
        return 64

    def __iter__(self):
        return iter(torch.randperm(64).tolist())


@pytest.mark.parametrize("own_sampler", [False, True])
@pytest.mark.parametrize("batches", [0, 2, 5])
def test_a_run_goes_on_in_mid_epoch(own_sampler, batches):
    """The test includes trials that take batches and return them."""
    x = torch.arange(64.0)[:, None].expand(64, 8).contiguous()
    data = TensorDataset(x, torch.arange(64) % 3)

    def make_run():
        torch.manual_seed(0)
        model = Net()
        loader = DataLoader(data, 8, sampler=Shuffled() if own_sampler else None, shuffle=not own_sampler)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        return flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)

    run = make_run()
    iterator = iter(run.loader)
    for _ in range(batches):
        run.step(next(iterator))
    state, generator = run.loader.state_dict(), torch.get_rng_state()
    rest = [x[:, 0].tolist() for x, _ in iterator]
    assert len(rest) == 8 - batches
    after = torch.get_rng_state()
    resumed = make_run()
    torch.set_rng_state(generator)
    resumed.loader.load_state_dict(state)
    assert [x[:, 0].tolist() for x, _ in resumed.loader] == rest
    assert torch.equal(torch.get_rng_state(), after)
