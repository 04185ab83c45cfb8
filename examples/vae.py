"""Variational autoencoder in plain PyTorch, without a line of flatout, for ``flatout run`` and ``flatout advise``.

    python examples/vae.py
    flatout run examples/vae.py --epochs 20         # the same training, tuned while it trains
    flatout advise examples/vae.py                  # changes nothing: causes by line, and gains

``flatout run`` writes its receipt to flatout-report.html. The line ``flatout.auto()`` in a script does the same.
Needs scikit-learn, which contains the images.
"""

import argparse
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def loss_fn(logits, mean, log_variance, images):
    """Return the negative evidence lower bound per image, in nats."""
    reconstruction = binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (reconstruction + divergence) / len(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--steps", type=int, help="steps of an epoch (default: all)")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.from_numpy(load_digits().data).float() / 16  # [N, 64]
    loader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True)
    model = VAE(width=400, latent=8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(1, args.epochs + 1):
        total, steps = 0.0, 0
        for (batch,) in islice(loader, args.steps):
            batch = batch.to(device)
            optimizer.zero_grad()
            loss = loss_fn(*model(batch), batch)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        if epoch % max(1, args.epochs // 10) == 0:
            print(f"epoch {epoch}: loss {total / steps:.4f}")
    print(f"last loss {total / steps:.4f} nats per image")


if __name__ == "__main__":
    main()
