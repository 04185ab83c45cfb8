"""U-Net for segmentation: Dice and cross-entropy, autocast and a loss scaler that are off on a CPU."""

import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

args = arguments(steps=40)


class Discs(Dataset):
    def __init__(self, count, side):
        generator = torch.Generator().manual_seed(0)
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        centers = torch.randint(side // 4, 3 * side // 4, (count, 2), generator=generator)
        self.masks = [((rows - r) ** 2 + (columns - c) ** 2 < (side // 5) ** 2) for r, c in centers.tolist()]
        self.noise = torch.randn(count, 3, side, side, generator=generator)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        mask = self.masks[index]
        return {"image": self.noise[index] + mask, "mask": mask.float()}


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inc, self.down1 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.down2 = DoubleConv(2 * width, 4 * width)
        self.up1, self.conv1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), DoubleConv(4 * width, 2 * width)
        self.up2, self.conv2 = nn.ConvTranspose2d(2 * width, width, 2, 2), DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(torch.cat([x2, self.up1(x)], dim=1))
        return self.outc(self.conv2(torch.cat([x1, self.up2(x)], dim=1)))


def dice_loss(prediction, target, epsilon=1e-6):
    inter = 2 * (prediction * target).sum(dim=(-1, -2))
    sets = prediction.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()


def main(amp=False):
    torch.manual_seed(0)
    side, width, count, batch_size = (32, 4, 8, 2) if args.is_tiny else (64, 16, 128, 8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Discs(count, side), shuffle=True, batch_size=batch_size, num_workers=0, drop_last=True)
    model = UNet(width).to(device=device, memory_format=torch.channels_last)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=amp)
    criterion, log = nn.BCEWithLogitsLoss(), Log()
    while len(log.lines) < args.steps:
        model.train()
        for batch in loader:
            if len(log.lines) == args.steps:
                break
            images = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = batch["mask"].to(device=device)
            with torch.autocast(device.type, enabled=amp):
                masks_pred = model(images)
                loss = criterion(masks_pred.squeeze(1), true_masks)
                loss += dice_loss(torch.sigmoid(masks_pred.squeeze(1)), true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            log.note(loss=loss.item())
        scheduler.step(-log.lines[-1]["loss"])
    log.dump()


if __name__ == "__main__":
    main()
