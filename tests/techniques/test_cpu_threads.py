"""Number of CPU threads: trials, kept values and reverts."""

import pytest
import torch
from torch.nn import functional

import flatout
from tests.clock import TimedStep
from tests.helpers import trained_state
from tests.jobs import NO_TECHNIQUES, job_of, make_job
from tests.reasons import reasons
from tests.techniques.harness import candidates, decided, forced, refusal, usable_cores


def optimized(threads, **more):
    model, loader, opt = make_job()
    techniques = NO_TECHNIQUES | {"cpu_threads": threads}
    return flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=techniques, budget=0, device="cpu", **more
    )


def small_job(loss_fn=functional.cross_entropy, **settings):
    model, loader, opt = make_job()
    return job_of(model, list(loader), optimizer=opt, loss_fn=loss_fn, **settings)


def test_the_number_is_set_and_reverted():
    before = torch.get_num_threads()
    run = optimized(1)
    assert torch.get_num_threads() == 1
    assert run.plan.decisions["cpu_threads"] == 1
    run.undo()
    assert torch.get_num_threads() == before


def test_a_plan_brings_the_number():
    plan = optimized(1).plan
    torch.set_num_threads(2)
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, plan=plan, budget=0, device="cpu")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", 100_000])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=rf"techniques\['cpu_threads'\].*{value!r}"):
        optimized(value)


@pytest.mark.parametrize(
    ("cores", "threads", "tried"),
    [(1, 4, [1]), (2, 2, [1]), (2, 1, [2]), (8, 8, [4, 1]), (8, 64, [8, 4, 1]), (3, 3, [1])],
)
def test_all_cores_half_of_them_and_one_are_tried(cores, threads, tried, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with usable_cores(cores):
        found = candidates("cpu_threads", small_job())
    assert [candidate.value for candidate in found] == tried
    assert [candidate.label for candidate in found] == [f"{n} thread{'s' if n > 1 else ''}" for n in tried]


def test_one_core_has_nothing_to_try():
    torch.set_num_threads(1)
    with usable_cores(1):
        assert "one-core" in refusal("cpu_threads", small_job())


def test_a_gpu_leaves_the_threads_alone():
    assert "on-gpu" in refusal("cpu_threads", small_job(device="cuda"))


def test_trials_leave_the_number_and_the_training_as_they_were(clock):
    with usable_cores(4):
        model, loader, opt = make_job()
        job = job_of(model, list(loader), optimizer=opt, loss_fn=TimedStep(clock, 0.01))
        before, threads = trained_state(model, opt), torch.get_num_threads()
        with decided("cpu_threads", job=job) as outcome:
            pass
        row = outcome.rows["cpu_threads"]
        assert row.status == "rejected"
        assert "not-faster" in reasons(row)
        assert row.trials
        assert all(trial.loss_difference is not None for trial in row.trials)
        assert torch.get_num_threads() == threads
        assert trained_state(model, opt) == before


def test_fewer_threads_that_are_faster_are_kept(clock):
    torch.set_num_threads(2)
    with usable_cores(2):

        def loss_fn(output, target):
            clock.advance(0.01 * torch.get_num_threads())
            return functional.cross_entropy(output, target)

        with decided("cpu_threads", job=small_job(loss_fn)) as outcome:
            assert torch.get_num_threads() == 1
    row = outcome.rows["cpu_threads"]
    assert (row.status, row.chosen) == ("kept", "1 thread")
    assert row.gain.ratio == pytest.approx(2, rel=0.1)
    assert outcome.values == {"cpu_threads": 1}
    assert torch.get_num_threads() == 2


def test_timing_decides_nothing_where_bits_matter():
    with decided("cpu_threads", job=small_job(deterministic=True)) as outcome:
        row = outcome.rows["cpu_threads"]
    assert (row.status, row.trials) == ("not tried", ())
    assert "deterministic" in reasons(row)


def test_the_number_is_reverted_after_each_nested_use():
    torch.set_num_threads(2)
    candidate = forced("cpu_threads", 1, small_job())
    for _ in range(3):
        with candidate:
            with candidate:
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
