"""Autoencoder as a LightningModule, with a validation loop and a schedule."""

import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)
pixels, hidden, count, batch_size = (64, 16, 32, 8) if args.is_tiny else (784, 512, 6400, 64)


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 8))
        self.decoder = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, pixels))
        self.losses = Log()

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.note(loss=outputs["loss"].item())

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self(x), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    data = torch.rand(count, 4) @ torch.rand(4, pixels)
    train_loader = DataLoader(TensorDataset(data), batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(TensorDataset(data[: count // 4]), batch_size=batch_size)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=args.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    model = LitAutoEncoder()
    trainer.fit(model, train_loader, val_loader)
    model.losses.dump()


if __name__ == "__main__":
    main()
