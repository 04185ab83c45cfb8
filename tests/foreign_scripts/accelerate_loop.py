"""Loop of accelerate: prepared objects, accumulation, clipping, and a schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from run_log import Log, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)
inputs, hidden, count, batch_size = (16, 32, 64, 4) if args.is_tiny else (256, 768, 4096, 32)


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(count, inputs)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion, log = nn.CrossEntropyLoss(), Log()
    while len(log.lines) < args.steps:
        model.train()
        for features, targets in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(features), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                log.note(loss=loss.item())
            if len(log.lines) == args.steps:
                break
    accelerator.print("trained")
    log.dump()


if __name__ == "__main__":
    main()
