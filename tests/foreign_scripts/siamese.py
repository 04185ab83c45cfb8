"""Siamese network: one backbone is called twice inside the model, for the two images of a pair."""

import torch
from run_log import Log, arguments
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

args = arguments(steps=40)


class Pairs(Dataset):
    def __init__(self, count, side):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (count,), generator=generator)
        patterns = torch.randn(4, 1, side, side, generator=generator)
        self.images = patterns[self.labels] + 0.5 * torch.randn(count, 1, side, side, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        other = (index * 7 + 3) % len(self)
        same = (self.labels[index] == self.labels[other]).float()
        return self.images[index], self.images[other], same


class SiameseNetwork(nn.Module):
    def __init__(self, side, width):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
        )  # fmt: skip
        features = 2 * width * (side // 4) ** 2
        self.fc = nn.Sequential(nn.Linear(2 * features, 64), nn.ReLU(inplace=True), nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, first, second):
        both = torch.cat((self.backbone(first), self.backbone(second)), 1)
        return self.fc(both)


torch.manual_seed(1)
side, width, count, batch_size = (16, 4, 32, 8) if args.is_tiny else (28, 24, 1280, 64)
loader = DataLoader(Pairs(count, side), batch_size=batch_size, shuffle=True)
model, criterion, log = SiameseNetwork(side, width), nn.BCELoss(), Log()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
while len(log.lines) < args.steps:
    model.train()
    for first, second, targets in loader:
        if len(log.lines) == args.steps:
            break
        optimizer.zero_grad()
        outputs = model(first, second).squeeze(1)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        log.note(loss=loss.item())
log.dump()
