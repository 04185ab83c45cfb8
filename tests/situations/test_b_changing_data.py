"""Kind B: data that changes during the training."""

from __future__ import annotations

import ctypes
import math
import multiprocessing

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from tests.situations.harness import Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()
NOISE = {"scale": 1.0}
IN_MEMORY = {"in_memory": True}


def decoded(value: int) -> float:
    """Return a number that takes as long to compute as the decoding of a small image."""
    return sum(math.sin(k) for k in range(50 * value)) / 400


class Points(Dataset):
    """Points that are computed sample by sample, as people write datasets."""

    def __init__(self, transform=None):
        self.x, self.y = points().tensors
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] - decoded(8)
        return (self.transform(x) if self.transform else x), int(self.y[i])


def train(start: Start, data, change, epochs=14, shuffle=True, **loader):
    """Train, call ``change`` before each epoch, and return the sums of all batches that came."""
    model = mlp()
    batches = DataLoader(data, batch_size=16, shuffle=shuffle, **loader)
    model, batches, step = start(model, batches, sgd(model, lr=0.01), classified)
    sums = []
    for epoch in range(epochs):
        change(epoch)
        for number, batch in enumerate(batches):
            inputs = (batch[0].double() * torch.arange(1, 9)).sum().item()
            sums.append((len(batch[0]), round(inputs, 4), batch[1].sum().item()))
            step(batch)
            if number == 3 and hasattr(change, "within"):
                change.within(epoch)
    return {"weights": weights(model), "batches": sums}


@KIND.add(forced=IN_MEMORY)
def transform_replaced_after_a_few_epochs(start: Start):
    data = Points()

    def change(epoch):
        if epoch == 4:
            data.transform = lambda x: x.roll(1)
        if epoch == 9:
            data.transform = torch.relu

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def indices_of_a_subset_replaced(start: Start):
    data = Subset(Points(), list(range(64)))
    return train(start, data, lambda epoch: setattr(data, "indices", list(range(4 * epoch, 64 + 4 * epoch))), epochs=16)


@KIND.add(forced=IN_MEMORY)
def labels_refreshed_in_a_list_of_tuples(start: Start):
    class Listed(Dataset):
        """Dataset with a list of (path, label), like ``torchvision.datasets.ImageFolder``."""

        def __init__(self):
            self.samples = [(f"{i}.png", int(y)) for i, y in enumerate(points().tensors[1])]

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            path, label = self.samples[i]
            return torch.full((8,), int(path.split(".")[0]) / 128 + decoded(8)), label

    data = Listed()

    def change(epoch):
        for i in range(epoch, 128, 5):
            data.samples[i] = (data.samples[i][0], (i + epoch) % 4)

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def files_written_again_between_epochs(start: Start):
    class Files(Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, i):
            return torch.from_numpy(np.load(start.folder / f"{i}.npy")), i % 4

    def change(epoch):
        for i in range(48):
            np.save(start.folder / f"{i}.npy", np.full(8, i / 48 + epoch, dtype=np.float32))

    change(0)
    return train(start, Files(), change, epochs=20)


@KIND.add(forced=IN_MEMORY)
def dataset_that_reads_a_global(start: Start):
    class Noisy(Points):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return NOISE["scale"] * x, y

    NOISE["scale"] = 1.0
    return train(start, Noisy(), lambda epoch: NOISE.update(scale=1 / (1 + epoch)))


@KIND.add(forced=IN_MEMORY)
def attribute_two_wrappers_below(start: Start):
    class Wrapper(Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, i):
            return self.dataset[i]

    class Blurred(Points):
        strength = 0

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x if not self.strength else (x + x.roll(self.strength)) / 2, y

    data = Blurred()
    return train(start, Wrapper(Wrapper(data)), lambda epoch: setattr(data, "strength", epoch // 3))


@KIND.add(forced=IN_MEMORY)
def memory_map_written_by_the_script(start: Start):
    class Mapped(Dataset):
        def __init__(self, path):
            self.x = np.memmap(path, dtype=np.float32, mode="r", shape=(96, 8))

        def __len__(self):
            return 96

        def __getitem__(self, i):
            return torch.from_numpy(self.x[i] + np.float32(decoded(8))), i % 4

    path = start.folder / "features.bin"
    np.arange(768, dtype=np.float32).tofile(path)
    written = np.memmap(path, dtype=np.float32, mode="r+", shape=(96, 8))

    def change(epoch):  # features of the present model, as in two-stage training
        written[epoch % 3 :: 3] = np.sin(np.arange(8) + epoch)
        written.flush()

    return train(start, Mapped(path), change)


@KIND.add(forced=IN_MEMORY)
def arrays_in_a_dict_replaced(start: Start):
    class Tables(Dataset):
        def __init__(self):
            self.tables = {"x": np.random.randn(96, 8).astype(np.float32), "y": np.arange(96) % 4}

        def __len__(self):
            return len(self.tables["y"])

        def __getitem__(self, i):
            return self.tables["x"][i] + np.float32(decoded(8)), self.tables["y"][i]

    data = Tables()

    def change(epoch):
        if epoch % 4 == 3:
            data.tables["x"] = np.roll(data.tables["x"], 1, axis=0)

    return train(start, data, change, epochs=20)


@KIND.add(forced=IN_MEMORY)
def labels_written_through_numpy(start: Start):
    data = points()
    labels = data.tensors[1].numpy()

    def change(epoch):
        labels[epoch::7] = epoch % 4

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def inputs_written_through_data(start: Start):
    data = points()

    def change(epoch):  # adversarial examples replace the inputs; .data does not count as a write
        data.tensors[0].data[epoch::9] += 0.1 * torch.ones(8)

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def buffer_that_shrinks(start: Start):
    class Buffer(Dataset):
        def __init__(self):
            self.items = [(torch.full((8,), i / 100), i % 4) for i in range(160)]

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            x, y = self.items[i]
            return x + decoded(8), y

    data = Buffer()

    def change(epoch):
        if epoch % 2:
            del data.items[::12]

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def negatives_drawn_again_each_epoch(start: Start):
    class Ranked(Dataset):
        def __init__(self):
            self.users, self.rng = torch.randn(96, 4), np.random.default_rng(3)
            self.resample()

        def resample(self):
            self.negatives = self.rng.integers(0, 96, 96)

        def __len__(self):
            return 96

        def __getitem__(self, i):
            return torch.cat([self.users[i], self.users[self.negatives[i]]]), i % 4

    data = Ranked()
    return train(start, data, lambda epoch: data.resample())


@KIND.add(forced=IN_MEMORY)
def difficulty_in_a_shared_array(start: Start):
    class Graded(Points):
        def __init__(self):
            super().__init__()
            self.shift = multiprocessing.Array(ctypes.c_float, 8)

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.tensor(self.shift[:]), y

    data = Graded()

    def change(epoch):
        data.shift[epoch % 8] += 0.5

    return train(start, data, change)


@KIND.add(forced=IN_MEMORY)
def labels_changed_in_the_middle_of_an_epoch(start: Start):
    data = Points()

    class Change:
        def __call__(self, epoch):
            pass

        def within(self, epoch):
            data.y[:] = (data.y + epoch) % 4

    return train(start, data, Change(), shuffle=False)


@KIND.add(forced=IN_MEMORY)
def collate_that_follows_a_schedule(start: Start):
    state = {"keep": 8}

    def collate(samples):
        x = torch.stack([x for x, _ in samples])
        return torch.where(torch.arange(8) < state["keep"], x, 0.0), torch.tensor([y for _, y in samples])

    return train(start, Points(), lambda epoch: state.update(keep=8 - epoch // 3), collate_fn=collate)


@KIND.add(forced=IN_MEMORY)
def dataset_that_asks_the_model(start: Start):
    """Pseudo-labels by a snapshot of the model, which the script takes before each epoch."""
    teacher = mlp()

    class Labeled(Points):
        def __getitem__(self, i):
            x, _ = super().__getitem__(i)
            with torch.no_grad():
                return x, int(teacher(x).argmax())

    def change(epoch):
        with torch.no_grad():
            for p in teacher.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(epoch)))

    return train(start, Labeled(), change)


@KIND.cases()
def test_changing_data(situation, form, way):
    check(situation, form, way)
