"""Loader workers: candidates, decisions, forced values, and loaders that keep their workers."""

import os
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from flatout.data import tune
from flatout.plan import Plan
from flatout.report.model import Pace
from tests.jobs import NO_TECHNIQUES, SlowSamples, Stream, only
from tests.loaders import OwnIterator
from tests.reasons import reasons
from tests.techniques.harness import (
    STARVED,
    candidates,
    decided,
    forced,
    given_timings,
    refusal,
    tuned_workers,
    usable_cores,
)
from tests.techniques.worker_jobs import FED, Numbers, job_with, numbers_of, run_with, workers_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# -- candidates ----------------------------------------------------------------------------------------------


def test_the_candidate_is_the_tuners_choice():
    loader = DataLoader(Numbers(), 4)
    with tuned_workers(6):
        (found,) = candidates("workers", job_with(loader))  # loading keeps no core busy
    assert found.value == {"num_workers": 6, "prefetch_factor": 2, "persistent_workers": False}
    assert found.reason == "6 workers load as a step needs"
    made = found.make()
    assert {name: getattr(made, name) for name in found.value} == found.value


@pytest.mark.parametrize(("workers", "numbers"), [(4, [4, 2, 1]), (2, [2, 1]), (1, [1])])
def test_fewer_workers_are_also_tried_if_the_step_computes_on_the_same_cores(workers, numbers):
    loader = DataLoader(Numbers(), 4)
    with tuned_workers(workers, busy=1.0):
        assert [each.value["num_workers"] for each in candidates("workers", job_with(loader))] == numbers
        assert len(candidates("workers", job_with(loader, "cuda"))) == 1


def test_no_workers_are_tried_if_the_user_has_some():
    with tuned_workers(1):
        tried = candidates("workers", job_with(DataLoader(Numbers(), 4, num_workers=1)))
    assert [each.value for each in tried] == [{"num_workers": 0}]


def test_nothing_is_tried_if_the_user_already_has_the_tuners_choice():
    with tuned_workers(0):
        assert "loader-keeps-up" in refusal("workers", job_with(DataLoader(Numbers(), 4)))


def test_a_loader_with_good_settings_is_unchanged_and_the_row_explains_it():
    pace = Pace(1e4, 200.0, 1.0)
    loader = DataLoader(SlowSamples(), 4)
    assert "loading-negligible" in refusal("workers", job_with(loader), pace)
    job = job_with(loader, expected_steps=10**6)
    with given_timings(1.0, 1.0, pace), decided("workers", job=job, budget=1000) as outcome:
        row = outcome.rows["workers"]
    assert (row.status, row.trials) == ("rejected", ())
    assert "loading-negligible" in reasons(row)


def test_an_error_while_tuning_rejects_workers(monkeypatch):
    monkeypatch.setenv("READS", "0")  # no attribute, which would refuse workers at once

    class Breaking(SlowSamples):
        """Dataset that fails in the second epoch, which the tuner reads."""

        def __getitem__(self, i):
            os.environ["READS"] = str(int(os.environ["READS"]) + 1)
            if int(os.environ["READS"]) > 60:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    loader = DataLoader(Breaking(), 4)
    with given_timings(1.0, 1.0, STARVED), decided("workers", job=job_with(loader, expected_steps=10**6)) as outcome:
        row = outcome.rows["workers"]
    assert row.status == "rejected"
    assert "the disk is gone" in row.why  # the user's own error


def test_a_dataset_that_only_workers_can_read_keeps_its_workers():
    class OnlyInWorkers(SlowSamples):
        def __getitem__(self, i):
            assert get_worker_info() is not None
            return super().__getitem__(i)

    run = run_with(DataLoader(OnlyInWorkers(), 16, num_workers=1))
    row = run.report.row("workers")
    assert row.status == "not applicable"
    assert "sample-fails-here" in reasons(row)
    assert len(list(run.loader)) == 4


# -- kept ----------------------------------------------------------------------------------------------------


def test_a_gain_is_kept_and_the_row_has_the_tuners_numbers():
    loader = DataLoader(Numbers(), 4)
    with (
        tuned_workers(2),
        given_timings(6.0, 1.0, STARVED),
        decided("workers", job=job_with(loader, expected_steps=10**6)) as outcome,
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
        decided("workers", job=job_with(loader, expected_steps=10**6)) as outcome,
    ):
        row = outcome.rows["workers"]
        assert outcome.loader.num_workers <= 2
    assert row.status == "kept"
    assert "more-workers-than-supported" in reasons(row)


@pytest.mark.parametrize(("new", "workers"), [(1.2, 8), (1.0, 4)])
def test_fewer_workers_must_not_be_slower_and_must_gain_without_oversubscription(new, workers):
    loader = DataLoader(Numbers(), 4, num_workers=workers)
    with (
        usable_cores(4),
        tuned_workers(2),
        given_timings(1.0, new, Pace(10.0, 5.0, 100.0)),
        decided("workers", job=job_with(loader, expected_steps=10**6)) as outcome,
    ):
        row = outcome.rows["workers"]
        assert row.status == "rejected"
        assert row.trials
        assert outcome.loader is loader


def test_nothing_is_tried_if_little_can_be_saved():
    for pace, steps, why in ((FED, 10**6, "loading-negligible"), (STARVED, 10, "setup-not-worth-it")):
        loader = DataLoader(Numbers(), 4)
        with given_timings(1.0, 1.0, pace), decided("workers", job=job_with(loader, expected_steps=steps)) as outcome:
            row = outcome.rows["workers"]
        assert (row.status, row.trials) == ("not tried", ())
        assert why in reasons(row)


# -- forced --------------------------------------------------------------------------------------------------


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
    made = forced("workers", value, job_with(DataLoader(Numbers(), 16))).make()
    assert {name: getattr(made, name) for name in decision if name != "multiprocessing_context"} == {
        name: setting for name, setting in decision.items() if name != "multiprocessing_context"
    }


@pytest.mark.parametrize(
    "value", [-1, True, 1.5, "2", {}, {"num_workers": True}, {"num_workers": 1, "batch_size": 3}], ids=repr
)
def test_unknown_values_are_refused(value):
    with pytest.raises(ValueError, match=r"techniques\['workers'\].*" + re.escape(repr(value))):
        run_with(DataLoader(SlowSamples(), 16), techniques={"workers": value})


def test_values_that_the_dataloader_refuses_are_refused():
    value = {"num_workers": 1, "multiprocessing_context": "x"}
    with pytest.raises(ValueError, match=r"techniques\['workers'\].*" + re.escape(repr(value))):
        run_with(DataLoader(SlowSamples(), 16), techniques={"workers": value})


def test_the_users_other_settings_stay():
    loader = DataLoader(Numbers(), 16, num_workers=1, prefetch_factor=5, persistent_workers=True)
    assert forced("workers", 2, job_with(loader)).value == {
        "num_workers": 2,
        "prefetch_factor": 5,
        "persistent_workers": True,
    }


# -- not applicable ------------------------------------------------------------------------------------------


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
    "sampler": (lambda: DataLoader(Numbers(), batch_size=8, sampler=Shuffled(64)), "cannot-be-restored"),
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


def test_the_row_of_prefetch_on_a_cpu_refers_to_workers():
    row = run_with(DataLoader(SlowSamples(), 16)).report.row("prefetch")
    assert row.status == "not applicable"
    assert "see-workers" in reasons(row)


def test_a_worker_init_fn_may_depend_on_the_number_of_workers():
    loader = DataLoader(torch.arange(8.0), 2, num_workers=1, worker_init_fn=print)
    with pytest.raises(ValueError, match="worker_init_fn"):
        tune(loader, 0.01)
    assert "worker-init-fn" in refusal("workers", job_with(loader))
