"""movable_transforms: names and lines of operators that may move, and refusals of all others."""

from __future__ import annotations

import importlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from flatout.data import NotExamined
from flatout.data.movable import MOST_CALLS
from tests.data.harness import TICK, examined
from tests.helpers import bits

IMAGES = np.random.default_rng(0).integers(0, 255, (12, 3, 8, 9), dtype=np.uint8)
FLOATS = torch.from_numpy(IMAGES).float()
MEAN = np.array([0.4, 0.5, 0.6], dtype=np.float32)


class Made(Dataset):
    """Dataset of samples that a function makes from the index."""

    def __init__(self, make: Callable, length: int = 12) -> None:
        self.make = make
        self.length = length
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index)


def line_of(mark: str) -> int:
    """Return the line number of the line in this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return number


def named(make: Callable, **options: int) -> list[str]:
    """Return the named operators of a dataset of ``make(index)``, in the order in which they run."""
    return [name for work in examined(Made(make), **options) for name in work.operators]


def normalized(index):
    x = torch.from_numpy(IMAGES[index].copy())
    x = x.float() / 255
    return x - 0.5, index % 2


def test_a_finding_names_file_line_function_operators_and_cost():
    class Images(Made):
        def __getitem__(self, index):
            x = torch.from_numpy(IMAGES[index].copy())
            return torch.special.expm1(x.float()).logsumexp(0), 1  # the costliest

    (work,) = examined(Images(normalized))
    assert (work.file, work.line) == (__file__, line_of("the costliest"))
    assert work.what.endswith("__getitem__")
    assert work.operators == ("float", "special_expm1", "logsumexp")
    assert work.seconds == pytest.approx(3 * TICK)
    assert work.share == pytest.approx(3 / 7)
    assert not work.normalizes
    assert re.match(
        rf"\S*test_movable.py:{work.line}: .*\(float, special_expm1, logsumexp\).* {3e3 * TICK:.2f} ms.* 43 %",
        str(work),
    )
    assert "Prefetcher" in work.advice


def test_a_file_below_the_current_folder_is_told_by_its_way_from_there(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    (work,) = examined(Made(normalized))
    assert str(work).startswith("data/test_movable.py:")
    monkeypatch.chdir("/")
    (work,) = examined(Made(normalized))
    assert str(work).startswith(__file__.removeprefix("/"))


def test_floats_made_of_bytes_are_work_for_normalize():
    (work,) = examined(Made(normalized))
    assert work.normalizes
    assert work.operators == ("float", "div", "sub")
    assert "(float, div, sub)" in str(work)
    assert "Normalize" in work.advice
    (work,) = examined(Made(lambda i: FLOATS[i] - 0.5))
    assert not work.normalizes


def test_functions_are_told_apart_and_the_costliest_comes_first():
    def cheap(x):
        return x + 1

    def dear(x):
        for _ in range(9):
            x = x * 1.01  # dear
        return x

    first, second = examined(Made(lambda i: dear(cheap(torch.tensor([float(i)])))))
    assert (first.what, first.line) == ("dear", line_of("dear"))
    assert (second.what, second.operators) == ("cheap", ("add",))
    assert (first.seconds, second.seconds) == (pytest.approx(9 * TICK), pytest.approx(TICK))


def test_little_work_is_left_out():
    def make(i):
        time.sleep(seconds)
        return normalized(i)

    seconds = 50 * TICK  # next to three operations of one tick
    assert len(examined(Made(make))) == 1
    seconds = 150 * TICK
    assert examined(Made(make)) == ()


# -- operators that may move -----------------------------------------------------------------------------------


def crop(i):
    return FLOATS[i][:, i % 4 : i % 4 + 4].div(255)


def shapes(i):
    x = FLOATS[i][:, : i % 5 + 2].exp()
    return torch.nn.functional.interpolate(x[None], size=(4, 4))[0].div(255)


def label_is_read(i):
    x = FLOATS[i].div(255)
    return x.sub(0.5), float(x.mean())


def sometimes_read(i):
    x = FLOATS[i].div(255)
    return x.sub(0.5), float(x.mean()) if i > 8 else 0.0


def memory_goes_to_numpy(i):
    x = FLOATS[i].div(255)
    x.numpy()[0, 0] = i
    return x.sub(0.5)


def through_numpy(i):
    x = FLOATS[i].div(255).numpy()
    return torch.from_numpy(np.flip(x, i % 3).copy()).sub(0.5)


def view_in_place(i):
    x = FLOATS[i].div(255)
    x[0].sub_(0.5)
    x[1, :2] = 0
    return x


def random_hole(i):
    x = FLOATS[i].div(255)
    x[1, : i % 3] = 0
    return x.sub(0.5)


def sometimes_in_the_end(i):
    x = FLOATS[i].div(255)
    return x.flip(-1) if i > 8 else x


def sometimes_at_first(i):
    x = FLOATS[i]
    x = x.flip(-1) if i > 8 else x
    return x.div(255)


def sometimes_in_place(i):
    x = FLOATS[i].div(255)
    if i > 8:
        x[0].zero_()
    return x


def also_cropped(i):
    x = FLOATS[i].div(255)
    return x, x[:, i % 4 : i % 4 + 4].sub(0.5)


def joined(i):
    x, y = (torch.from_numpy(IMAGES[k].copy()) for k in (i, i - 1))
    return torch.cat([x, y.mul(2)]).div(255)


def of_its_own_mean(i):
    x = FLOATS[i].div(255)
    return x.sub(x.mean())


def in_parts(i):
    x = FLOATS[i].clone()
    for channel in range(3):
        x[channel] -= float(MEAN[channel])
    return x


MOVABLE = {
    "what is asked of types": (
        lambda i: (x := FLOATS[i].type(torch.half), x.type(), x.shape, len(x))[0].div(2),
        ["div"],
    ),
    "nothing but a fetch": (lambda i: FLOATS[i], []),
    "no tensor": (lambda i: i, []),
    "arithmetic": (lambda i: FLOATS[i].sub(0.5).div(2), ["sub", "div"]),
    "a list of settings": (lambda i: FLOATS[i].sub(torch.tensor([0.1, 0.2])[:1]), ["tensor", "__getitem__", "sub"]),
    "a fresh array": (lambda i: FLOATS[i].sub(torch.from_numpy(MEAN.copy())[:, None, None]), ["__getitem__", "sub"]),
    "labels at the end": (lambda i: (FLOATS[i].div(2), FLOATS[i, 0, 0, 0], torch.tensor(i)), ["div"]),
    "its own factor": (lambda i: FLOATS[i].sub(0.5).mul(i), []),
    "another in a dict": (lambda i: {"x": FLOATS[i].div(2), "y": [FLOATS[i].mul(3)]}, ["div", "mul"]),
    "an unused result": (lambda i: (FLOATS[i].exp(), FLOATS[i].div(2))[1], ["div"]),
    "crop": (crop, ["div"]),
    "shapes": (shapes, ["__getitem__", "div"]),
    "label_is_read": (label_is_read, ["sub"]),
    "sometimes_read": (sometimes_read, []),
    "memory_goes_to_numpy": (memory_goes_to_numpy, ["sub"]),
    "through_numpy": (through_numpy, ["sub"]),
    "view_in_place": (view_in_place, ["div", "__getitem__", "sub_", "__setitem__"]),
    "random_hole": (random_hole, ["sub"]),
    "sometimes_in_the_end": (sometimes_in_the_end, []),
    "sometimes_at_first": (sometimes_at_first, ["div"]),
    "sometimes_in_place": (sometimes_in_place, []),
    "also_cropped": (also_cropped, ["sub"]),
    "joined": (joined, ["div"]),
    "of_its_own_mean": (of_its_own_mean, ["div", "mean", "sub"]),
    "in_parts": (in_parts, ["clone", "__getitem__", "sub_", "__setitem__"]),
}


@pytest.mark.parametrize("name", MOVABLE)
def test_what_leads_from_the_last_work_for_the_cpu_to_the_sample_is_named(name):
    make, expected = MOVABLE[name]
    assert named(make) == expected


def drawn(i, draw):
    x = FLOATS[i].div(255)
    return x.flip(-1) if draw() < 2 else x  # always flips, as far as a check can see


def helped(i, draw):
    x = FLOATS[i]
    x = x.flip(-1) if (lambda: draw() < 2)() else x
    return x.div(255)


CHOICES = {
    "torch": lambda: float(torch.rand(1)),
    "torch in a batch": lambda: torch.randn(2, 2).sum(),
    "random": random.random,
    "numpy": np.random.random,
}


@pytest.mark.parametrize("make", [drawn, helped])
@pytest.mark.parametrize("name", CHOICES)
def test_work_that_a_random_choice_may_have_led_to_stays(name, make):
    assert named(lambda i: make(i, CHOICES[name])) == []
    assert named(lambda i: make(i, lambda: 0.5)) != []


def test_a_choice_of_the_dataset_by_its_own_generator_is_one():
    class Own(Made):
        def __getitem__(self, index):
            x = FLOATS[index].div(255)
            return x.flip(-1) if self.rng.random() < 2 else x

    assert examined(Own(crop)) == ()


def test_random_numbers_as_data_stay_with_what_led_to_them():
    def noisy(x):
        return x.div(255).add(torch.randn(3, 8, 9))

    assert named(lambda i: noisy(FLOATS[i])) == []


STEPS: dict[str, tuple[Callable, list[str] | None]] = {
    "mul": (lambda x, i: x.mul(2), ["mul"]),
    "sub_": (lambda x, i: x.sub_(0.5), ["sub_"]),
    "relu": (lambda x, i: torch.nn.functional.relu(x), ["relu"]),
    "rows": (lambda x, i: x[:, 0:2], ["__getitem__"]),
    "own factor": (lambda x, i: x.mul(i), None),
    "numpy": (lambda x, i: torch.from_numpy(np.exp(-np.abs(x.numpy()))), None),
    "read": (lambda x, i: (x, x.sum().item())[0], None),
}


@settings(max_examples=40)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=6))
def test_any_chain_moves_from_its_last_step_for_the_cpu_on(chain):
    def make(i):
        x = FLOATS[i].clone() + i
        for step in chain:
            x = STEPS[step][0](x, i)
        return x

    staying = [k for k, step in enumerate(chain) if STEPS[step][1] is None]
    moving = chain[staying[-1] + 1 :] if staying else chain
    expected = [name for step in moving for name in STEPS[step][1] or ()]
    assert sorted(set(named(make))) == sorted(set(expected))


# -- collate_fn ------------------------------------------------------------------------------------------------


def stacks(batch):
    x = torch.stack([x for x, _ in batch])
    return x.sub(0.5), torch.tensor([y for _, y in batch])  # collated


def pads(batch):
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in batch]).sub(0.5), [y for _, y in batch]


def lists(batch):
    return [x for x, _ in batch], [y for _, y in batch]


def arrays(batch):
    return torch.from_numpy(np.stack([x for x, _ in batch])).sub(0.5)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [(stacks, {"div", "sub"}), (pads, {"sub"}), (lists, {"div"}), (arrays, {"sub"})],
)
def test_a_collate_fn_is_looked_at_and_may_keep_what_comes_before_it(collate, expected):
    loader = DataLoader(Made(lambda i: (FLOATS[i] / 255, i)), 4, collate_fn=collate)
    found = examined(loader)
    assert {name for work in found for name in work.operators} == expected
    if collate is stacks:
        assert [work.line for work in found if work.what == "stacks"] == [line_of("collated")]


# -- where -----------------------------------------------------------------------------------------------------


def test_a_samples_maker_behind_wrappers_is_found():
    (work,) = examined(DataLoader(Subset(Made(normalized), range(3, 9)), 2))
    assert work.what == "normalized"


def test_what_is_typed_in_is_the_users_own():
    scope = {"__name__": "__main__", "FLOATS": FLOATS}
    exec(compile("def typed(i):\n    return FLOATS[i] - 1", "<stdin>", "exec"), scope)
    (work,) = examined(Made(scope["typed"]))
    assert (work.file, work.line, work.what) == ("<stdin>", 2, "typed")


def test_a_cell_of_a_notebook_is_told_by_its_number():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    config = importlib.import_module("traitlets.config").Config()
    config.HistoryManager.enabled = False  # no file of the user's, and no thread that outlives the test
    threads = threading.enumerate()
    shell = interactive.InteractiveShell.instance(config=config)
    try:
        shell.user_ns["FLOATS"] = FLOATS
        shell.run_cell("x = 1", store_history=True)
        shell.run_cell("def celled(i):\n    return FLOATS[i] - 1", store_history=True)
        (work,) = examined(Made(shell.user_ns["celled"]))
        assert str(work).startswith(f"Cell In[{shell.execution_count - 1}]:2: celled (sub)")
    finally:
        type(shell).clear_instance()
    assert threading.enumerate() == threads


def installed(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Install a module as ``pip install`` does."""
    file = folder / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(source)
    scope: dict = {"__name__": "library"}
    exec(compile(source, str(file), "exec"), scope)
    monkeypatch.setitem(__import__("sys").modules, "library", type(pytest)("library"))
    vars(__import__("sys").modules["library"]).update(scope)
    return scope


LIBRARY = """
class Scale:
    def __call__(self, x):
        return self.work(x)
    def work(self, x):
        return x / 255
class Pipeline:
    def __init__(self, *steps):
        self.steps = list(steps)
    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x
class Folder:
    def __init__(self, data, transform):
        self.data, self.transform, self.target_transform = data, transform, None
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        return self.transform(self.data[i])
def halve(x):
    return x * 0.5
"""


def test_a_librarys_transform_is_told_by_the_way_to_it_or_by_who_calls_it(tmp_path, monkeypatch):
    library = installed(tmp_path, LIBRARY, monkeypatch)
    scale, halve = library["Scale"](), library["halve"]
    pipeline = library["Pipeline"](torch.nn.Identity(), scale)

    (work,) = examined(Subset(library["Folder"](FLOATS, pipeline), range(8)))
    assert (work.file, work.line) == (None, None)
    assert str(work).startswith("dataset.dataset.transform.steps[1]: Scale (div)")

    sequential = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    (work,) = examined(library["Folder"](FLOATS, sequential))
    assert str(work).startswith("dataset.transform._modules['1']: ReLU (relu)")

    (work,) = examined(library["Folder"](FLOATS, lambda x: pipeline(x)))  # the caller
    assert (work.file, work.line, work.what) == (__file__, line_of("the caller"), "Scale")

    (work,) = examined(Made(lambda i: halve(FLOATS[i])))
    assert work.what == "<lambda>"

    # Unknown module: created for each sample, in code that is not the user's.
    assert examined(library["Folder"](FLOATS, halve)) == ()


# -- no inspection, and no side effects ------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Endless:
    def __getitem__(self, index):
        return FLOATS[0]


def broken(i):
    raise KeyError("gone")


REFUSED = {
    "Stream": Stream(),
    "Endless.*length": Endless(),
    "empty": Made(normalized, 0),
    r"dataset\[0\].*KeyError: 'gone'": Made(broken),
    "collate_fn.*KeyError: 'gone'": DataLoader(Made(normalized), collate_fn=broken),
}


@pytest.mark.parametrize("facts", REFUSED)
def test_sources_that_cannot_be_examined_are_refused_with_their_name(facts):
    with pytest.raises(NotExamined, match=facts):
        examined(REFUSED[facts])


def test_samples_that_take_too_long_are_refused():
    calls: list[int] = []
    with pytest.raises(NotExamined, match=r"\b0 s.*\b1 sample"):
        examined(Made(lambda i: calls.append(i)), seconds=0)
    assert calls == [0]


def test_samples_of_too_many_operations_are_refused():
    def make(i):
        x = torch.zeros(1)
        for _ in range(MOST_CALLS):
            x = x + 1
        return x

    with pytest.raises(NotExamined, match=f"{MOST_CALLS:,}"):
        examined(Made(make))


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match=r"^samples .*4.*3$"):
        examined(Made(normalized), samples=3)


def states(dataset: Made) -> tuple:
    return (
        bits(torch.get_rng_state()),
        random.getstate(),
        str(np.random.get_state()),
        str(dataset.rng.bit_generator.state),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_generators_and_threads_are_put_back_whatever_happens(fails):
    class Random(Made):
        def __getitem__(self, index):
            assert torch.get_num_threads() == 1
            random.random(), np.random.rand(), torch.rand(1), self.rng.random()
            return broken(index) if fails and index > 5 else FLOATS[index] / 255

    dataset = Random(normalized)
    before = states(dataset)
    try:
        examined(DataLoader(dataset, 4, shuffle=True, num_workers=2))
    except NotExamined:
        assert fails
    assert states(dataset) == before


def test_each_of_the_samples_is_made_twice_spread_over_the_dataset():
    calls = []
    examined(Made(lambda i: (calls.append(i), FLOATS[i] / 2)[1]), samples=4)
    assert calls == [0, 0, 3, 3, 6, 6, 9, 9]
