"""Kind C: datasets, samplers and batches that do not survive other processes, or reading ahead."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import random
import sqlite3
import threading
import zipfile

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

from tests.situations.harness import Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified
from tests.situations.test_b_changing_data import decoded

KIND = Table()
WORKERS = {"workers": 2}


def record(i: int) -> np.ndarray:
    return np.full(8, i, dtype=np.float32)


class Records(Dataset):
    """Base of datasets whose sample ``i`` is the number ``i``, eight times."""

    samples = 96

    def __len__(self):
        return self.samples

    def read(self, i: int) -> bytes:
        raise NotImplementedError

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(self.read(i)), dtype=torch.float32) + 0 * decoded(100), i % 4


def train(start: Start, data, epochs=8, loss=classified, **loader):
    """Train, and return the samples in the order in which they came."""
    model = mlp()
    batches = DataLoader(data, **({"batch_size": 12, "shuffle": True} | loader))
    model, batches, step = start(model, batches, sgd(model, lr=1e-6), loss)
    seen = []
    for _ in range(epochs):
        for batch in batches:
            seen.append(batch[0].sum(1).round(decimals=3).tolist())
            step(batch)
    return {"weights": weights(model), "seen": seen}


@KIND.add(forced=WORKERS, budget=3)
def archive_kept_open(start: Start):
    path = start.folder / "records.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for i in range(96):
            file.writestr(f"{i}.bin", record(i).tobytes() * 2000)

    class Archive(Records):
        def __init__(self):
            self.file = zipfile.ZipFile(path)

        def read(self, i):
            return self.file.read(f"{i}.bin")[:32]

    data = Archive()
    seen = train(start, data)
    data.file.close()
    return seen


@KIND.add(forced=WORKERS, budget=3)
def database_connection(start: Start):
    path = start.folder / "records.db"
    with sqlite3.connect(path) as base:
        base.execute("create table records (id integer primary key, data blob)")
        base.executemany("insert into records values (?, ?)", [(i, record(i).tobytes()) for i in range(96)])

    class Rows(Records):
        def __init__(self):
            self.base = sqlite3.connect(path)

        def read(self, i):
            return self.base.execute("select data from records where id = ?", (int(i),)).fetchone()[0]

    data = Rows()
    seen = train(start, data)
    data.base.execute("insert into records values (96, ?)", (record(96).tobytes(),))
    data.base.commit()
    rows = data.base.execute("select count(*) from records").fetchone()[0]
    data.base.close()
    return seen | {"rows": rows}


@KIND.add(forced=WORKERS, budget=3)
def position_in_a_memory_map(start: Start):
    path = start.folder / "records.bin"
    np.concatenate([record(i) for i in range(96)]).tofile(path)

    class Mapped(Records):
        def __init__(self):
            self.file = path.open("rb")
            self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

        def read(self, i):
            self.map.seek(32 * int(i))
            return self.map.read(32)

    return train(start, Mapped())


@KIND.add(forced=WORKERS, budget=3)
def lines_of_a_text_file_by_offset(start: Start):
    path = start.folder / "records.txt"
    path.write_text("\n".join(" ".join([str(float(i))] * 8) + " " + "x" * 5000 for i in range(96)))

    class Lines(Records):
        def __init__(self):
            self.file, self.offsets = path.open("rb"), [0]
            for line in self.file:
                self.offsets.append(self.offsets[-1] + len(line))

        def read(self, i):
            self.file.seek(self.offsets[i])
            return np.array(self.file.readline().split()[:8], dtype=np.float32).tobytes()

    return train(start, Lines())


@KIND.add(forced=WORKERS, budget=3)
def thread_that_reads_for_the_dataset(start: Start):
    class Served(Records):
        """Samples come from a thread of the main process."""

        def __init__(self):
            self.asked, self.answers = queue.Queue(), queue.Queue()
            threading.Thread(target=self.serve, daemon=True).start()

        def serve(self):
            while (i := self.asked.get()) is not None:
                self.answers.put(record(i).tobytes())

        def read(self, i):
            self.asked.put(i)
            return self.answers.get(timeout=5)

    data = Served()
    seen = train(start, data)
    data.asked.put(None)
    return seen


@KIND.add(forced=WORKERS, budget=3)
def lock_that_a_thread_holds(start: Start):
    class Locked(Records):
        """A thread refreshes statistics under the lock that samples take."""

        def __init__(self):
            self.lock, self.ended, self.reads = threading.Lock(), threading.Event(), 0
            threading.Thread(target=self.refresh, daemon=True).start()

        def refresh(self):
            while not self.ended.wait(0.001):
                with self.lock:
                    sum(range(2000))

        def read(self, i):
            with self.lock:
                self.reads += 1
                return record(i).tobytes()

    data = Locked()
    seen = train(start, data)
    data.ended.set()
    return seen


@KIND.add(forced=WORKERS, budget=3)
def scratch_file_of_a_decoder(start: Start):
    class Decoded(Records):
        """Writes each sample to one file, as wrappers of command-line decoders do."""

        def read(self, i):
            scratch = start.folder / "scratch.bin"
            scratch.write_bytes(record(i).tobytes() * 500)
            data = scratch.read_bytes()
            scratch.write_bytes(b"")
            return data[-32:]

    return train(start, Decoded())


@KIND.add(forced=WORKERS, budget=3)
def generator_that_yields_noise(start: Start):
    def noise():
        rng = np.random.default_rng(5)
        while True:
            yield rng.integers(1000)

    class Noisy(Records):
        def __init__(self):
            self.noise = noise()

        def read(self, i):
            return (record(i) + np.float32(next(self.noise) / 8)).tobytes()

    return train(start, Noisy())


@KIND.add(forced=WORKERS, budget=3)
def accesses_counted_by_the_dataset(start: Start):
    class Counted(Records):
        """Makes samples harder with each access, and counts over all processes."""

        def __init__(self):
            self.accesses, self.everywhere = 0, multiprocessing.Value("i", 0)

        def read(self, i):
            self.accesses += 1
            with self.everywhere.get_lock():
                self.everywhere.value += 1
            return (record(i) + np.float32(self.accesses / 1024)).tobytes()

    data = Counted()
    seen = train(start, data)
    return seen | {"accesses": data.accesses, "everywhere": data.everywhere.value}


@KIND.add(forced=WORKERS, budget=3)
def noise_that_depends_on_the_worker(start: Start):
    class Seeded(Records):
        def read(self, i):
            info = get_worker_info()
            worker = 0 if info is None else 1 + info.id
            return (record(i) + np.random.default_rng([worker, i]).integers(100) / 8).astype(np.float32).tobytes()

    return train(start, Seeded())


@KIND.add(forced=WORKERS, budget=3)
def batches_drawn_by_the_last_losses(start: Start):
    """Prioritized sampling: the training writes the weights that the next batch is drawn by."""

    class Prioritized:
        def __init__(self):
            self.weights, self.generator = torch.ones(96), torch.Generator().manual_seed(3)

        def __len__(self):
            return 8

        def __iter__(self):
            for _ in range(8):
                yield torch.multinomial(self.weights, 12, generator=self.generator).tolist()

    priority = Prioritized()
    x, y = points(96).tensors

    def loss(model, batch):
        x, (y, index) = batch[0], batch[1].T
        each = cross_entropy(model(x), y, reduction="none")
        priority.weights[index] = (each.detach() * 1000).round() / 1000 + 0.1
        return each.mean()

    model = mlp()
    loader = DataLoader(TensorDataset(x, torch.stack([y, torch.arange(96)], 1)), batch_sampler=priority)
    model, loader, step = start(model, loader, sgd(model), loss)
    seen = []
    for _ in range(10):
        for batch in loader:
            seen.append(batch[1][:, 1].tolist())
            step(batch)
    return {"weights": [*weights(model), priority.weights], "seen": seen}


@KIND.add(forced=WORKERS, budget=3)
def weights_of_a_sampler_written_between_epochs(start: Start):
    data = points(96)
    sampler = WeightedRandomSampler(torch.ones(96), 96, generator=torch.Generator().manual_seed(2))
    model = mlp()
    model, loader, step = start(model, DataLoader(data, batch_size=12, sampler=sampler), sgd(model), classified)
    seen = []
    for epoch in range(10):
        sampler.weights[epoch * 9 : epoch * 9 + 9] = 0
        for batch in loader:
            seen.append(round(batch[0].sum().item(), 3))
            step(batch)
    return {"weights": weights(model), "seen": seen}


@KIND.add(forced=WORKERS, budget=3)
def batches_kept_for_a_replay(start: Start):
    kept = []

    def loss(model, batch):
        value = classified(model, batch)
        return value + 0.1 * classified(model, kept[len(kept) // 2]) if kept else value

    model = mlp()
    model, loader, step = start(model, DataLoader(points(96), batch_size=12, shuffle=True), sgd(model), loss)
    for _ in range(9):
        for batch in loader:
            kept.append(batch)
            step(batch)
    return {"weights": weights(model), "kept": [round(x.sum().item(), 3) for x, _ in kept]}


@KIND.add(forced={"in_memory": True})
def batches_written_in_place(start: Start):
    """Adversarial training adds to the batch that came: the next epoch's samples are clean again."""
    model = mlp()
    model, loader, step = start(model, DataLoader(points(96), batch_size=12, shuffle=True), sgd(model), classified)
    seen = []
    for _ in range(9):
        for x, y in loader:
            seen.append(round(x.sum().item(), 3))
            x.add_(1.0)
            y.clamp_(max=2)
            step((x, y))
    return {"weights": weights(model), "seen": seen}


@KIND.add(forced=WORKERS, budget=3)
def file_opened_again_per_process(start: Start):
    """The cure that people apply, which has to work on."""
    path = start.folder / "records.bin"
    np.concatenate([record(i) for i in range(96)]).tofile(path)

    class Reopened(Records):
        def __init__(self):
            self.owner, self.file = None, None

        def read(self, i):
            if self.owner != os.getpid():
                self.owner, self.file = os.getpid(), path.open("rb")
            self.file.seek(32 * int(i))
            return self.file.read(32)

    return train(start, Reopened())


@KIND.add(forced=WORKERS, budget=3)
def stream_that_remembers_its_position(start: Start):
    class Stream(IterableDataset):
        def __init__(self):
            self.position = 0

        def __iter__(self):
            for _ in range(96):
                self.position += 1
                yield torch.full((8,), float(self.position) + 0 * decoded(100)), self.position % 4

    data = Stream()
    return train(start, data, shuffle=False) | {"position": data.position}


@KIND.add(forced=WORKERS, budget=3)
def augmentation_by_python_and_numpy(start: Start):
    """Random numbers may be others with workers. No two samples may draw the same ones."""

    class Augmented(Records):
        def read(self, i):
            return np.array([random.random(), np.random.rand()] * 4, dtype=np.float32).tobytes()

    seen = train(start, Augmented(), epochs=6)
    return {"draws": len({value for batch in seen["seen"] for value in batch}) > 0.8 * 6 * 96}


@KIND.add(forced=WORKERS, budget=3)
def epochs_that_end_early(start: Start):
    """The script leaves each epoch after three batches, and its sampler continues where it was."""

    class Endless:
        def __init__(self):
            self.next = 0

        def __iter__(self):
            while True:
                yield self.next % 96
                self.next += 1

        def __len__(self):
            return 96

    sampler, data = Endless(), points(96)
    model = mlp()
    model, loader, step = start(model, DataLoader(data, batch_size=12, sampler=sampler), sgd(model), classified)
    seen = []
    for _ in range(30):
        for number, batch in enumerate(loader):
            seen.append(round(batch[0].sum().item(), 3))
            step(batch)
            if number == 2:
                break
    return {"weights": weights(model), "seen": seen, "next": sampler.next}


@KIND.cases()
def test_loading(situation, form, way):
    check(situation, form, way)
