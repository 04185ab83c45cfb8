"""sample_stages: stages by name, line and transform, and samples that cannot be examined."""

from __future__ import annotations

import cProfile
import importlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from flatout.data import NotExamined, Stage, sample_stages, stages
from flatout.data.stages import in_words
from tests.helpers import bits
from tests.unseen import Unseen

SLOW = 4e-3
"""Seconds that the slow part of a sample sleeps. Everything else takes some microseconds."""


class Made(Dataset):
    """Dataset that calls a function with each index."""

    def __init__(self, make: Callable[[int], Any], length: int = 12) -> None:
        self.make = make
        self.length = length
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index)


def line_of(mark: str) -> str:
    """Return the place of the line in this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{shown()}:{number}"


def shown() -> str:
    """Return this file as stages show it."""
    return __file__.removeprefix(f"{Path.cwd()}/")


def slowest(source: Any, **options: Any) -> Stage:
    return sample_stages(source, **options)[0]


# -- stages of the user's own code ---------------------------------------------------------------------------------


def test_a_file_that_is_read_is_named_with_its_line(tmp_path):
    file = tmp_path / "samples.bin"
    file.write_bytes(bytes(2**25))

    def make(i):
        with open(file, "rb") as opened:
            return len(opened.read())  # read here

    stage = slowest(Made(make))
    assert (stage.name, stage.what, stage.place) == ("read", "io", line_of("read here"))
    assert stage.share > 0.5
    assert stage.seconds > 0


def test_an_array_that_is_read_is_no_transform(tmp_path):
    np.save(tmp_path / "samples.npy", np.zeros(2**22))
    assert slowest(Made(lambda i: np.load(tmp_path / "samples.npy").size)).name == "read"


def test_a_decoder_of_pythons_library_decodes():
    text = json.dumps(list(range(50_000)))
    stage = slowest(Made(lambda i: len(json.loads(text))))  # decoded here
    assert (stage.name, stage.what, stage.place) == ("decode", "json", line_of("decoded here"))


def test_lines_without_a_call_take_their_own_time():
    pixels = np.random.default_rng(0).random(300_000)

    def make(i):
        scaled = pixels * 2
        scaled = scaled**1.7 + scaled**0.3  # operators
        return scaled.sum()

    stage = slowest(Made(make))
    assert (stage.name, stage.place) == ("transform", line_of("operators"))
    assert stage.what.endswith("make")


def test_functions_are_told_apart_and_the_slowest_comes_first():
    def quick():
        time.sleep(SLOW)  # quick

    def slow():
        quick_enough = 3 * SLOW
        time.sleep(quick_enough)  # slow

    def make(i):
        quick()
        slow()
        return i

    first, second, *_ = sample_stages(Made(make))
    assert (first.what, first.place) == ("slow", line_of("slow"))
    assert (second.what, second.place) == ("quick", line_of("quick"))
    assert first.share > second.share > 0.1


def test_shares_add_up_to_no_more_than_the_batch_and_little_parts_are_left_out():
    found = sample_stages(DataLoader(Made(lambda i: time.sleep(SLOW) or i), 4))
    assert 0.9 < sum(stage.share for stage in found) <= 1.000001
    assert all(stage.share >= stages.WORTH_NAMING for stage in found)
    assert found[0].seconds > 0.9 * SLOW


def test_many_small_calls_do_not_hide_a_slow_one():
    def small(x):
        return x

    def make(i):
        for k in range(2_000):
            small(k)
        time.sleep(SLOW)  # not hidden
        return i

    stage = slowest(Made(make))
    assert stage.place == line_of("not hidden")
    assert stage.share > 0.5


# -- collate_fn and copy -----------------------------------------------------------------------------------------


def waits(batch):
    time.sleep(16 * SLOW)  # collated
    return torch.utils.data.default_collate(batch)


def test_a_collate_fn_is_a_stage_of_the_batch():
    first, second, *_ = sample_stages(DataLoader(Made(lambda i: time.sleep(SLOW) or i), 4, collate_fn=waits))
    assert (first.name, first.what, first.place) == ("collate", "waits", line_of("collated"))
    assert second.name == "transform"
    assert 1 < first.seconds / second.seconds < 12  # a fourth of the batch's


def test_a_collate_fn_of_torch_is_named():
    stage = slowest(DataLoader(Made(lambda i: torch.zeros(1).expand(2**20)), 4))
    assert (stage.name, stage.what, stage.place) == ("collate", "default_collate", "collate_fn")


def test_a_collate_fn_may_change_the_samples():
    def popping(batch):
        return torch.stack([sample.pop("x") for sample in batch])

    assert sample_stages(DataLoader(Made(lambda i: {"x": torch.zeros(2**16)}), 4, collate_fn=popping))


def test_a_loader_without_batches_collates_single_samples():
    stage = slowest(DataLoader(Made(lambda i: i), None, collate_fn=lambda sample: waits([sample + 1])))
    assert (stage.name, stage.place) == ("collate", line_of("collated"))


def test_a_dataset_alone_has_no_collation():
    assert {stage.name for stage in sample_stages(Made(lambda i: time.sleep(SLOW) or i))} == {"transform"}


class Slowly:
    """Batch whose copy takes long."""

    def to(self, device, **_):
        time.sleep(8 * SLOW)
        return self


def test_the_copy_to_the_device_is_a_stage():
    loader = DataLoader(Made(lambda i: i), 4, collate_fn=lambda batch: Slowly())
    stage = slowest(loader, device="meta")
    assert (stage.name, stage.what, stage.place) == ("copy", "meta", "")
    assert "copy" not in {each.name for each in sample_stages(loader)}


# -- places --------------------------------------------------------------------------------------------------------

LIBRARY = """
import time
class Waits:
    def __call__(self, x):
        return self.work(x)
    def work(self, x):
        time.sleep(4e-3)
        return x
class Pipeline:
    def __init__(self, *steps):
        self.steps = list(steps)
    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x
class Folder:
    def __init__(self, data, transform, loader=None):
        self.data, self.transform, self.loader = data, transform, loader
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        x = self.data[i] if self.loader is None else self.loader(self.data[i])
        return self.transform(x)
def open_slowly(x):
    time.sleep(4e-3)
    return x
def resize(x):
    time.sleep(4e-3)
    return x
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a module as ``pip install`` does."""
    file = tmp_path / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(file.parent))
    yield importlib.import_module("library")
    del sys.modules["library"]


def test_a_transform_of_a_library_is_named_with_the_way_to_it(library):
    folder = library.Folder(range(12), library.Pipeline(torch.nn.Identity(), library.Waits()))
    stage = slowest(Subset(ConcatDataset([folder, folder]), range(20)))
    assert (stage.name, stage.what) == ("transform", "Waits")
    assert stage.place == "dataset.dataset.datasets[0].transform.steps[1]"
    assert str(stage).startswith("Waits ")


def test_a_function_of_a_library_is_named_with_the_way_to_it(library):
    stage = slowest(library.Folder(range(12), torch.nn.Identity(), library.open_slowly))
    assert (stage.what, stage.place) == ("open_slowly", "dataset.loader")
    stage = slowest(library.Folder(range(12), library.resize))
    assert (stage.name, stage.what, stage.place) == ("resize", "resize", "dataset.transform")


def test_a_transform_that_the_users_code_calls_has_a_line_and_a_class(library):
    transform = library.Pipeline(library.Waits())
    stage = slowest(Made(lambda i: transform(i)))  # the caller
    assert (stage.what, stage.place) == ("Waits", line_of("the caller"))


def test_a_users_transform_in_a_library_has_its_line(library):
    class Own:
        def __call__(self, x):
            time.sleep(SLOW)  # own transform
            return x

    stage = slowest(library.Folder(range(12), library.Pipeline(library.resize, Own(), Own())))
    assert (stage.name, stage.place) == ("transform", line_of("own transform"))
    assert stage.what.endswith("Own.__call__" if sys.version_info >= (3, 11) else "__call__")


def test_a_file_outside_the_current_folder_has_its_whole_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert slowest(Made(lambda i: time.sleep(SLOW))).place.startswith(f"{__file__}:")


def test_samples_may_be_dicts_that_are_requested_in_lists():
    class Table(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            raise AssertionError("torch requests lists of samples")

        def __getitems__(self, indices):
            time.sleep(SLOW)  # rows
            return [{"input_ids": [i], "name": str(i)} for i in indices]

    assert slowest(DataLoader(Table(), 4)).place == line_of("rows")


def test_a_cell_of_a_notebook_is_named_by_its_number():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    config = importlib.import_module("traitlets.config").Config()
    config.HistoryManager.enabled = False  # no file of the user's, and no thread that outlives the test
    threads = threading.enumerate()
    shell = interactive.InteractiveShell.instance(config=config)
    try:
        shell.run_cell("import time", store_history=True)
        shell.run_cell("def celled(i):\n    time.sleep(4e-3)", store_history=True)
        assert slowest(Made(shell.user_ns["celled"])).place == f"Cell In[{shell.execution_count - 1}]:2"
    finally:
        type(shell).clear_instance()
    assert threading.enumerate() == threads


# -- cold and warm page cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cold", [True, False])
def test_reads_from_the_disk_are_told_apart_from_those_of_the_page_cache(is_cold, tmp_path, monkeypatch):
    file = tmp_path / "samples.bin"
    file.write_bytes(bytes(2**22))
    counted = iter(range(0, 10**9, 4096) if is_cold else [0] * 1000)
    monkeypatch.setattr(stages, "_bytes_from_disk", lambda: next(counted))
    found = sample_stages(Made(lambda i: len(file.read_bytes())))
    read = next(stage for stage in found if stage.name == "read")
    assert (read.cold_seconds is not None) is is_cold
    assert ("cold page cache" in str(read)) is is_cold
    assert "warm page cache" in in_words(found)


def test_samples_without_a_file_have_no_page_cache():
    text = in_words(sample_stages(Made(lambda i: time.sleep(SLOW))))
    assert "page cache" not in text
    assert "%" in text


# -- samples that cannot be examined, and no side effects -----------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Endless:
    def __getitem__(self, index):
        return 0


def broken(i):
    raise KeyError("gone")


def asking(i):
    return 0 if get_worker_info() is None else 1


REFUSED = {
    "Stream": lambda: Stream(),
    "Endless.*length": lambda: Endless(),
    "empty": lambda: Made(int, 0),
    r"dataset\[0\].*KeyError: 'gone'": lambda: Made(broken),
    "collate_fn.*KeyError: 'gone'": lambda: DataLoader(Made(int), collate_fn=broken),
    "get_worker_info": lambda: DataLoader(Made(asking), 4, num_workers=2),
    "worker_init_fn": lambda: DataLoader(Made(int), 4, num_workers=2, worker_init_fn=print),
}


@pytest.mark.parametrize("facts", REFUSED)
def test_sources_that_cannot_be_examined_are_refused_with_the_reason(facts):
    with pytest.raises(NotExamined, match=facts):
        sample_stages(REFUSED[facts]())
    assert sys.getprofile() is None


def test_a_dataset_that_writes_files_is_refused_and_writes_none(tmp_path):
    with pytest.raises(NotExamined, match="writ"):
        sample_stages(Made(lambda i: (tmp_path / "cache").write_text("x")))
    assert not (tmp_path / "cache").exists()


def test_a_dataset_may_ask_for_its_worker_where_there_is_none():
    assert sample_stages(DataLoader(Made(asking), 4))


def test_samples_that_take_too_long_are_refused():
    with pytest.raises(NotExamined, match=r"\b0 s.*\b1 sample"):
        sample_stages(Made(int), seconds=0)


def test_another_profiler_does_not_count_samples_and_goes_on():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        sample_stages(Made(counted_by_none))
        np.sort(counted_by_some())
    finally:
        profiler.disable()
    names = {entry.code.co_name for entry in profiler.getstats() if not isinstance(entry.code, str)}
    assert "counted_by_some" in names
    assert "counted_by_none" not in names


def counted_by_none(i):
    return i


def counted_by_some():
    return [2, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_generators_threads_and_traces_are_put_back_whatever_happens(fails):
    class Random(Made):
        count = 0

        def __getitem__(self, index):
            assert torch.get_num_threads() == 1
            self.count += 1
            random.random(), np.random.rand(), torch.rand(1), self.rng.random()
            return broken(index) if fails and index > 5 else index

    def state() -> tuple:
        generators = random.getstate(), str(np.random.get_state()), str(dataset.rng.bit_generator.state)
        return bits(torch.get_rng_state()), *generators, torch.get_num_threads(), dataset.count, sys.gettrace()

    dataset = Random(int)
    before = state()
    try:
        sample_stages(DataLoader(dataset, 4, shuffle=True, num_workers=2))
    except NotExamined:
        assert fails
    assert state() == before
    assert sys.getprofile() is None


def test_each_sample_is_made_three_times_with_the_same_draws():
    seen = Unseen(draws=[])
    sample_stages(Made(lambda i: seen.draws.append((i, float(torch.rand(1))))), samples=4)
    assert [index for index, _ in seen.draws] == [i for i in (0, 3, 6, 9) for _ in range(3)]
    assert len(set(seen.draws)) == 4
    assert len({draw for _, draw in seen.draws}) == 4


def test_a_stage_is_plain_data():
    stage = slowest(Made(lambda i: time.sleep(SLOW)))
    assert Stage(**json.loads(json.dumps(asdict(stage)))) == stage
