"""Training that multiplies large matrices in fp32."""

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(256, 256), torch.randint(10, (256,))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10**6):
    optimizer.zero_grad()
    out = model(x)  # planted
    functional.cross_entropy(out, y).backward()
    optimizer.step()
