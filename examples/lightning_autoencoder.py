"""Denoising autoencoder in Lightning, with flatout's callback.

    python examples/lightning_autoencoder.py
    python examples/lightning_autoencoder.py --epochs 2 --steps 10 --batch-size 32

Needs lightning, and scikit-learn for the images.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset, random_split

from flatout.integrations.lightning import FlatoutCallback


class Autoencoder(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())

    def forward(self, images):
        return self.decoder(self.encoder(images))

    def training_step(self, batch, index):
        (images,) = batch
        loss = mse_loss(self(images + 0.2 * torch.randn_like(images)), images)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        (images,) = batch
        self.log("validation_loss", mse_loss(self(images), images))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class PrintLosses(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        shown = ", ".join(f"{name} {float(value):.4f}" for name, value in trainer.callback_metrics.items())
        print(f"epoch {trainer.current_epoch + 1}: {shown}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="steps of an epoch (default: all)")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    images = torch.from_numpy(load_digits().data).float() / 16  # [N, 64]
    train, held_out = random_split(TensorDataset(images), [0.8, 0.2])
    callback = FlatoutCallback()
    trainer = L.Trainer(
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        gradient_clip_val=1.0,
        callbacks=[callback, PrintLosses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    trainer.fit(Autoencoder(width=256), loader, DataLoader(held_out, batch_size=256))

    print(callback.report)
    print(f"validation loss {float(trainer.callback_metrics['validation_loss']):.4f}")


if __name__ == "__main__":
    main()
