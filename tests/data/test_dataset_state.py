"""State of a map-style dataset as a part of the loader's state."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data import Prefetcher
from tests.data.harness import CopyingPrefetcher


class Counted(Dataset):
    """Dataset whose samples hold the number of earlier reads."""

    def __init__(self):
        self.asked = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.asked += 1
        return torch.tensor([index, self.asked])

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


@pytest.mark.parametrize("kind", [Prefetcher, CopyingPrefetcher])
@pytest.mark.parametrize("read", [0, 2, 4, 6])
def test_a_datasets_state_is_saved_and_restored(kind, read):
    loader = kind(DataLoader(Counted(), 3), "cpu")
    if read == 6:
        assert len(list(loader)) == 4
    batches = iter(loader)
    for _ in range(read % 4):
        next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches] if read % 4 else []
    resumed = kind(DataLoader(Counted(), 3), "cpu")
    resumed.load_state_dict(state)
    assert resumed.state_dict()["dataset"] == state["dataset"]
    if rest:
        assert [batch.tolist() for batch in resumed] == rest


def test_states_in_worker_processes_are_left_out():
    loader = Prefetcher(DataLoader(Counted(), 3, num_workers=1), "cpu")
    next(iter(loader))
    assert "dataset" not in loader.state_dict()
