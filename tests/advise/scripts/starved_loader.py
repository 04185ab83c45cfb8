"""Training whose samples are slow to make: their transform is a module, as those of torchvision are."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class SlowTransform(nn.Module):
    def forward(self, x):
        for _ in range(60):
            x = torch.sin(x)
        return x


class SlowSamples(Dataset):
    transform = SlowTransform()

    def __len__(self):
        return 512

    def __getitem__(self, i):
        return self.transform(torch.full((32,), float(i))), i % 3


loader = DataLoader(SlowSamples(), batch_size=32, num_workers=0)  # planted
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(500):
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
