"""Training as in timm: a task that holds model and loss, mixup, and an average of the weights."""

from contextlib import suppress

import numpy as np
import torch
from run_log import Log, arguments
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = arguments(steps=40)


class ClassificationTask(nn.Module):
    def __init__(self, model, criterion):
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, x, target):
        output = self.model(x)
        return {"loss": self.criterion(output, target), "output": output}


def main():
    torch.manual_seed(42)
    np.random.seed(42)
    side, count, batch_size = (32, 16, 4) if args.is_tiny else (64, 512, 16)
    images, targets = torch.randn(count, 3, side, side), torch.randint(10, (count,))
    loader = DataLoader(TensorDataset(images, targets), batch_size=batch_size, shuffle=True, drop_last=True)
    model = create_model(
        "vit_tiny_patch16_224", img_size=side, patch_size=8, num_classes=10, depth=2 if args.is_tiny else 6
    )
    task, ema = ClassificationTask(model, SoftTargetCrossEntropy()), ModelEmaV3(model, decay=0.99)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.steps, warmup_t=2, warmup_lr_init=1e-5, t_in_epochs=False)
    amp_autocast, log = suppress, Log()
    while len(log.lines) < args.steps:
        task.train()
        for inputs, target in loader:
            if len(log.lines) == args.steps:
                break
            inputs, target = mixup(inputs, target)
            with amp_autocast():
                result = task(inputs, target)
            loss = result["loss"]
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model, step=len(log.lines))
            scheduler.step_update(len(log.lines))
            log.note(loss=loss.item())
        ema.module.eval()
        with torch.inference_mode():
            ema.module(images[:4])
    log.dump()


if __name__ == "__main__":
    main()
