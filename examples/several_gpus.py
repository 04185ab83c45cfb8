"""One script for one process and for several: data-parallel under ``torchrun``, with NCCL on GPUs, else with gloo.

    python examples/several_gpus.py
    torchrun --nproc-per-node 2 examples/several_gpus.py
    torchrun --nproc-per-node=gpu examples/several_gpus.py --epochs 20 --batch-size 256

The first two commands print equal losses up to rounding, because a batch is shared by all processes.
Needs scikit-learn, which contains the images.
"""

import argparse
import os
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import flatout


class PatchTransformer(nn.Module):
    """Vision transformer for images of 8x8 pixels, without dropout."""

    def __init__(self, width, layers):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images):  # [N, 1, 8, 8] to [N, 10]
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x + self.position).mean(1))


def accuracy(outputs, batch):
    return (outputs.argmax(1) == batch[1]).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps of an epoch (default: all)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all processes together")
    args = parser.parse_args()
    is_first = os.environ.get("RANK", "0") == "0"

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    train, held_out = random_split(TensorDataset(images, torch.from_numpy(digits.target)), [0.8, 0.2])
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = PatchTransformer(width=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Makes the process group under torchrun. Each process then computes its slice of every batch.
    run = flatout.optimize(model, loader, optimizer, cross_entropy, expected_steps=args.epochs * len(loader))
    for epoch in range(1, args.epochs + 1):
        losses = [run.step(batch) for batch in islice(run.loader, args.steps)]
        if is_first:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean():.6f}")

    result = run.evaluate(DataLoader(held_out, batch_size=256), metrics={"accuracy": accuracy})  # on all processes
    if is_first:
        print(run.report)
        print(f"held-out loss {result['loss']:.6f}, accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
