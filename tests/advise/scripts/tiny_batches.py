"""Training with two samples in a batch."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(4096, 16), torch.randint(3, (4096,)))
loader = DataLoader(data, batch_size=2, shuffle=True)  # planted
layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
