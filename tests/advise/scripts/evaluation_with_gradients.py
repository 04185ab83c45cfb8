"""Training whose evaluation records gradients."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(1024, 32), torch.randint(3, (1024,)))
train_loader = DataLoader(data, batch_size=64, shuffle=True)
test_loader = DataLoader(data, batch_size=64)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def accuracy(loader):
    model.eval()
    right = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()  # planted
    return right / len(data)


for _ in range(200):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    result = accuracy(test_loader)
