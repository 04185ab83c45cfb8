"""The dataset seeks in one open file, and its samples are slow to decode."""

import os
import tempfile

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)
path = os.path.join(tempfile.mkdtemp(), "records.bin")
with open(path, "wb") as file:
    for i in range(200):
        file.write(i.to_bytes(4, "little") * 4096)


class Records(Dataset):
    def __init__(self):
        self.file = open(path, "rb")  # noqa: SIM115

    def __len__(self):
        return 200

    def __getitem__(self, i):
        self.file.seek(i * 16384)
        numbers = torch.frombuffer(bytearray(self.file.read(16384)), dtype=torch.int32).float()
        return numbers.view(64, 64).sort(1).values[:, : 16 + 0 * sum(range(30000))].mean(1), i


model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
wrong = 0
for _ in range(20):
    for x, i in DataLoader(Records(), batch_size=20, shuffle=True):
        wrong += int((x != i[:, None]).any(1).sum())
        optimizer.zero_grad()
        mse_loss(model(x), i[:, None].float()).backward()
        optimizer.step()
print("wrong samples", wrong)
