"""The script averages its weights in one flat vector, and clips gradients by a flat norm."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
average = parameters_to_vector(model.parameters()).detach().clone()
for _ in range(400):
    x = torch.randn(16, 3, 12, 12)
    optimizer.zero_grad()
    cross_entropy(model(x), x[:, 0, 0, :4].argmax(1)).backward()
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    for p in model.parameters():
        p.grad.mul_(min(1.0, 1.0 / flat.norm().item()))
    optimizer.step()
    average = 0.9 * average + 0.1 * torch.cat([p.data.view(-1) for p in model.parameters()])
print(f"{average.norm().item():.2f}", all(p.is_contiguous() for p in model.parameters()))
