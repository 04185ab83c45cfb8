"""README's loop: a classifier of tensors, without code for ranks."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.distributed.scripts.record import Record

torch.manual_seed(0)
x, y = torch.randn(203, 12), torch.randint(4, (203,))
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

record = Record(sys.argv[1])
run = flatout.optimize(model, loader, optimizer=opt, loss_fn=F.cross_entropy, expected_steps=10 * len(loader))
for _ in range(3):
    for batch in run.loader:
        record.step(batch, run.step(batch))
    record.epoch(model)
record.end(run, model)
