"""The script profiles itself with cProfile and a tracer, and prints how often its functions ran."""

import cProfile
import pstats
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.body(x)


def train(steps):
    for _ in range(steps):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
profile = cProfile.Profile()
profile.runcall(train, 300)
print(sorted(c[0] for (file, _, name), c in pstats.Stats(profile).stats.items() if file == __file__))
calls = []
sys.setprofile(
    lambda frame, event, arg: calls.append(1) if event == "call" and frame.f_code.co_name == "train" else None
)
train(100)
sys.setprofile(None)
print(len(calls))
