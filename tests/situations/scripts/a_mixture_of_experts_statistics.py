"""The routing counts its choices in a NumPy array, and prints them."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
torch.set_num_threads(1)
chosen = np.zeros(4, dtype=np.int64)


class Routed(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Linear(16, 4) for _ in range(4)])

    def forward(self, x):
        Routed.calls += 1
        gates = self.route(x).softmax(1)
        best = gates.argmax(1)
        np.add.at(chosen, best.numpy(), 1)
        if Routed.calls % 100 == 0:
            print("call", Routed.calls, "samples", chosen.sum())
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return outs[torch.arange(len(x)), best] * gates.gather(1, best[:, None])


model = Routed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(600):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
print("calls", Routed.calls, "samples", chosen.sum())
