"""Loader workers for random samples, and for subclasses and wrappers of ``DataLoader``."""

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from tests.augmented import HELD, Augmented, Hidden
from tests.jobs import NO_TECHNIQUES
from tests.loaders import WITH_BASE, Normalizing
from tests.reasons import reasons
from tests.techniques.harness import STARVED, TECHNIQUES, candidates, decided, given_timings, refusal, tuned_workers
from tests.techniques.worker_jobs import Numbers, job_with, numbers_of, run_with

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


# -- random augmentation -------------------------------------------------------------------------------------


def augmented(how, **settings):
    return DataLoader(Augmented(how), 4, **{"shuffle": True, **settings})


def with_workers(loader, workers=2, **options):
    """Return a run with forced workers, and seed torch for the first epoch."""
    run = run_with(loader, techniques=NO_TECHNIQUES | {"workers": workers}, **options)
    assert run.report.row("workers").status == "kept"
    torch.manual_seed(5)
    return run


def epochs_of(loader, count=3):
    """Return the indices of the samples of each epoch."""
    return [numbers_of(loader) for _ in range(count)]


def drawn_by(loader, count=3):
    """Return the random numbers of all samples of some epochs."""
    return [number for _ in range(count) for _, drawn in loader for number in drawn.tolist()]


@pytest.mark.parametrize("persistent", [False, True])
def test_random_samples_come_once_per_epoch_and_first_in_the_users_order(persistent):
    torch.manual_seed(5)
    (first,) = epochs_of(augmented("torch"), 1)
    run = with_workers(augmented("torch"), {"num_workers": 2, "persistent_workers": persistent})
    found = epochs_of(run.loader)
    assert found[0] == first
    assert all(sorted(epoch) == list(range(32)) for epoch in found)
    assert len({tuple(epoch) for epoch in found}) == 3
    assert "reseeded" in reasons(run.report.row("workers"))


@pytest.mark.parametrize("persistent", [False, True])
def test_later_epochs_keep_their_order_if_the_sampler_has_a_generator(persistent):
    def loader():
        return augmented("torch", generator=torch.Generator().manual_seed(9))

    run = with_workers(loader(), {"num_workers": 2, "persistent_workers": persistent})
    assert epochs_of(run.loader) == epochs_of(loader())


@pytest.mark.parametrize("how", ["torch", "random", "numpy", *HELD])
@pytest.mark.parametrize("workers", [2, {"num_workers": 2, "persistent_workers": True}], ids=["new", "persistent"])
def test_all_samples_draw_different_numbers_from_any_generator(how, workers):
    """torch seeds the global generators in each worker. A generator that the dataset holds is copied by the fork."""
    drawn = drawn_by(with_workers(augmented(how), workers).loader)
    assert len(set(drawn)) == len(drawn) == 3 * 32
    assert drawn == drawn_by(with_workers(augmented(how), workers).loader) != drawn_by(augmented(how))


@pytest.mark.parametrize("how", ["numpy.Generator", "of the module"])
def test_workers_that_are_spawned_draw_their_own_numbers(how):
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    drawn = drawn_by(with_workers(augmented(how), workers).loader, 1)
    assert len(set(drawn)) == 32


def test_the_users_worker_init_fn_runs_last():
    def init(worker):
        get_worker_info().dataset.rng.seed(worker)

    loader = augmented("random.Random", worker_init_fn=init)
    run = with_workers(loader)
    first, again = drawn_by(run.loader, 1), drawn_by(run.loader, 1)
    assert sorted(first) == sorted(again)  # each worker starts every epoch with the user's seed
    assert loader.worker_init_fn is init


def test_a_gain_is_kept_for_random_samples_and_the_row_mentions_other_numbers():
    job = job_with(augmented("numpy"), expected_steps=10**6)
    with tuned_workers(2), given_timings(6.0, 1.0, STARVED), decided("workers", job=job) as outcome:
        row = outcome.rows["workers"]
    assert row.status == "kept"
    assert {"workers-pay", "reseeded", "loader-keeps-up"} <= reasons(row)


def test_the_row_mentions_other_numbers_only_for_random_samples():
    assert "reseeded" not in reasons(with_workers(DataLoader(Numbers(), 4)).report.row("workers"))


def test_samples_that_may_depend_on_earlier_ones_keep_their_process():
    loader = DataLoader(Hidden(), 4)
    assert "samples-depend" in refusal("workers", job_with(loader))
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(loader, techniques={"workers": 2})


def test_deterministic_training_keeps_the_process_of_random_samples_unless_each_has_a_seed():
    assert "random-samples" in refusal("workers", job_with(augmented("torch"), deterministic=True))
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(augmented("torch"), techniques={"workers": 2}, deterministic=True)

    def seeded(workers):
        run = with_workers(augmented("random.Random"), workers, deterministic=True, seed=1)
        drawn = drawn_by(run.loader)
        assert "reseeded" not in reasons(run.report.row("workers"))
        run.undo()
        return drawn

    assert seeded(0) == seeded(2)


# -- subclasses and wrappers ---------------------------------------------------------------------------------


class Scalars(Numbers):
    """Samples that are their index plus a small random number."""

    def __getitem__(self, i):
        return torch.tensor(float(i)) + 0.1 * torch.rand(())

    def __len__(self):
        return 20


@pytest.mark.parametrize("name", WITH_BASE)
def test_a_loader_of_another_class_gets_workers_and_keeps_its_changes_to_batches(name):
    def mean(model, batch):
        return model(batch[:, None].expand(-1, 8)).mean()

    def order(loader):
        return [round((number + shift) / factor) for batch in loader for number in batch.tolist()]

    factor, shift = (3 if name == "another constructor" else 1), (7 if name.startswith("wrap") else 0)
    torch.manual_seed(5)
    expected = order(WITH_BASE[name](Scalars()))
    loader = WITH_BASE[name](Scalars())
    run = with_workers(loader, compute_loss=mean)
    assert order(run.loader) == expected
    assert sorted(order(run.loader)) == list(range(20))
    assert run.loader.original is loader
    assert "reseeded" in reasons(run.report.row("workers"))
    assert type(run._job.data.source) is type(loader)


def test_workers_of_a_wrapper_are_not_persistent_because_its_epochs_draw_a_seed_each():
    loader = Normalizing(DataLoader(Scalars(), 4), 7)
    with tuned_workers(2, persistent=True):
        (found,) = candidates("workers", job_with(loader))
    assert found.value == {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}


def test_a_wrapper_already_has_its_present_settings():
    loader = Normalizing(DataLoader(Scalars(), 4, num_workers=1), 7)
    assert TECHNIQUES["workers"].is_so(job_with(loader), 1)
