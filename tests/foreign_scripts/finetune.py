"""Fine-tuning of a new head on a frozen backbone in eval mode, from a saved and reloaded checkpoint."""

import tempfile
from pathlib import Path

import torch
from run_log import Log, arguments
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)
side, width, count, batch_size = (16, 8, 32, 8) if args.is_tiny else (32, 32, 640, 32)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(width * (side // 4) ** 2, classes)

    def forward(self, x):
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.features(x), side // 4), 1))


def made():
    model = Classifier(5)
    for p in model.features.parameters():
        p.requires_grad = False
    head = [p for p in model.parameters() if p.requires_grad]
    return model, optim.SGD(head, lr=0.01, momentum=0.9)


def train(model, optimizer, loader, steps, log):
    end = len(log.lines) + steps
    while len(log.lines) < end:
        model.train()
        model.features.eval()
        for x, y in loader:
            if len(log.lines) == end:
                return
            with torch.set_grad_enabled(True):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            log.note(loss=loss.item())


def main():
    torch.manual_seed(0)
    x = torch.randn(count, 3, side, side)
    loader = DataLoader(TensorDataset(x, torch.arange(count) % 5), batch_size=batch_size, shuffle=True)
    model, optimizer = made()
    log = Log()
    train(model, optimizer, loader, args.steps // 2, log)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": len(log.lines)}, path)
        checkpoint = torch.load(path, weights_only=True)
    print("resumed at step", checkpoint["step"], sorted(checkpoint["model"]))
    model, optimizer = made()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, loader, args.steps - args.steps // 2, log)
    log.dump()


if __name__ == "__main__":
    main()
