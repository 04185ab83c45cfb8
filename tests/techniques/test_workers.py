"""Row 2: trials of the tuner's workers on real steps, plans and explanations."""

import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

import flatout
from flatout.data import tune
from flatout.plan import Plan
from flatout.report.model import Pace
from tests.augmented import HELD, Augmented, Hidden
from tests.jobs import NO_TECHNIQUES, Net, SlowSamples, Stream, job_of, only
from tests.loaders import UNDERSTOOD, Normalizing, OwnIterator
from tests.reasons import reasons
from tests.techniques.harness import (
    STARVED,
    TECHNIQUES,
    candidates,
    decided,
    forced,
    given_timings,
    refusal,
    tuned_workers,
    usable_cores,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FED = Pace(step_ms=10.0, load_ms=0.01, samples_per_second=100.0)


class Numbers(Dataset):
    """Samples that hold their number and the worker that made them. The training process is -1."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        worker = get_worker_info()
        return torch.full((8,), float(i)), -1 if worker is None else worker.id


def over(loader, device="cpu", **settings):
    batches = [(torch.randn(4, 8), torch.zeros(4))]
    return job_of(Net(), batches, loader=loader, compute_loss=mean_output, device=device, **settings)


def mean_output(model, batch):
    return model(batch[0]).mean()


def run_with(loader, **options):
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    return flatout.optimize(model, loader, opt, **{"compute_loss": mean_output, "budget": 0, **options})


def workers_of(loader):
    """Return the workers that made the samples of an epoch."""
    return {worker for _, made_by in loader for worker in made_by.tolist()}


def numbers_of(loader):
    return [number for x, _ in loader for number in x[:, 0].tolist()]


# -- what there is to try ------------------------------------------------------------------------------------


def test_the_candidate_is_the_tuners_choice():
    loader = DataLoader(Numbers(), 4)
    with tuned_workers(6):
        (found,) = candidates("workers", over(loader))  # loading keeps no core busy
    assert found.value == {"num_workers": 6, "prefetch_factor": 2, "persistent_workers": False}
    assert found.reason == "6 workers load as a step needs"
    made = found.make()
    assert {name: getattr(made, name) for name in found.value} == found.value


@pytest.mark.parametrize(("workers", "numbers"), [(4, [4, 2, 1]), (2, [2, 1]), (1, [1])])
def test_fewer_are_tried_where_the_step_computes_on_the_same_cores(workers, numbers):
    loader = DataLoader(Numbers(), 4)
    with tuned_workers(workers, busy=1.0):
        assert [each.value["num_workers"] for each in candidates("workers", over(loader))] == numbers
        assert len(candidates("workers", over(loader, "cuda"))) == 1


def test_none_is_tried_where_the_user_has_some():
    with tuned_workers(1):
        tried = candidates("workers", over(DataLoader(Numbers(), 4, num_workers=1)))
    assert [each.value for each in tried] == [{"num_workers": 0}]


def test_nothing_is_tried_where_the_user_has_what_the_tuner_finds():
    with tuned_workers(0):
        assert "loader-keeps-up" in refusal("workers", over(DataLoader(Numbers(), 4)))


def test_a_loader_with_good_settings_is_unchanged_and_the_row_explains_it():
    pace = Pace(1e4, 200.0, 1.0)
    loader = DataLoader(SlowSamples(), 4)
    assert "loading-negligible" in refusal("workers", over(loader), pace)
    with given_timings(1.0, 1.0, pace), decided("workers", job=over(loader, expected_steps=10**6)) as outcome:
        row = outcome.rows["workers"]
    assert (row.status, row.trials) == ("rejected", ())
    assert "loading-negligible" in reasons(row)


def test_an_error_while_tuning_rejects_workers():
    class Breaking(SlowSamples):
        """Dataset that fails in the second epoch, which the tuner reads."""

        reads = 0

        def __getitem__(self, i):
            self.reads += 1
            if self.reads > 60:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    loader = DataLoader(Breaking(), 4)
    with given_timings(1.0, 1.0, STARVED), decided("workers", job=over(loader, expected_steps=10**6)) as outcome:
        row = outcome.rows["workers"]
    assert row.status == "rejected"
    assert "the disk is gone" in row.why  # the user's own error


def test_a_dataset_for_workers_only_is_left_to_them():
    class OnlyInWorkers(SlowSamples):
        def __getitem__(self, i):
            assert get_worker_info() is not None
            return super().__getitem__(i)

    run = run_with(DataLoader(OnlyInWorkers(), 16, num_workers=1))
    row = run.report.row("workers")
    assert row.status == "not applicable"
    assert "sample-fails-here" in reasons(row)
    assert len(list(run.loader)) == 4


# -- what is kept --------------------------------------------------------------------------------------------


def test_a_gain_is_kept_and_the_row_has_the_tuners_numbers():
    loader = DataLoader(Numbers(), 4)
    with (
        tuned_workers(2),
        given_timings(6.0, 1.0, STARVED),
        decided("workers", job=over(loader, expected_steps=10**6)) as outcome,
    ):
        pass
    row = outcome.rows["workers"]
    assert (row.status, round(row.gain.ratio, 6)) == ("kept", 6.0)
    assert row.chosen.startswith("2 workers, 2 ahead")
    assert outcome.values["workers"]["num_workers"] == 2
    assert {"workers-pay", "loader-keeps-up"} <= reasons(row)
    assert workers_of(outcome.loader) == {0, 1}
    assert sorted(numbers_of(outcome.loader)) == list(range(64))


def test_a_plan_makes_the_same_loader(tmp_path):
    loader = DataLoader(Numbers(), 4)
    techniques = NO_TECHNIQUES | {"workers": 2}
    run = run_with(loader, techniques=techniques)
    run.plan.save(tmp_path / "plan.json")
    again = run_with(DataLoader(Numbers(), 4), plan=tmp_path / "plan.json")
    assert again.plan == run.plan == Plan.load(tmp_path / "plan.json")
    assert workers_of(again.loader) == workers_of(run.loader) == {0, 1}


def test_oversubscription_is_reduced_if_that_costs_no_speed_and_the_row_explains_it():
    class Working(Dataset):
        """Samples that keep a core busy for 5 ms each."""

        def __len__(self):
            return 64

        def __getitem__(self, i):
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass
            return torch.zeros(8), 0

    loader = DataLoader(Working(), 4, num_workers=8)
    with (
        usable_cores(2),
        given_timings(1.0, 1.0, FED),
        decided("workers", job=over(loader, expected_steps=10**6)) as outcome,
    ):
        row = outcome.rows["workers"]
        assert outcome.loader.num_workers <= 2
    assert row.status == "kept"
    assert "more-workers-than-supported" in reasons(row)


@pytest.mark.parametrize(("new", "workers"), [(1.2, 8), (1.0, 4)])
def test_slower_is_not_lowered_and_a_loader_that_is_not_oversubscribed_has_to_gain(new, workers):
    loader = DataLoader(Numbers(), 4, num_workers=workers)
    with (
        usable_cores(4),
        tuned_workers(2),
        given_timings(1.0, new, Pace(10.0, 5.0, 100.0)),
        decided("workers", job=over(loader, expected_steps=10**6)) as outcome,
    ):
        row = outcome.rows["workers"]
        assert row.status == "rejected"
        assert row.trials
        assert outcome.loader is loader


def test_little_to_save_is_not_tried():
    for pace, steps, why in ((FED, 10**6, "loading-negligible"), (STARVED, 10, "setup-not-worth-it")):
        loader = DataLoader(Numbers(), 4)
        with given_timings(1.0, 1.0, pace), decided("workers", job=over(loader, expected_steps=steps)) as outcome:
            row = outcome.rows["workers"]
        assert (row.status, row.trials) == ("not tried", ())
        assert why in reasons(row)


# -- what is forced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "decision"),
    [
        (0, {"num_workers": 0}),
        (2, {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}),
        (
            {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
            {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
        ),
        (
            {"num_workers": 1, "multiprocessing_context": "fork"},
            {
                "num_workers": 1,
                "prefetch_factor": 2,
                "persistent_workers": False,
                "multiprocessing_context": "fork",
            },
        ),
    ],
)
def test_forced_values(value, decision, tmp_path):
    run = run_with(DataLoader(Numbers(), 16), techniques=NO_TECHNIQUES | {"workers": value})
    assert run.plan.decisions == {"workers": decision}
    run.plan.save(tmp_path / "plan.json")
    again = run_with(DataLoader(Numbers(), 16), plan=tmp_path / "plan.json")
    assert again.plan == run.plan
    assert workers_of(again.loader) == (set(range(decision["num_workers"])) or {-1})
    made = forced("workers", value, over(DataLoader(Numbers(), 16))).make()
    assert {name: getattr(made, name) for name in decision if name != "multiprocessing_context"} == {
        name: setting for name, setting in decision.items() if name != "multiprocessing_context"
    }


@pytest.mark.parametrize(
    "value", [-1, True, 1.5, "2", {}, {"num_workers": True}, {"num_workers": 1, "batch_size": 3}], ids=repr
)
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"techniques\['workers'\].*" + re.escape(repr(value))):
        run_with(DataLoader(SlowSamples(), 16), techniques={"workers": value})


def test_values_that_the_dataloader_refuses_are_refused():
    value = {"num_workers": 1, "multiprocessing_context": "x"}
    with pytest.raises(ValueError, match=r"techniques\['workers'\].*" + re.escape(repr(value))):
        run_with(DataLoader(SlowSamples(), 16), techniques={"workers": value})


def test_the_users_other_settings_stay():
    loader = DataLoader(Numbers(), 16, num_workers=1, prefetch_factor=5, persistent_workers=True)
    assert forced("workers", 2, over(loader)).value == {
        "num_workers": 2,
        "prefetch_factor": 5,
        "persistent_workers": True,
    }


# -- what is left alone --------------------------------------------------------------------------------------


class Shuffled(Sampler):
    """Sampler that keeps its position and yields each index once."""

    def __init__(self, n):
        self.left = iter(torch.randperm(n).tolist())

    def __iter__(self):
        return self.left

    def __len__(self):
        return 64


SOURCES = {
    "stream": (lambda: DataLoader(Stream(64), batch_size=8), "iterable-dataset"),
    "subclass": (lambda: OwnIterator(Numbers(), batch_size=8, shuffle=True), "overrides-dataloader"),
    "sampler": (lambda: DataLoader(Numbers(), batch_size=8, sampler=Shuffled(64)), "not-rewindable"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_is_not_known_to_rewind_loses_no_sample(source):
    make, why = SOURCES[source]
    run = run_with(make(), techniques=only("workers"), budget=1)
    numbers = numbers_of(run.loader)
    assert (numbers if source == "stream" else sorted(numbers)) == list(range(64))
    row = run.report.row("workers")
    assert row.status in ("not tried", "not applicable")
    assert why in reasons(row)


@pytest.mark.parametrize("source", SOURCES)
def test_workers_that_such_a_source_cannot_have_are_refused_before_it_is_read(source):
    loader = SOURCES[source][0]()
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(loader, techniques=NO_TECHNIQUES | {"workers": 2})
    assert sorted(numbers_of(loader)) == list(range(64))


def test_prefetch_on_a_cpu_points_to_the_workers():
    row = run_with(DataLoader(SlowSamples(), 16)).report.row("prefetch")
    assert row.status == "not applicable"
    assert "see-workers" in reasons(row)


def test_a_worker_init_fn_may_depend_on_the_number_of_workers():
    loader = DataLoader(torch.arange(8.0), 2, num_workers=1, worker_init_fn=print)
    with pytest.raises(ValueError, match="worker_init_fn"):
        tune(loader, 0.01)
    assert "worker-init-fn" in refusal("workers", over(loader))


# -- random augmentation -------------------------------------------------------------------------------------


def augmented(how, **settings):
    return DataLoader(Augmented(how), 4, **{"shuffle": True, **settings})


def with_workers(loader, workers=2, **options):
    """Return a run with workers that are forced. torch is seeded before the first epoch."""
    run = run_with(loader, techniques=NO_TECHNIQUES | {"workers": workers}, **options)
    assert run.report.row("workers").status == "kept"
    torch.manual_seed(5)
    return run


def epochs_of(loader, count=3):
    """Return the numbers of the samples of each epoch."""
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
def test_no_two_samples_draw_alike_whatever_they_draw_from(how, workers):
    """torch seeds its own, Python's and NumPy's global generators in each worker. A held one is copied by the fork."""
    drawn = drawn_by(with_workers(augmented(how), workers).loader)
    assert len(set(drawn)) == len(drawn) == 3 * 32
    assert drawn == drawn_by(with_workers(augmented(how), workers).loader) != drawn_by(augmented(how))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["numpy.Generator", "of the module"])
def test_workers_that_are_spawned_draw_their_own_numbers(how):
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    drawn = drawn_by(with_workers(augmented(how), workers).loader, 1)
    assert len(set(drawn)) == 32


def test_the_users_worker_init_fn_has_the_last_word():
    def init(worker):
        get_worker_info().dataset.rng.seed(worker)

    loader = augmented("random.Random", worker_init_fn=init)
    run = with_workers(loader)
    first, again = drawn_by(run.loader, 1), drawn_by(run.loader, 1)
    assert sorted(first) == sorted(again)  # each worker begins every epoch with the user's seed
    assert loader.worker_init_fn is init


def test_a_gain_is_kept_for_random_samples_and_the_row_says_what_changes():
    job = over(augmented("numpy"), expected_steps=10**6)
    with tuned_workers(2), given_timings(6.0, 1.0, STARVED), decided("workers", job=job) as outcome:
        row = outcome.rows["workers"]
    assert row.status == "kept"
    assert {"workers-pay", "reseeded", "loader-keeps-up"} <= reasons(row)


def test_the_row_of_samples_that_are_not_random_says_nothing_of_other_numbers():
    assert "reseeded" not in reasons(with_workers(DataLoader(Numbers(), 4)).report.row("workers"))


def test_samples_that_may_depend_on_earlier_ones_keep_their_process():
    loader = DataLoader(Hidden(), 4)
    assert "samples-depend" in refusal("workers", over(loader))
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(loader, techniques={"workers": 2})


def test_deterministic_training_keeps_the_process_of_random_samples_unless_each_has_a_seed():
    assert "random-samples" in refusal("workers", over(augmented("torch"), deterministic=True))
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(augmented("torch"), techniques={"workers": 2}, deterministic=True)

    def seeded(workers):
        run = with_workers(augmented("random.Random"), workers, deterministic=True, seed=1)
        drawn = drawn_by(run.loader)
        assert "reseeded" not in reasons(run.report.row("workers"))
        run.undo()
        return drawn

    assert seeded(0) == seeded(2)


# -- subclasses and wrappers -----------------------------------------------------------------------------------


class Scalars(Numbers):
    """Samples that are numbers drawn around their own."""

    def __getitem__(self, i):
        return torch.tensor(float(i)) + 0.1 * torch.rand(())

    def __len__(self):
        return 20


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_an_understood_loader_gets_workers_and_keeps_its_own_work(name):
    def mean(model, batch):
        return model(batch[:, None].expand(-1, 8)).mean()

    def order(loader):
        return [round((number + shift) / factor) for batch in loader for number in batch.tolist()]

    factor, shift = (3 if name == "another constructor" else 1), (7 if name.startswith("wrap") else 0)
    torch.manual_seed(5)
    expected = order(UNDERSTOOD[name](Scalars()))
    loader = UNDERSTOOD[name](Scalars())
    run = with_workers(loader, compute_loss=mean)
    assert order(run.loader) == expected
    assert sorted(order(run.loader)) == list(range(20))
    assert run.loader.original is loader
    assert "reseeded" in reasons(run.report.row("workers"))
    assert type(run._job.data.source) is type(loader)


def test_workers_of_a_wrapper_are_not_persistent_because_its_epochs_draw_a_seed_each():
    loader = Normalizing(DataLoader(Scalars(), 4), 7)
    with tuned_workers(2, persistent=True):
        (found,) = candidates("workers", over(loader))
    assert found.value == {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}


def test_the_present_settings_of_a_wrapper_count_as_asked_for():
    loader = Normalizing(DataLoader(Scalars(), 4, num_workers=1), 7)
    assert TECHNIQUES["workers"].is_so(over(loader), 1)
