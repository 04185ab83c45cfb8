"""A search over learning rates: old models must die, and memory must not grow."""

import gc
import resource
import weakref

import torch
from torch import nn
from torch.nn.functional import mse_loss

torch.manual_seed(0)
torch.set_num_threads(1)
models, early = [], 0
for number in range(60):
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4 * (number + 1))
    for _ in range(12):
        x = torch.randn(64, 256)
        optimizer.zero_grad()
        mse_loss(model(x), x).backward()
        optimizer.step()
    models.append(weakref.ref(model))
    if number == 20:
        early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del model, optimizer
gc.collect()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early
print("alive", sum(model() is not None for model in models) > 2, "grown", grown > 60_000)
