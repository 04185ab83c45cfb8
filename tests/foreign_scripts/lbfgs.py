"""Sine waves by LSTM cells and LBFGS, whose closure is called several times in an update."""

import torch
from run_log import Log, arguments
from torch import nn, optim

args = arguments(steps=12)
waves, length, hidden = (4, 20, 8) if args.is_tiny else (64, 100, 51)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, inputs):
        outputs = []
        h1, c1, h2, c2 = (torch.zeros(len(inputs), hidden, dtype=inputs.dtype) for _ in range(4))
        for step in inputs.split(1, dim=1):
            h1, c1 = self.lstm1(step, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
phases = torch.randint(-4 * 20, 4 * 20, (waves, 1)).double()
data = torch.sin((torch.arange(length + 1) + phases) / 20)
inputs, target = data[:, :-1], data[:, 1:]
seq, criterion, log = Sequence().double(), nn.MSELoss(), Log()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
for _ in range(args.steps):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(inputs), target)
        loss.backward()
        return loss

    log.note(loss=optimizer.step(closure).item())
log.dump()
