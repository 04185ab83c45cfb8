"""Handwritten digits: a small CNN in a loop of ``run.step``, as in ``flatout demo --job digits``.

    python examples/digits.py
    python examples/digits.py --epochs 5 --steps 10 --batch-size 32

Needs scikit-learn, which contains the images.
"""

import argparse
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, random_split

import flatout


class DigitImages(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images, self.labels = digits.images, digits.target  # [N, 8, 8] with values 0 to 16, and [N]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float().unsqueeze(0) / 16
        return (image - 0.305) / 0.376, int(self.labels[index])


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 4 * width),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(4 * width, 10),
    )


def accuracy(outputs, batch):
    return (outputs.argmax(1) == batch[1]).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="steps of an epoch (default: all)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--expected-steps", type=int, default=50_000, help="flatout decides for a training this long")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = random_split(DigitImages(), [0.8, 0.2])
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = build_model(width=128 if torch.cuda.is_available() else 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = flatout.optimize(model, loader, optimizer, cross_entropy, expected_steps=args.expected_steps)
    for epoch in range(1, args.epochs + 1):
        losses = [run.step(batch) for batch in islice(run.loader, args.steps)]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")  # the only wait for the device in an epoch

    print(run.report)
    result = run.evaluate(DataLoader(held_out, batch_size=256), metrics={"accuracy": accuracy})
    print(f"held-out loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
