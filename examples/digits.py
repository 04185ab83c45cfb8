"""Handwritten digits: a small CNN in a loop of ``run.step``. ``flatout demo --job digits`` runs this script.

    python examples/digits.py --epochs 5
    python examples/digits.py --plain    # the same training without flatout

Needs scikit-learn, which contains the images.
"""

import argparse
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class DigitImages(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels  # [N, 8, 8] with values 0 to 16, and [N]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float().unsqueeze(0) / 16
        return (image - 0.3053) / 0.3760, torch.tensor(self.labels[index])


def load():  # 1,437 images to train on, and 360 others
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return [DigitImages(digits.images[part], digits.target[part]) for part in (order[360:], order[:360])]


def build_model(width):
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * width, 4 * width), nn.ReLU(), nn.Dropout(0.25), nn.Linear(4 * width, 10)),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--plain", action="store_true", help="train without flatout")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, held_out = load()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    model = build_model(width=128 if device == "cuda" else 16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if args.plain:

        def step(batch):
            images, labels = batch[0].to(device), batch[1].to(device)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()
    else:
        import flatout  # not above, because --plain measures PyTorch alone

        run = flatout.optimize(model, loader, optimizer, cross_entropy, expected_steps=args.epochs * len(loader))
        step, loader = run.step, run.loader

    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        losses = [step(batch) for batch in loader]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}", flush=True)  # waits for the device
    print(f"trained in {time.perf_counter() - started:.2f} s")
    if not args.plain:
        print(run.report)

    images, labels = next(iter(DataLoader(held_out, batch_size=len(held_out))))
    with torch.inference_mode():
        outputs = model.eval()(images.to(device)).cpu()
    accuracy = (outputs.argmax(1) == labels).float().mean()
    print(f"held-out loss {cross_entropy(outputs, labels):.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
