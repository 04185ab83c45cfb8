"""Variational autoencoder, which draws its noise inside the model."""

import torch
from run_log import Log, arguments
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)
pixels, hidden, latent, count, batch_size = (64, 32, 4, 32, 8) if args.is_tiny else (784, 400, 20, 6400, 128)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, pixels))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, pixels), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
images = (torch.rand(count, 1) * torch.rand(pixels)).clamp(0, 1)
loader = DataLoader(TensorDataset(images), batch_size=batch_size, shuffle=True)
model, log = VAE(), Log()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
while len(log.lines) < args.steps:
    model.train()
    for (data,) in loader:
        if len(log.lines) == args.steps:
            break
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        log.note(loss=loss.item() / len(data))
log.dump()
