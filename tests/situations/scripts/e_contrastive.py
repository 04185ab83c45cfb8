"""Two towers whose negatives come from the batch, with unequal batches at the end of an epoch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(300, 16)
loader = DataLoader(TensorDataset(x, x + 0.1 * torch.randn_like(x)), batch_size=64, shuffle=True)
left, right = nn.Linear(16, 8), nn.Linear(16, 8)
optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.05)
for _ in range(120):
    for a, b in loader:
        scores = normalize(left(a)) @ normalize(right(b)).T / 0.3
        loss = cross_entropy(scores, torch.arange(len(a)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"loss {loss.item():.2f}, weights {left.weight.norm().item():.2f} {right.weight.norm().item():.2f}")
