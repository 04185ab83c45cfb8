"""Diffusion model: the loop draws noise and times, and keeps an average of the weights."""

import copy

import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)
side, width, count, batch_size, T = (16, 8, 16, 4, 100) if args.is_tiny else (32, 32, 256, 16, 1000)


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, time_width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(T, width), nn.Linear(width, width), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = ResBlock(width, 2 * width, width), ResBlock(2 * width, 2 * width, width)
        self.up, self.last = ResBlock(3 * width, width, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        t, x = self.embed(t), self.first(x)
        h = self.middle(self.down(F.avg_pool2d(x, 2), t), t)
        return self.last(self.up(torch.cat([F.interpolate(h, scale_factor=2.0), x], dim=1), t))


class EMA:
    def __init__(self, model, beta=0.99):
        self.beta, self.model = beta, copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model):
        for average, current in zip(self.model.parameters(), model.parameters(), strict=True):
            average.data = average.data * self.beta + (1 - self.beta) * current.data


torch.manual_seed(0)
alpha_hat = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, T), dim=0)
images = torch.tanh(torch.randn(count, 3, 1, 1) + 0.2 * torch.randn(count, 3, side, side))
loader = DataLoader(TensorDataset(images), batch_size=batch_size, shuffle=True)
model, mse, log = Denoiser(), nn.MSELoss(), Log()
ema = EMA(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
while len(log.lines) < args.steps:
    for (x,) in loader:
        if len(log.lines) == args.steps:
            break
        t = torch.randint(T, (len(x),))
        noise = torch.randn_like(x)
        a = alpha_hat[t][:, None, None, None]
        predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        loss = mse(noise, predicted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        log.note(loss=loss.item())
log.dump()
