"""Resume of stopped training, bit-identical to uninterrupted training, in a new process."""

import collections
import copy
import multiprocessing
import os
import re
import signal
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flatout
from flatout.core.reproducible import seed_all
from flatout.training.checkpoint import Folder, newest_in, read, write
from tests.training.checkpoint.test_file import equal
from tests.training.checkpoint.training import EPOCHS, KINDS, Stopped, before_step, make, stop, train

STEPS = 18


@pytest.fixture(scope="module")
def uninterrupted():
    found = {}

    def of(kind):
        if kind not in found:
            run, history = train(kind)
            found[kind] = run.state_dict(), history
        return found[kind]

    return of


def assert_same(run, history, expected):
    state, expected_history = expected
    assert history == expected_history
    assert run.steps == STEPS
    here = run.state_dict()
    assert equal(here["job"], state["job"])
    assert here["scheduler"] == state["scheduler"]
    assert equal(here["random"], state["random"])


@pytest.mark.parametrize("stop_before", [1, 3, 5, 6, 8, 13, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit(kind, stop_before, tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        train(kind, tmp_path, stop_before=stop_before, checkpoint_every=1, asynchronous=stop_before % 2 == 0)
    assert_same(*train(kind, tmp_path, checkpoint_every=1), uninterrupted(kind))


@pytest.mark.parametrize("stop_before", [8, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit_between_epochs(kind, stop_before, tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        train(kind, tmp_path, stop_before=stop_before)
    assert newest_in(tmp_path)["steps"] == 6 * (stop_before // 6)
    assert_same(*train(kind, tmp_path), uninterrupted(kind))


@pytest.mark.parametrize("kind", ["plain", "accumulating"])
def test_steps_since_the_last_checkpoint_are_trained_again(kind, tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        train(kind, tmp_path, stop_before=11, checkpoint_every=4)
    assert newest_in(tmp_path)["steps"] == 8
    assert_same(*train(kind, tmp_path, checkpoint_every=4), uninterrupted(kind))


def test_it_may_be_stopped_again_and_again(tmp_path, uninterrupted):
    for stop_before in (2, 3, 7, 12, 16):
        with pytest.raises(Stopped):
            train("accumulating", tmp_path, stop_before=stop_before, checkpoint_every=1)
    assert_same(*train("accumulating", tmp_path, checkpoint_every=1), uninterrupted("accumulating"))


def test_a_corrupt_checkpoint_costs_the_steps_since_the_previous_one(tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        train("plain", tmp_path, stop_before=9, checkpoint_every=2)
    newest = Folder(tmp_path, 3).path_of(8)
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(RuntimeWarning, match=r"step-0000000008\.pt.*step-0000000006\.pt"):
        run, history = train("plain", tmp_path, checkpoint_every=2)
    assert_same(run, history, uninterrupted("plain"))


def test_a_finished_training_is_not_trained_again(tmp_path, uninterrupted):
    train("plain", tmp_path)
    run, history = train("plain", tmp_path)
    assert_same(run, history, uninterrupted("plain"))
    assert run.stats.total.steps == 0


def test_more_epochs_resume_where_fewer_ended(tmp_path, uninterrupted):
    run = make()
    seed_all(5)
    run.fit(1, progress=False, checkpoint_dir=tmp_path)
    assert_same(*train("plain", tmp_path), uninterrupted("plain"))


def test_epochs_are_counted_from_zero_without_a_folder():
    run = make()
    assert len(run.fit(2, progress=False)) == 2
    assert len(run.fit(1, progress=False)) == 1
    assert run.steps == STEPS


def test_an_interrupted_fit_does_not_count_in_the_next():
    run = make()
    before_step(run, 2, stop)
    with pytest.raises(Stopped):
        run.fit(1, progress=False)
    (row,) = run.fit(1, progress=False)
    assert run.steps == 2 + 6
    assert 0 < row["loss"] < 5


def test_the_checkpoint_goes_before_what_the_run_has_done(tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        train("plain", tmp_path, stop_before=8, checkpoint_every=4)
    run = make()
    for batch in run.loader:  # for example a profile
        run.step(batch)
    with pytest.warns(UserWarning, match=r"\b6\b.*\b8\b"):
        history = run.fit(EPOCHS, progress=False, checkpoint_dir=tmp_path, checkpoint_every=4)
    assert_same(run, history, uninterrupted("plain"))


def test_by_default_each_epoch_ends_with_a_checkpoint_and_three_are_kept(tmp_path):
    make().fit(5, progress=False, checkpoint_dir=tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:010d}.pt" for step in (18, 24, 30)]


def test_evaluation_of_an_epoch_is_not_lost(tmp_path):
    run = make()
    batches = [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))]
    whole = run.fit(2, batches, progress=False, checkpoint_dir=tmp_path)
    again = make().fit(2, batches, progress=False, checkpoint_dir=tmp_path)
    assert again == whole
    assert all("eval_loss" in row for row in again)


# -- save and load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_and_load_in_the_users_own_loop(asynchronous, tmp_path):
    run = make("accumulating")
    batches = iter(run.loader)
    for _ in range(3):
        run.step(next(batches))
    run.save(tmp_path / "a.pt", asynchronous=asynchronous)
    expected = [run.step(batch) for batch in batches]
    run.flush_saves()
    other = make("accumulating")
    seed_all(99)
    other.load(tmp_path / "a.pt")
    assert other.steps == 3
    assert equal([other.step(batch) for batch in other.loader], expected)
    assert equal(other.state_dict()["job"], run.state_dict()["job"])


WRONG = {
    "another version": lambda good: good | {"version": 0},
    "another model": lambda good: good | {"job": good["job"] | {"modules": [{"weight": torch.ones(2)}]}},
    "another optimizer": lambda good: good | {"job": good["job"] | {"optimizer": {"state": {}, "param_groups": []}}},
    "no scheduler": lambda good: good | {"scheduler": None},
    "another loader": lambda good: good | {"loader": {"version": 1}},
    "a loader of other parts": lambda good: good | {"loader": good["loader"] | {"loader": []}},
    "more pending than an update": lambda good: good | {"job": good["job"] | {"pending": 7}},
    "no plan": lambda good: {name: value for name, value in good.items() if name != "plan"},
    "no state at all": lambda good: {"weights": torch.ones(3)},
    "not even a dict": lambda good: [1, 2],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_file_changes_nothing(name, tmp_path):
    """A run that refused the file trains like its twin, which loaded no file."""
    run, twin = make(), make()
    paths = tmp_path / "run.pt", tmp_path / "twin.pt"
    for each, path in zip((run, twin), paths, strict=True):
        seed_all(3)
        for batch in each.loader:
            each.step(batch)
        each.step(batch)
        each.save(path)
    write(tmp_path / "wrong.pt", WRONG[name](read(paths[0])))
    with pytest.raises(ValueError, match=r"wrong\.pt"):
        run.load(tmp_path / "wrong.pt")
    run.save(paths[0])
    assert equal(read(paths[0]), read(paths[1]))
    losses = []
    for each in (run, twin):
        seed_all(4)
        losses.append([each.step(batch) for batch in each.loader])
    assert equal(*losses)


def test_a_state_is_unchanged_while_training_continues(tmp_path):
    run = make()
    for batch in run.loader:
        run.step(batch)
    kept = copy.deepcopy(run.state_dict())
    expected = copy.deepcopy(kept)
    for _ in range(2):
        run.load_state_dict(kept)
        run.step(batch)
        assert equal(kept["job"], expected["job"])
        assert equal(kept, expected)


def test_parameters_of_the_optimizer_outside_the_model_are_restored(tmp_path):
    def made():
        torch.manual_seed(0)
        model, heat = nn.Linear(6, 3), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.parameters(), heat], lr=0.1)
        batches = [(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)) for _ in range(3)]
        run = flatout.optimize(
            model, batches, optimizer, budget=0, accumulate=2,
            compute_loss=lambda model, batch: functional.cross_entropy(model(batch[0]) * heat, batch[1]),
        )  # fmt: skip
        return run, heat

    (run, heat), (other, other_heat) = made(), made()
    for batch in run.loader:
        run.step(batch)
    run.step(batch)
    run.save(tmp_path / "a.pt")
    other.load(tmp_path / "a.pt")
    assert heat.item() != 1
    assert torch.equal(heat, other_heat)
    run.step(batch), other.step(batch)
    assert torch.equal(heat, other_heat)


@pytest.mark.filterwarnings("ignore:.*memory:RuntimeWarning")
def test_what_memory_has_shown_is_known_to_the_next_process(tmp_path):
    def room_for_four(module, inputs):
        if len(inputs[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    batch = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)
    run, other = make_with([batch]), make_with([batch])
    run.model.register_forward_pre_hook(room_for_four)
    run.step(batch)
    run.save(tmp_path / "a.pt")
    assert other.micro_batch is None
    other.load(tmp_path / "a.pt")
    assert other.micro_batch == run.micro_batch == 4


@pytest.mark.filterwarnings("ignore:.*nan:RuntimeWarning")
def test_the_count_of_bad_steps_restarts_after_a_load(tmp_path):
    good, bad = ((torch.full((4, 6), x), torch.zeros(4, dtype=torch.long)) for x in (1.0, torch.nan))
    run = make_with([good])
    run.stop_after_bad = 3
    run.save(tmp_path / "a.pt")
    for batches in ((bad, bad), (bad, bad), (good,) * 4):  # two bad steps stay below the limit of three
        for batch in batches:
            run.step(batch)
        run.load(tmp_path / "a.pt")
    assert run.stop_after_bad == 3
    for _ in range(2):
        run.step(bad)
    with pytest.raises(FloatingPointError, match=r"\b3\b"):  # the watch reads these step numbers a second time
        run.step(bad)


def test_other_decisions_are_reported(tmp_path):
    run = make("plain")
    run.save(tmp_path / "a.pt")
    other = make("bf16")
    with pytest.warns(RuntimeWarning, match="precision.*bf16"):
        other.load(tmp_path / "a.pt")


def test_the_plan_comes_from_the_newest_checkpoint(tmp_path):
    assert flatout.Plan.from_checkpoints(tmp_path) is None
    run = make("fused")
    run.fit(1, progress=False, checkpoint_dir=tmp_path)
    assert flatout.Plan.from_checkpoints(tmp_path) == run.plan


@pytest.mark.parametrize("state", [[], {}, {"plan": None}, {"plan": []}, {"plan": {"decisions": {"a": [[]]}}}])
def test_a_newest_checkpoint_without_a_plan_is_refused_by_its_folder(tmp_path, state):
    write(tmp_path / "step-0000000001.pt", state)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        flatout.Plan.from_checkpoints(tmp_path)


@pytest.mark.parametrize("kind", ["bf16", "fused"])
def test_a_script_that_asks_for_techniques_is_started_as_often_as_it_takes(kind, tmp_path, uninterrupted):
    for stop_before in (3, 9):
        with pytest.raises(Stopped):
            train(kind, tmp_path, stop_before=stop_before, checkpoint_every=1, plan=True)
    run, history = train(kind, tmp_path, checkpoint_every=1, plan=True)
    assert_same(run, history, uninterrupted(kind))
    assert run.plan.decisions.items() >= KINDS[kind]["techniques"].items()


class Endless:
    """Loader without a position that a checkpoint could store."""

    def __iter__(self):
        for i in range(4):
            yield torch.full((4, 6), float(i)), torch.zeros(4, dtype=torch.long)


def make_with(loader):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return flatout.optimize(model, loader, optimizer, functional.cross_entropy, budget=0)


def test_a_loader_without_a_position_restarts_its_epoch_and_reports_it(tmp_path):
    run = make_with(Endless())
    before_step(run, 6, stop)
    with pytest.warns(UserWarning, match="epoch"), pytest.raises(Stopped):
        run.fit(2, progress=False, checkpoint_dir=tmp_path, checkpoint_every=1)
    other = make_with(Endless())
    with pytest.warns(UserWarning, match="epoch"):
        history = other.fit(2, progress=False, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert len(history) == 2
    assert other.steps == 6 + 4


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 7]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 20),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes(name, tmp_path):
    def made():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch's schedulers
            scheduler = SCHEDULERS[name](optimizer)
        batches = [(torch.randn(4, 6), torch.zeros(4, dtype=torch.long)) for _ in range(6)]
        return flatout.optimize(
            model, batches, optimizer, functional.cross_entropy, scheduler=scheduler, budget=0
        ), optimizer

    (run, optimizer), (other, other_optimizer) = made(), made()
    for _ in range(2):
        rates = []
        for batch in run.loader:
            run.step(batch)
            rates.append(optimizer.param_groups[0]["lr"])
        if not (tmp_path / "a.pt").exists():
            run.save(tmp_path / "a.pt")
    other.load(tmp_path / "a.pt")
    seen = []
    for batch in other.loader:
        other.step(batch)
        seen.append(other_optimizer.param_groups[0]["lr"])
    assert seen == rates


# -- signals -----------------------------------------------------------------------------------------------------


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible():
    """Restore Python's SIGINT handler, because a shell ignores SIGINT in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_sigterm_saves_and_ends(tmp_path, uninterrupted):
    run = make()
    seed_all(5)
    before_step(run, 7, terminate)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(run.steps))
    try:
        history = run.fit(EPOCHS, progress=False, checkpoint_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.steps == 8  # the step has finished
    assert len(history) == 1
    assert heard == [8]  # the previous handler is called after the save
    assert newest_in(tmp_path)["steps"] == 8
    assert_same(*train("plain", tmp_path), uninterrupted("plain"))


def test_sigterm_in_an_evaluation_saves_after_the_evaluation(tmp_path):
    batches = [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))]
    expected = make().fit(2, batches, progress=False)
    run = make()
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(len(run.fitted.history)))

    class Evaluated:
        def __iter__(self):
            if not heard and run.steps == 6:
                terminate()
            return iter(batches)

    try:
        assert len(run.fit(2, Evaluated(), progress=False, checkpoint_dir=tmp_path)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]
    assert make().fit(2, batches, progress=False, checkpoint_dir=tmp_path) == expected


def test_sigterm_at_an_epochs_end_is_saved_before_its_evaluation(tmp_path):
    batches = [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))]
    expected = make().fit(2, batches, progress=False)
    run = make()
    before_step(run, 5, terminate)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert run.fit(2, batches, progress=False, checkpoint_dir=tmp_path) == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert make().fit(2, batches, progress=False, checkpoint_dir=tmp_path) == expected


def test_an_ignored_sigterm_stays_ignored(tmp_path):
    run = make()
    before_step(run, 3, terminate)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert len(run.fit(1, progress=False, checkpoint_dir=tmp_path)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_handled(tmp_path):
    run, histories = make(), []
    thread = threading.Thread(target=lambda: histories.append(run.fit(1, progress=False, checkpoint_dir=tmp_path)))
    thread.start()
    thread.join(60)
    assert len(histories[0]) == 1


def test_the_handler_of_sigterm_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    make().fit(1, progress=False, checkpoint_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Stopped):
        train("plain", tmp_path / "b", stop_before=3)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["plain", "accumulating", "fused"])
def test_an_interrupt_is_raised_after_the_save(kind, tmp_path, uninterrupted, capsys):
    run = make(kind)
    seed_all(5)
    before_step(run, 7, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.fit(EPOCHS, progress=False, checkpoint_dir=tmp_path)
    assert run.steps == 8  # the step has finished
    assert newest_in(tmp_path)["steps"] == 8
    assert capsys.readouterr().err.count("\n") == 1  # the save prints a message
    assert_same(*train(kind, tmp_path), uninterrupted(kind))


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_is_raised_at_once_and_saves_nothing(tmp_path, uninterrupted):
    run = make()
    seed_all(5)
    before_step(run, 7, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        run.fit(EPOCHS, progress=False, checkpoint_dir=tmp_path)
    assert run.steps == 7
    assert newest_in(tmp_path)["steps"] == 6
    assert_same(*train("plain", tmp_path), uninterrupted("plain"))


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_may_come_while_it_is_saved(tmp_path):
    run = make()
    before_step(run, 2, interrupt)
    flush = run.flush_saves

    def interrupted():
        interrupt()
        flush()

    run.flush_saves = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.fit(EPOCHS, progress=False, checkpoint_dir=tmp_path)
    flush()
    assert newest_in(tmp_path)["steps"] == 3


def test_the_users_handler_is_called_after_the_save_and_at_once_for_a_second_interrupt(tmp_path):
    run = make()
    heard = []
    before_step(run, 2, interrupt)
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(len(os.listdir(tmp_path))))
    try:
        assert run.fit(1, progress=False, checkpoint_dir=tmp_path) == []
        assert heard == [1]
        before_step(run, 3, lambda: (interrupt(), interrupt()))
        assert run.fit(1, progress=False, checkpoint_dir=tmp_path) == []
        assert heard == [1, 1]
        assert run.steps == 4
        assert newest_in(tmp_path)["steps"] == 4
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_both_signals_are_obeyed(tmp_path):
    run = make()
    heard = []
    before_step(run, 2, lambda: (interrupt(), terminate()))
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(run.steps))
    try:
        with pytest.raises(KeyboardInterrupt):
            run.fit(1, progress=False, checkpoint_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [3]


class InterruptedInWorker(torch.utils.data.Dataset):
    """Dataset that interrupts the main process and its worker at sample 20, as Ctrl-C in a terminal does."""

    def __init__(self, is_waited_for):
        self.main, self.is_waited_for = os.getpid(), is_waited_for

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20:
            assert self.is_waited_for.wait(60)
            for process in (self.main, os.getpid()):
                os.kill(process, signal.SIGINT)
        return torch.full((6,), float(index)), index % 3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_interrupt_of_the_workers_costs_no_step(method, tmp_path):
    """Forked workers continue. Other workers end, and the missing batch does not count as a step."""
    is_waited_for = multiprocessing.get_context(method).Event()
    samples = InterruptedInWorker(is_waited_for)
    loader = DataLoader(samples, 4, num_workers=1, prefetch_factor=1, multiprocessing_context=method)
    run = make_with(loader)
    step = run.step

    def step_and_tell(batch):
        loss = step(batch)
        if run.steps == 5:  # the next batch holds sample 20
            is_waited_for.set()
        return loss

    run.step = step_and_tell
    with pytest.raises(KeyboardInterrupt) as caught:
        run.fit(1, progress=False, checkpoint_dir=tmp_path)
    if method == "fork":
        assert caught.value.__context__ is None
    assert run.steps in range(1, 7)
    assert newest_in(tmp_path)["steps"] == run.steps


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_in_an_evaluation_is_raised_at_once(tmp_path):
    class Evaluated:
        def __iter__(self):
            interrupt()
            interrupt()
            return iter(())

    with pytest.raises(KeyboardInterrupt):
        make().fit(1, Evaluated(), progress=False, checkpoint_dir=tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("interruptible")
def test_an_evaluation_that_fails_after_an_interrupt_costs_no_epoch(tmp_path):
    class Broken:
        def __iter__(self):
            interrupt()
            raise RuntimeError("a worker was interrupted, say")

    run = make()
    with pytest.raises(KeyboardInterrupt):
        run.fit(1, Broken(), progress=False, checkpoint_dir=tmp_path)
    assert newest_in(tmp_path)["fitted"]["is_trained"]
    batches = [(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))]
    again = make()
    (row,) = again.fit(1, batches, progress=False, checkpoint_dir=tmp_path)
    assert again.steps == 6
    assert "eval_loss" in row


def test_a_state_is_of_plain_things_alone():
    run = make("scaled")
    run.step(next(iter(run.loader)))
    kinds = collections.Counter()

    def look(value):
        kinds[type(value).__name__] += 1
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            look(each)

    look(run.state_dict())
    assert set(kinds) <= {"dict", "OrderedDict", "list", "tuple", "Tensor", "int", "float", "str", "bool", "NoneType"}
