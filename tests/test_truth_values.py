"""User objects whose truth value raises, and whose length raises or is 0: flatout must compare with None instead."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import flatout
from flatout.data import InMemoryLoader, Prefetcher
from flatout.data.seeding import SeededCollate
from tests.jobs import FORCED, NO_TECHNIQUES, QUICK, make_data


class Undecided:
    def __bool__(self):
        raise AssertionError("somebody asked for a truth value")


class Unsized(Undecided):
    def __len__(self):
        raise NotImplementedError


class Model(Undecided, nn.ModuleList):
    """Module with length 0, and without a truth value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)


class Loss(Undecided, nn.ModuleDict):
    def forward(self, output, target):
        return functional.cross_entropy(output, target)


class Optimizer(Unsized, torch.optim.SGD):
    pass


class Scheduler(Unsized, torch.optim.lr_scheduler.StepLR):
    pass


class Samples(Undecided, Dataset):
    """Samples that take two milliseconds each on a simulated clock."""

    def __init__(self, clock=None):
        self.data, self.clock = make_data(48), clock

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if self.clock is not None:
            self.clock.advance(0.002)
        return self.data[index]


class Stream(Unsized, IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[i] for i in range(48))


class Order(Undecided, RandomSampler):
    pass


class Batches(Undecided, BatchSampler):
    pass


class Wrapped(Unsized):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Collate(Unsized):
    def __call__(self, samples):
        return torch.utils.data.default_collate(samples)


class Metrics(Undecided, dict):
    pass


def loader_of(kind, clock=None):
    samples = Samples(clock)
    return {
        "tensors": lambda: DataLoader(samples.data, batch_size=16, shuffle=True),
        "map-style": lambda: DataLoader(
            samples, batch_sampler=Batches(Order(samples), 16, False), collate_fn=Collate()
        ),
        "iterable": lambda: DataLoader(Stream(samples), batch_size=16),
        "wrapped": lambda: Wrapped(DataLoader(samples, batch_size=16)),
    }[kind]()


KINDS = ["tensors", "map-style", "iterable", "wrapped"]


def parts():
    torch.manual_seed(0)
    model = Model()
    optimizer = Optimizer(model.parameters(), 0.1)
    return model, optimizer, Scheduler(optimizer, 1)


MEASURED = NO_TECHNIQUES | dict.fromkeys(("batch_size", "cpu_threads", "fused_optimizer", "in_memory"))


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("choices", [MEASURED, FORCED], ids=["measured", "forced"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_asks_nothing_for_its_truth_value(kind, choices, tmp_path, clock):
    model, optimizer, scheduler = parts()
    clock.slow_down(model, 0.01)
    budget = 20 if choices is MEASURED else 0
    if choices is FORCED:  # subclasses of an optimizer and other loaders do not have these forms
        without = {"fused_optimizer"} | ({"in_memory"} if kind != "tensors" else set())
        choices = {name: value for name, value in choices.items() if name not in without}
    run = flatout.optimize(
        model, loader_of(kind, clock), optimizer, Loss(), scheduler=scheduler, techniques=choices, budget=budget
    )
    (row,) = run.fit(1, eval_loader=loader_of(kind), metrics=Metrics(), progress=False)
    assert row["loss"] > 0
    run.save(tmp_path / "state.pt")
    run.load(tmp_path / "state.pt")
    assert str(run.report)
    run.profile(steps=1, warmup=1)
    run.undo()


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", KINDS)
def test_the_two_value_form_asks_nothing_for_its_truth_value(kind):
    model, optimizer, _ = parts()
    tuned, loader = flatout.optimize(model, loader_of(kind), loss_fn=Loss(), techniques=QUICK, budget=1)
    assert tuned is model
    for x, y in loader:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("wrap", [lambda loader: loader, InMemoryLoader], ids=["plain", "in memory"])
def test_evaluation_and_seeds_ask_nothing_for_their_truth_value(wrap):
    model, optimizer, _ = parts()
    loader = wrap(loader_of("tensors"))
    run = flatout.optimize(
        model, loader, optimizer, Loss(), techniques=QUICK, budget=0, deterministic=True, seed=1, plan=None
    )
    assert run.fit(1, progress=False)[0]["loss"] > 0


def test_collate_of_a_seeded_loader_takes_samples_without_a_truth_value():
    sample = torch.arange(3)
    assert SeededCollate(lambda batch: batch)(sample) is sample


class Servants(IterableDataset):
    """Samples that are the number of their worker process."""

    def __iter__(self):
        return (os.getpid() for _ in range(8))


class EmptyByLength(Servants):
    def __len__(self):
        return 0


class WithoutLength(Unsized, Servants):
    pass


@pytest.mark.parametrize("dataset", [Servants, EmptyByLength, WithoutLength])
def test_the_same_persistent_workers_of_an_iterable_dataset_serve_two_epochs(dataset):
    loader = DataLoader(dataset(), batch_size=4, num_workers=1, persistent_workers=True)
    prefetcher = Prefetcher(loader, "cpu")
    served = torch.stack([batch for _ in range(2) for batch in prefetcher])
    assert served.shape == (2 * 2, 4)
    assert len(served.unique()) == 1
    prefetcher.close()
