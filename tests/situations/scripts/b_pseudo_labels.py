"""Labels in a list of the dataset are replaced by the script after some epochs."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Samples(Dataset):
    def __init__(self):
        self.rows = [(torch.randn(16), 0) for _ in range(400)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return x.sort().values.cumsum(0) / sum(1.0 for _ in range(2000)), y


data = Samples()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=20, shuffle=True)
old = 0
for epoch in range(60):
    label = epoch // 5 % 4
    for i in range(len(data)):
        data.rows[i] = (data.rows[i][0], label)
    for x, y in loader:
        old += int((y != label).sum())
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
print("old labels", old)
