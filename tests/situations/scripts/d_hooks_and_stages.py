"""Stages of a fine-tuning: a frozen body, then a thawed one, a new head, and a hook for the last steps."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first, seen = model[0].weight.detach().clone(), []
for step in range(900):
    if step == 500:
        model[0].requires_grad_(True)
    if step == 600:
        model[4] = nn.Linear(64, 8)
        optimizer.add_param_group({"params": list(model[4].parameters())})
    if step == 700:
        model[2].register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    optimizer.step()
    if step == 499:
        print("frozen", torch.equal(first, model[0].weight))
print("thawed", not torch.equal(first, model[0].weight), "outputs", model(x).shape[1], "hooked", len(seen))
