"""WGAN with a gradient penalty: the critic is differentiated twice, and trained several times as often."""

import torch
from run_log import Log, arguments
from torch import autograd, nn, optim

args = arguments(steps=40)
hidden, batch_size, critic_iters = (32, 16, 2) if args.is_tiny else (512, 256, 5)


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(True), nn.Linear(hidden, hidden), nn.ReLU(True), nn.Linear(hidden, outputs)
    )


def real_batch():
    centers = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    return centers[torch.randint(4, (batch_size,))] + 0.05 * torch.randn(batch_size, 2)


def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(batch_size, 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = netD(interpolates)
    (gradients,) = autograd.grad(out, interpolates, torch.ones_like(out), create_graph=True, retain_graph=True)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 0.1


torch.manual_seed(1)
netG, netD, log = mlp(2, 2), mlp(2, 1), Log()
optimizerD = optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
optimizerG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))
for _ in range(args.steps):
    for p in netD.parameters():
        p.requires_grad = True
    for _ in range(critic_iters):
        real = real_batch()
        with torch.no_grad():
            fake = netG(torch.randn(batch_size, 2))
        netD.zero_grad()
        netD(real).mean().neg().backward()
        netD(fake).mean().backward()
        penalty = calc_gradient_penalty(netD, real, fake)
        penalty.backward()
        optimizerD.step()
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    loss = -netD(netG(torch.randn(batch_size, 2))).mean()
    loss.backward()
    optimizerG.step()
    log.note(loss=loss.item(), penalty=penalty.item())
log.dump()
