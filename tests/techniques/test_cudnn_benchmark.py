"""cuDNN's benchmark flag, and the watch that disables it when shapes vary."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.backends import cudnn
from torch.nn import functional

import flatout
from flatout.techniques.cudnn_benchmark import MOST_NEW, WITHIN, ShapeWatch
from tests.jobs import job_of
from tests.techniques.harness import candidates, count_work, cudnn_benchmark_without_a_gpu, forced, refusal


@pytest.fixture
def applies():
    """Make the technique apply, because the flag can be set without a GPU."""
    with cudnn_benchmark_without_a_gpu():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.conv(x).mean(2))


def batch(length, n=4):
    return torch.randn(n, 1, length), torch.randint(0, 2, (n,))


def on_gpu(model, batches=(), **settings):
    return job_of(model, batches, device="cuda", **settings)


def the_candidate():
    return forced("cudnn_benchmark", True, on_gpu(Net()))


# -- the watch -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), max_size=400))
def test_shapes_vary_when_many_new_ones_come_close_together(lengths):
    watch = ShapeWatch()
    told = [watch.varies(torch.empty(length)) for length in lengths]
    firsts = [i for i, length in enumerate(lengths) if length not in lengths[:i]]
    assert [i for i, varies in enumerate(told) if varies] == [
        i for k, i in enumerate(firsts) if k >= MOST_NEW - 1 and i - firsts[k - MOST_NEW + 1] < WITHIN
    ]


def test_shapes_that_come_back_and_shapes_that_come_rarely_do_not_vary():
    watch = ShapeWatch()
    assert not any(watch.varies(torch.empty(1 + i % (MOST_NEW - 1))) for i in range(1000))
    watch = ShapeWatch()
    assert not any(watch.varies(torch.empty(i // (WITHIN // (MOST_NEW - 1) + 1))) for i in range(1000))


@pytest.mark.parametrize(("gap", "varies"), [(WITHIN - 1, True), (WITHIN, False)])
def test_the_first_of_the_new_shapes_must_be_among_the_latest_batches(gap, varies):
    watch = ShapeWatch()
    firsts = [0, *range(1, MOST_NEW - 1), gap]
    told = [watch.varies(torch.empty(firsts.index(i) if i in firsts else 0)) for i in range(gap + 1)]
    assert told == [False] * gap + [varies]


# -- the candidate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(False, False), (False, True), (True, False), (True, True)])
def test_off_is_exactly_as_before(before):
    cudnn.benchmark, cudnn.deterministic = before
    candidate = the_candidate()
    for _ in range(2):
        with candidate:
            assert (cudnn.benchmark, cudnn.deterministic) == (True, True)
        assert (cudnn.benchmark, cudnn.deterministic) == before


def test_algorithms_that_were_found_are_used_on_when_the_search_is_off():
    candidate = the_candidate()
    with candidate:
        for i in range(MOST_NEW - 1):
            candidate.on_batch(batch(4 + i))
        assert cudnn.benchmark
        with pytest.warns(RuntimeWarning, match=r"cudnn\.benchmark"):
            candidate.on_batch(batch(100))
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)  # found under deterministic's key
    assert (cudnn.benchmark, cudnn.deterministic) == (False, False)
    with candidate:  # like a failed second optimize()
        assert not cudnn.benchmark


def test_a_candidate_that_is_off_watches_nothing():
    candidate = the_candidate()
    cudnn.benchmark = True
    for i in range(2 * MOST_NEW):
        candidate.on_batch(batch(4 + i))
    assert cudnn.benchmark


# -- in training ---------------------------------------------------------------------------------------------


def tuned(batches, own_loop):
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    given = () if own_loop else (opt, functional.cross_entropy)
    run = flatout.optimize(model, batches, *given, techniques={"cudnn_benchmark": True}, budget=0)

    def epoch():
        for x, y in run.loader:
            if own_loop:
                opt.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                opt.step()
            else:
                run.step((x, y))

    return run, epoch


@pytest.mark.usefixtures("applies")
@pytest.mark.parametrize("own_loop", [False, True])
def test_varying_shapes_turn_it_off_with_one_warning(own_loop):
    """pytorch #2759: cuDNN benchmarks each new input size, which slows training down."""
    run, epoch = tuned([batch(16) if i < 4 else batch(8 + i) for i in range(40)], own_loop)
    assert run.report.row("cudnn_benchmark").status == "kept"
    assert cudnn.benchmark
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epoch()
        epoch()
    told = [w for w in caught if "torch.backends.cudnn.benchmark" in str(w.message)]
    assert [w.category for w in told] == [RuntimeWarning]
    assert not cudnn.benchmark
    run.undo()
    assert (cudnn.benchmark, cudnn.deterministic) == (False, False)


@pytest.mark.usefixtures("applies")
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_smaller_last_batch_and_buckets_leave_it_on(own_loop):
    run, epoch = tuned([*(batch(8 * (1 + i % 5)) for i in range(20)), batch(8, n=3)], own_loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            epoch()
    assert cudnn.benchmark
    run.undo()
    assert not cudnn.benchmark


@pytest.mark.usefixtures("applies")
def test_a_loader_that_outlives_undo_changes_nothing():
    run, _ = tuned([batch(8 + i) for i in range(40)], own_loop=True)
    loader = run.loader
    run.undo()
    cudnn.benchmark = True  # the user's decision
    assert len(list(loader)) == 40
    assert cudnn.benchmark


@pytest.mark.usefixtures("applies")
def test_the_watch_costs_no_batch():
    batches = [batch(16) for _ in range(6)]
    run, _ = tuned(batches, own_loop=True)
    for (x, y), (x0, y0) in zip(run.loader, batches, strict=True):
        assert x is x0
        assert y is y0
    run.undo()


# -- applicability -------------------------------------------------------------------------------------------

FIXED, VARYING = [batch(16)] * 4, [batch(16), batch(20)]


@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose1d(1, 1, 1),
     nn.ConvTranspose2d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_every_convolution_counts(layer):
    tried = candidates("cudnn_benchmark", on_gpu(nn.Sequential(layer), FIXED))
    assert [candidate.value for candidate in tried] == [True]


def test_convolutions_without_a_module_count():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 1, 3))

        def forward(self, x):
            return functional.conv1d(x, self.weight).mean(2)

    job = on_gpu(Functional(), loss_fn=functional.cross_entropy)
    assert "no-convolutions" in refusal("cudnn_benchmark", job)
    count_work(job, batch(16))
    assert refusal("cudnn_benchmark", job) is None


def test_rows_say_why_it_does_not_apply():
    assert "no-convolutions" in refusal("cudnn_benchmark", on_gpu(nn.LSTM(2, 2)))
    assert "shapes-vary" in refusal("cudnn_benchmark", on_gpu(Net(), VARYING))
    assert "on-cpu" in refusal("cudnn_benchmark", job_of(Net()))
    assert "deterministic" in refusal("cudnn_benchmark", on_gpu(Net(), deterministic=True))
    cudnn.deterministic = True
    assert "cudnn-deterministic" in refusal("cudnn_benchmark", on_gpu(Net(), FIXED))
    cudnn.enabled = False
    assert "cudnn-disabled" in refusal("cudnn_benchmark", on_gpu(Net(), FIXED))


def test_a_flag_that_the_user_has_set_stays_his():
    cudnn.benchmark = True
    fixed, varying = (refusal("cudnn_benchmark", on_gpu(Net(), batches)) for batches in (FIXED, VARYING))
    assert "already-on" in fixed
    assert "shapes-vary" not in fixed
    assert {"already-on", "shapes-vary"} <= varying
    assert cudnn.benchmark


def test_it_can_be_forced_where_shapes_vary_and_only_by_true():
    assert forced("cudnn_benchmark", True, on_gpu(Net(), VARYING)).value is True
    with pytest.raises(ValueError, match=r"cudnn_benchmark.*'on'"):
        forced("cudnn_benchmark", "on", on_gpu(Net()))
