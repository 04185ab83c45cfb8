"""Row 2: what the tuner finds is tried on real steps, kept, planned and explained."""

import time

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import flatout
from flatout.data import tune
from flatout.data.tuning import Tuned
from flatout.job import Job
from flatout.measure.bench import Bench
from flatout.measure.track import Track
from flatout.plan import Plan
from flatout.report.model import Pace
from flatout.techniques import NotApplicable, NothingBetter
from flatout.techniques.workers import Workers
from tests.jobs import Net, SlowSamples

pytestmark = [
    pytest.mark.usefixtures("short_trials"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

ALONE = {"compile": False, "precision": False, "in_memory": False, "fused_optimizer": False}
STARVED = Pace(step_ms=10.0, load_ms=50.0, samples_per_second=100.0)
FED = Pace(step_ms=10.0, load_ms=0.01, samples_per_second=100.0)


class Waiting(Dataset):
    """A sample waits as for a disk."""

    def __init__(self, seconds=0.0125, size=64):
        self.seconds, self.size = seconds, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.full((8,), float(i)), i % 3


def job(loader, device="cpu"):
    return Job(Net(), loader, loader, None, functional.cross_entropy, None, torch.device(device))


def run_with(loader, **options):
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    options = {"techniques": ALONE, "expected_steps": 10**6, "budget": 60} | options
    return flatout.optimize(model, loader, opt, functional.cross_entropy, **options)


def row_of(run):
    return next(row for row in run.report.rows if row.technique == "workers")


@pytest.fixture
def timed(monkeypatch):
    """Trials with given results: seconds without and with a candidate, and the pace that is measured before."""

    def given(old, new, pace):
        monkeypatch.setattr(Track, "pace", pace)
        monkeypatch.setattr(Bench, "alternate", lambda self, a, b, **switches: ([old] * 10, [new] * 10))

    return given


@pytest.fixture
def found(monkeypatch):
    """Results of the tuner, which measures nothing."""

    def given(workers, busy=0.0):
        def tuned(loader, step_time):
            return Tuned(
                loader=loader,
                workers=workers,
                prefetch_factor=2,
                persistent=False,
                start_method=None,
                start_seconds=0.1,
                step_time=step_time,
                stall=None,
                busy=busy,
                tries=(),
                reason=f"{workers} workers load as a step needs",
            )

        monkeypatch.setattr("flatout.techniques.workers.tune", tuned)

    return given


def cores(monkeypatch, n):
    for module in ("flatout.data.tuning", "flatout.techniques.workers"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: n)


# -- what there is to try ------------------------------------------------------------------------------------


def test_the_tuner_says_what_to_try(found):
    found(workers=6)
    (only,) = Workers().candidates(job(DataLoader(Waiting(), 4)), STARVED)  # loading keeps no core busy
    assert only.value == {"num_workers": 6, "prefetch_factor": 2, "persistent_workers": False}
    assert only.reason == "6 workers load as a step needs"
    made = only.make()
    assert {name: getattr(made, name) for name in only.value} == only.value


class Working(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return torch.zeros(8), 0


@pytest.mark.parametrize(("workers", "numbers"), [(4, [4, 2, 1]), (2, [2, 1]), (1, [1])])
def test_fewer_are_tried_where_the_step_computes_on_the_same_cores(found, workers, numbers):
    found(workers, busy=1.0)
    loader = DataLoader(Waiting(), 4)
    assert [source.value["num_workers"] for source in Workers().candidates(job(loader), STARVED)] == numbers
    assert len(Workers().candidates(job(loader, "cuda"), STARVED)) == 1


def test_none_is_tried_where_the_user_has_some(found):
    found(workers=1)
    sources = Workers().candidates(job(DataLoader(SlowSamples(), 4, num_workers=1)), STARVED)
    assert [source.value for source in sources] == [{"num_workers": 0}]


def test_nothing_is_tried_where_the_user_has_what_the_tuner_finds(found):
    found(workers=0)
    with pytest.raises(NothingBetter, match="0 workers load as a step needs"):
        Workers().candidates(job(DataLoader(SlowSamples(), 4)), STARVED)


def test_a_loader_that_is_right_is_left_alone_and_the_row_says_why(monkeypatch, timed):
    with pytest.raises(NothingBetter, match="there is nothing to hide"):
        Workers().candidates(job(DataLoader(SlowSamples(), 4)), Pace(1e4, 200.0, 1.0))
    timed(1.0, 1.0, Pace(1e4, 200.0, 1.0))
    row = row_of(run_with(DataLoader(SlowSamples(), 4)))
    assert (row.status, row.trials) == ("rejected", ())
    assert "there is nothing to hide" in row.why


def test_what_breaks_while_tuning_is_a_reason_to_do_without(monkeypatch, timed):
    class Breaking(SlowSamples):
        broken = False

        def __getitem__(self, i):
            if self.broken:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    def breaking(loader, step_time):
        loader.dataset.broken = True
        return tune(loader, step_time)

    timed(1.0, 1.0, STARVED)
    monkeypatch.setattr("flatout.techniques.workers.tune", breaking)
    row = row_of(run_with(DataLoader(Breaking(), 4)))
    assert row.status == "rejected"
    assert "the disk is gone" in row.why


def test_a_dataset_for_workers_only_is_left_to_them():
    class OnlyInWorkers(SlowSamples):
        def __getitem__(self, i):
            assert torch.utils.data.get_worker_info() is not None
            return super().__getitem__(i)

    run = run_with(DataLoader(OnlyInWorkers(), 16, num_workers=1), budget=0)
    assert row_of(run).status == "not applicable"
    assert len(list(run.loader)) == 4


# -- what is kept --------------------------------------------------------------------------------------------


def test_what_pays_is_kept_and_the_why_has_the_tuners_numbers(found, timed):
    found(workers=2)
    timed(6.0, 1.0, STARVED)
    run = run_with(DataLoader(Waiting(), 4))
    row = row_of(run)
    assert (row.status, row.gain.ratio) == ("kept", 6.0)
    assert row.chosen.startswith("2 workers, 2 ahead")
    assert run.plan.decisions["workers"]["num_workers"] == 2
    assert "batches are made while the step runs, by as many worker processes as pay; " in row.why
    assert "2 workers load as a step needs" in row.why
    assert sorted(x for b, _ in run.loader for x in b[:, 0].tolist()) == list(range(64))


def test_a_plan_makes_the_same_loader(found, timed, tmp_path):
    found(workers=2)
    timed(6.0, 1.0, STARVED)
    run = run_with(DataLoader(Waiting(), 4))
    run.plan.save(tmp_path / "plan.json")
    again = run_with(DataLoader(Waiting(), 4), techniques=None, plan=tmp_path / "plan.json")
    assert again.plan == run.plan == Plan.load(tmp_path / "plan.json")
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(again._job.source, name) == getattr(run._job.source, name)


@pytest.mark.slow
def test_oversubscription_is_lowered_where_it_makes_nothing_slower_and_the_row_says_why(monkeypatch, timed):
    cores(monkeypatch, 2)
    timed(1.0, 1.0, FED)
    run = run_with(DataLoader(Working(), 4, num_workers=8))
    row = row_of(run)
    assert row.status == "kept"
    assert run._job.source.num_workers <= 2
    assert "8 workers are more than this machine can serve: each keeps" in row.why
    assert "of a core busy, and there are 2" in row.why
    assert "8 workers are more than this machine can serve" in " ".join(str(run.report).split())


@pytest.mark.slow
@pytest.mark.parametrize(("new", "workers"), [(1.2, 8), (1.0, 4)])
def test_what_is_slower_is_not_lowered_and_what_is_not_oversubscribed_has_to_gain(
    monkeypatch, found, timed, new, workers
):
    cores(monkeypatch, 4)
    found(workers=2)
    timed(1.0, new, Pace(10.0, 5.0, 100.0))
    loader = DataLoader(Waiting(0.001), 4, num_workers=workers)
    run = run_with(loader)
    row = row_of(run)
    assert row.status == "rejected"
    assert row.trials
    assert run._job.source is loader


def test_little_to_save_is_not_tried(timed):
    timed(1.0, 1.0, FED)
    assert "loading a batch takes 0.01 ms beside a step of 10.0 ms" in row_of(run_with(DataLoader(Waiting(), 4))).why
    timed(1.0, 1.0, STARVED)
    row = row_of(run_with(DataLoader(Waiting(), 4), expected_steps=10))
    assert row.status == "not tried"
    assert "could save 0 s at the very most" in row.why


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
    run = run_with(DataLoader(SlowSamples(), 16), techniques=ALONE | {"workers": value}, budget=0)
    assert run.plan.decisions == {"workers": decision}
    run.plan.save(tmp_path / "plan.json")
    again = run_with(DataLoader(SlowSamples(), 16), techniques=None, plan=tmp_path / "plan.json")
    assert again.plan == run.plan
    assert again._job.source.num_workers == decision["num_workers"]
    assert len(list(again.loader)) == 4


@pytest.mark.parametrize(
    "value", [-1, True, 1.5, "2", {}, {"num_workers": True}, {"num_workers": 1, "batch_size": 3}], ids=repr
)
def test_what_is_no_setting_of_workers_is_refused(value):
    with pytest.raises(ValueError, match=r"techniques\['workers'\] must be a number of workers"):
        run_with(DataLoader(SlowSamples(), 16), techniques={"workers": value})


def test_what_the_dataloader_refuses_is_refused():
    with pytest.raises(ValueError, match=r"techniques\['workers'\] cannot be"):
        run_with(
            DataLoader(SlowSamples(), 16), techniques={"workers": {"num_workers": 1, "multiprocessing_context": "x"}}
        )


def test_the_users_other_settings_stay():
    loader = DataLoader(SlowSamples(), 16, num_workers=1, prefetch_factor=5, persistent_workers=True)
    assert Workers().forced(job(loader), 2).value == {
        "num_workers": 2,
        "prefetch_factor": 5,
        "persistent_workers": True,
    }


# -- what is left alone --------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Each sample is seen once, whatever is iterated how often."""

    def __init__(self, n):
        self.left = iter(range(n))

    def __iter__(self):
        for i in self.left:
            yield torch.full((8,), float(i)), i % 3


class Subclassed(DataLoader):
    """What libraries make of a DataLoader: not known to be rewindable."""


class Shuffled(Sampler):
    """A sampler with a position of its own: each index is named once."""

    def __init__(self, n):
        self.left = iter(torch.randperm(n).tolist())

    def __iter__(self):
        return self.left

    def __len__(self):
        return 64


def test_a_stream_loses_no_sample():
    run = run_with(DataLoader(Stream(64), batch_size=8), techniques=ALONE)
    assert [value for x, _ in run.loader for value in x[:, 0].tolist()] == [float(i) for i in range(64)]
    assert row_of(run).status == "not applicable"
    assert "IterableDataset" in row_of(run).why


def test_a_source_that_is_not_known_to_rewind_loses_no_sample():
    for loader, why in (
        (Subclassed(Waiting(0.001), batch_size=8, shuffle=True), "not exactly a DataLoader"),
        (DataLoader(Waiting(0.001), batch_size=8, sampler=Shuffled(64)), "cannot be rewound"),
    ):
        run = run_with(loader, techniques=ALONE)
        assert sorted(value for x, _ in run.loader for value in x[:, 0].tolist()) == [float(i) for i in range(64)]
        row = row_of(run)
        assert row.status in ("not tried", "not applicable")
        assert why in row.why


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(64), batch_size=8),
        lambda: Subclassed(Waiting(0.001), batch_size=8, shuffle=True),
        lambda: DataLoader(Waiting(0.001), batch_size=8, sampler=Shuffled(64)),
    ],
    ids=["stream", "subclass", "sampler"],
)
def test_workers_that_such_a_source_cannot_have_are_refused_before_it_is_read(make):
    loader = make()
    with pytest.raises(ValueError, match=r"techniques\['workers'\]"):
        run_with(loader, techniques=ALONE | {"workers": 2})
    assert sorted(value for x, _ in loader for value in x[:, 0].tolist()) == [float(i) for i in range(64)]


def test_prefetch_on_a_cpu_points_to_the_workers():
    run = run_with(DataLoader(SlowSamples(), 16), budget=0)
    row = next(row for row in run.report.rows if row.technique == "prefetch")
    assert row.status == "not applicable"
    assert "row 2" in row.why


def test_a_worker_init_fn_may_depend_on_the_number_of_workers():
    loader = DataLoader(torch.arange(8.0), 2, num_workers=1, worker_init_fn=print)
    with pytest.raises(ValueError, match="worker_init_fn"):
        tune(loader, 0.01)
    job = Job(Net(), loader, loader, None, None, None, torch.device("cpu"))
    with pytest.raises(NotApplicable, match="worker_init_fn"):
        Workers().check(job)
