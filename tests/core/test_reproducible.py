"""reproducible(), seed_samples(), optimize(deterministic=True): two runs are bit-equal, with any number of workers."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils import deterministic
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import flatout
from flatout.data import Prefetcher, clone_loader, is_rewindable, seed_samples
from flatout.techniques import REGISTRY, Measured
from tests.clock import Clock, TimedStep
from tests.golden import simulation
from tests.helpers import bits
from tests.jobs import NO_TECHNIQUES, QUICK, Net, make_data, make_job, train
from tests.reasons import reasons

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[Any, ...]:
    """Return all settings that reproducible() changes."""
    return (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        os.environ.get(CUBLAS),
    )


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def settings_come_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS, raising=False)
    before = settings()
    yield
    after = settings()
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True
    assert after == before


# -- reproducible ----------------------------------------------------------------------------------------------


def test_a_plain_call_is_in_force_at_once_and_until_undo() -> None:
    before, state = settings(), torch.get_rng_state()
    made = flatout.reproducible(7)
    assert settings() == (False, True, True, False, True, ":4096:8")
    first = drawn()
    made.undo()
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state)
    again = flatout.reproducible(7)
    assert drawn() == first
    again.undo()
    again.undo()
    with flatout.reproducible(8):
        assert drawn() != first


def test_a_block_puts_back_what_it_found_whatever_was_on_before() -> None:
    left = flatout.reproducible(0)  # active, and then disabled by hand
    torch.use_deterministic_algorithms(False)
    with flatout.reproducible(0):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    left.undo()


def test_a_with_block_gives_generators_and_settings_back() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [drawn() for _ in range(2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert drawn() == expected[0]
    before, block = settings(), flatout.reproducible(3)
    with block:
        inside = drawn()
        with flatout.reproducible(4, warn_only=True):
            assert settings()[3]
        assert not settings()[3]
    assert settings() == before
    with pytest.raises(KeyError), block:
        raise KeyError
    assert settings() == before
    assert drawn() == expected[1]
    with block:  # enter the block a second time
        assert drawn() == inside


def test_the_settings_of_the_user_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    torch.backends.cudnn.benchmark = deterministic_before = True
    deterministic.fill_uninitialized_memory = False
    try:
        before = settings()
        with flatout.reproducible(0):
            assert settings() == (False, True, True, False, True, ":16:8")
            assert torch.empty(3).isnan().all()
        assert settings() == before
        monkeypatch.setenv(CUBLAS, ":0:0")  # neither of the two deterministic values
        with flatout.reproducible(0):
            assert os.environ[CUBLAS] == ":4096:8"
        assert os.environ[CUBLAS] == ":0:0"
        assert deterministic_before
    finally:
        torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory = False, True
        monkeypatch.delenv(CUBLAS)


def test_an_operator_that_cannot_repeat_raises_or_warns() -> None:
    def put() -> None:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    with flatout.reproducible(0), pytest.raises(RuntimeError, match="deterministic"):
        put()
    with flatout.reproducible(0, warn_only=True), pytest.warns(UserWarning, match="deterministic"):
        put()
    put()


@pytest.mark.parametrize(
    ("seed", "error", "value"),
    [(-1, ValueError, "-1"), (2**64, ValueError, str(2**64)), (True, TypeError, "True"), ("0", TypeError, "'0'")],
)
def test_a_bad_seed_is_refused_and_changes_nothing(seed: Any, error: type[Exception], value: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(error, match=f"seed.*{value}"):
        flatout.reproducible(seed)
    model, loader, opt = make_job()
    with pytest.raises(error, match=f"seed.*{value}"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, seed=seed, budget=0)
    assert type(opt) is torch.optim.Adam
    torch.set_rng_state(state)


@pytest.fixture
def started_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate that cuBLAS has started without a deterministic workspace, which can happen only on a GPU."""
    monkeypatch.setattr(sys.modules["flatout.core.reproducible"], "cublas_started_without", lambda: True)


@pytest.mark.usefixtures("started_cublas")
def test_too_late_for_cublas_is_an_error_that_changes_nothing() -> None:
    before, state = settings(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match=CUBLAS):
        flatout.reproducible(0)
    assert torch.equal(torch.get_rng_state(), state)
    model, loader, opt = make_job()
    with pytest.raises(RuntimeError, match=CUBLAS):
        flatout.optimize(model, loader, opt, functional.cross_entropy, deterministic=True, budget=0)
    assert settings() == before
    with pytest.warns(UserWarning, match=CUBLAS), flatout.reproducible(0, warn_only=True):
        pass


# -- data ------------------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Dataset that draws from every kind of random generator."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)
        self.others = [random.Random(1), random.Random(2), np.random.RandomState(3), torch.Generator()]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        one, two, legacy, generator = self.others
        drawn = [random.random(), np.random.rand(), self.own.random(), one.random(), two.random(), legacy.rand()]
        noise = torch.tensor(drawn, dtype=torch.float32)
        return torch.cat([noise, torch.rand(1), torch.rand(1, generator=generator)]) + i, i % 3


class WholeBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        shared = random.random()
        return [(x + shared, y) for x, y in map(self.__getitem__, indices)]


def mixed_up(samples: list[Any]) -> Any:
    """Collate a batch with random numbers, as mixup does."""
    x, y = torch.utils.data.default_collate(samples)
    return x[torch.randperm(len(x))] + random.random(), y


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffled": lambda **how: DataLoader(Augmented(), batch_size=5, shuffle=True, **how),
    "collate draws": lambda **how: DataLoader(Augmented(), batch_size=5, collate_fn=mixed_up, **how),
    "whole batches": lambda **how: DataLoader(WholeBatches(), batch_size=5, shuffle=True, **how),
    "no batches": lambda **how: DataLoader(Augmented(), batch_size=None, shuffle=True, **how),
    "repeats": lambda **how: DataLoader(
        Augmented(), batch_size=5, sampler=RandomSampler(range(24), replacement=True), **how
    ),
    "lists": lambda **how: DataLoader(Augmented(), batch_sampler=[[0, 1, 2], [2, 2, 5]], **how),
    "own generator": lambda **how: DataLoader(
        Augmented(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3), **how
    ),
}


def epochs(loader: Any, count: int = 2) -> list[list[bytes]]:
    """Return the batches of seeded epochs, each with a random number that the model draws."""
    with flatout.reproducible(11):
        return [[bits(x) + bits(torch.rand(1)) for x, _ in loader] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_runs_with_as_many_workers_are_alike(workers: int) -> None:
    def run() -> list[list[bytes]]:
        data = TensorDataset(torch.arange(24.0), torch.zeros(24))
        return epochs(DataLoader(data, batch_size=5, shuffle=True, num_workers=workers, collate_fn=mixed_up))

    assert run() == run()


@pytest.mark.parametrize("kind", LOADERS)
def test_samples_are_the_same_with_any_number_of_workers(kind: str) -> None:
    alone = epochs(seed_samples(LOADERS[kind]()))
    assert alone == epochs(seed_samples(LOADERS[kind](num_workers=1)))
    assert alone == epochs(seed_samples(LOADERS[kind](num_workers=4)))
    persistent = clone_loader(seed_samples(LOADERS[kind]()), num_workers=2, persistent_workers=True)
    assert alone == epochs(Prefetcher(persistent, torch.device("cpu")))
    assert alone[0] != alone[1]


def test_without_seeds_they_are_not() -> None:
    loader = LOADERS["shuffled"]
    assert epochs(loader(num_workers=1)) != epochs(loader(num_workers=2))


def test_each_sample_and_each_generator_draws_its_own() -> None:
    batch = next(iter(seed_samples(DataLoader(Augmented(), batch_size=24))))
    values = (batch[0] - torch.arange(24.0)[:, None]).round(decimals=5).flatten().tolist()
    assert len(set(values)) > 0.9 * len(values)
    again = next(iter(seed_samples(DataLoader(Augmented(), batch_sampler=[[3, 3]]))))[0]
    assert not torch.equal(again[0], again[1])


def test_a_seeded_loader_is_the_users_otherwise() -> None:
    loader = LOADERS["shuffled"](num_workers=2)
    seeded = seed_samples(loader)
    assert type(seeded) is DataLoader
    assert len(seeded) == len(loader)
    assert is_rewindable(seeded)
    assert seed_samples(seeded) is seeded
    assert type(seeded.dataset[3][0]) is torch.Tensor  # the user's sample, unseeded
    key = next(iter(seeded.batch_sampler))[0]
    made = seeded.dataset[key].value[0]
    assert torch.equal(pickle.loads(pickle.dumps(seeded.dataset))[key].value[0], made)  # as in a spawned worker
    assert sorted(y for _, labels in seeded for y in labels.tolist()) == sorted(8 * [0, 1, 2])


def test_what_has_no_index_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match="Stream"):
        seed_samples(DataLoader(Stream()))
    with pytest.raises(ValueError, match="list"):
        seed_samples([1, 2])  # type: ignore[arg-type]


def test_an_error_of_the_dataset_passes_through_and_puts_generators_back() -> None:
    class Broken(Augmented):
        def __getitem__(self, i: int) -> Any:
            random.random()
            raise LookupError("mine")

    batches = iter(seed_samples(DataLoader(Broken(), batch_size=2)))
    random.seed(1)
    state = random.getstate()
    with pytest.raises(LookupError, match="mine"):
        next(batches)
    assert random.getstate() == state


def test_set_epoch_reaches_the_sampler() -> None:
    told: list[int] = []

    class Told(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    flatout.data.loaders.set_epoch(seed_samples(DataLoader(Augmented(), sampler=Told(range(24)))), 3)
    assert told == [3]


@pytest.mark.parametrize("workers", [(0, 0), (2, 1), (1, 0)])
def test_an_epoch_goes_on_with_the_samples_that_it_would_have_had(workers: tuple[int, int]) -> None:
    with flatout.reproducible(2):
        loader = Prefetcher(seed_samples(LOADERS["shuffled"](num_workers=workers[0])), torch.device("cpu"))
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = loader.state_dict()
        rest = [bits(x) for x, _ in iterator]
    assert len(rest) == 3
    with flatout.reproducible(3):
        resumed = Prefetcher(seed_samples(LOADERS["shuffled"](num_workers=workers[1])), torch.device("cpu"))
        resumed.load_state_dict(state)
        assert [bits(x) for x, _ in resumed] == rest


# -- optimize --------------------------------------------------------------------------------------------------


def trained(seed: int, workers: int, loss_fn: Any = functional.cross_entropy, **how: Any) -> list[bytes]:
    """Return losses and weights of a run with dropout, on augmented data from a number of workers."""
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(Augmented(), batch_size=5, shuffle=True)
    run = flatout.optimize(
        model,
        loader,
        opt,
        loss_fn,
        deterministic=True,
        seed=seed,
        techniques=QUICK | {"workers": workers},
        **how,
    )
    try:
        losses = [bits(run.step(batch)) for _ in range(2) for batch in run.loader]
        assert run.loader.original is loader
        assert run.loader.dataset is loader.dataset
    finally:
        run.undo()
    assert run.loader is loader
    return [*losses, *map(bits, model.parameters())]


def test_runs_are_bit_equal_with_any_number_of_workers() -> None:
    first = trained(5, workers=1, budget=0)
    assert first == trained(5, workers=1, budget=0)
    assert first == trained(5, workers=4, budget=0)
    assert first != trained(6, workers=1, budget=0)


def test_trials_change_no_bit_of_a_run(clock: Clock) -> None:
    assert trained(5, workers=0, budget=0) == trained(5, workers=0, loss_fn=TimedStep(clock, 0.01), budget=3)


def test_without_a_seed_random_samples_stay_where_they_are() -> None:
    model = Net()
    with pytest.raises(ValueError, match="workers"):
        flatout.optimize(
            model,
            DataLoader(Augmented(), batch_size=5),
            torch.optim.Adam(model.parameters(), 0.01),
            functional.cross_entropy,
            deterministic=True,
            techniques={"workers": 1},
            budget=0,
        )


def costs_of_determinism(loss_fn: Any = functional.cross_entropy, **how: Any) -> Any:
    """Return the report's row about determinism, for a run without trials."""
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, loss_fn, deterministic=True, techniques=NO_TECHNIQUES, **how)
    assert torch.are_deterministic_algorithms_enabled()
    run.undo()
    row = run.report.row("determinism")
    assert row.status == "kept"
    return row


def test_the_report_has_what_determinism_costs(clock: Clock) -> None:
    row = costs_of_determinism(TimedStep(clock, 0.01), budget=1)
    assert row.trials[0].pairs > 0
    assert row.gain == row.trials[0].gain
    assert "measured-cost" in reasons(row)


def test_without_a_budget_the_cost_of_determinism_is_not_measured() -> None:
    row = costs_of_determinism(budget=0)
    assert not row.trials
    assert not reasons(row) & {"measured-cost", "unknown-cost"}


@pytest.mark.usefixtures("clock")
def test_determinism_is_kept_where_its_cost_cannot_be_measured() -> None:
    def fussy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("not without")
        return functional.cross_entropy(output, target)

    row = costs_of_determinism(fussy, budget=1)
    assert "unknown-cost" in reasons(row)
    assert row.trials[0].failure == "RuntimeError: not without"


@pytest.mark.parametrize("job", ["everything pays", "own loop"])
def test_inside_reproducible_no_timing_decides_what_changes_numerics(job: str) -> None:
    before = settings()
    with flatout.reproducible(3):
        report = simulation.run(simulation.JOBS[job], lambda run: run.report)
    assert settings() == before
    assert report.row("determinism").status == "kept"
    rows = [report.row(t.name) for t in REGISTRY if isinstance(t, Measured) and t.effect != "exact"]
    assert {row.status for row in rows} <= {"not tried", "not applicable"}
    assert not any(row.trials for row in rows)
    assert "deterministic" in reasons(report.row("precision"))
    assert sum("flatout.reproducible" in note for note in report.summary.notes) == 1


def test_own_loops_repeat_bit_for_bit() -> None:
    def run() -> list[float]:
        with flatout.reproducible(3):
            model, _, opt = make_job()
            loader = DataLoader(make_data(), batch_size=16, shuffle=True)
            model, loader = flatout.optimize(model, loader, techniques=QUICK, budget=0)
            return train(model, loader, opt, epochs=2)

    assert run() == run()


def test_the_end_of_a_block_is_the_end_of_its_settings_whatever_becomes_of_a_run() -> None:
    model, loader, opt = make_job()
    before = settings()
    with flatout.reproducible(3):
        run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=QUICK, budget=0)
    assert settings() == before
    run.undo()
    assert settings() == before


def test_a_run_that_is_deterministic_stays_so_where_a_block_ends() -> None:
    model, loader, opt = make_job()
    before = settings()
    with flatout.reproducible(3, warn_only=True):
        run = flatout.optimize(
            model, loader, opt, functional.cross_entropy, deterministic=True, techniques=QUICK, budget=0
        )
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    run.undo()
    assert settings() == before
