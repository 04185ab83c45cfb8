"""Training that multiplies large matrices in fp32."""

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(512, 512), torch.randint(10, (512,))
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20000):
    optimizer.zero_grad()
    out = model(x)  # planted
    functional.cross_entropy(out, y).backward()
    optimizer.step()
