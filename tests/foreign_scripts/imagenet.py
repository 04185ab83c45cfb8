"""ResNet of torchvision on augmented images."""

import time

import torch
import torchvision
from run_log import Log, arguments
from torch import nn
from torchvision.transforms import v2

args = arguments(steps=40)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, predicted = output.topk(max(topk), 1)
        correct = predicted.eq(target.view(-1, 1))
        return [correct[:, :k].any(1).float().mean() * 100 for k in topk]


def train(loader, model, criterion, optimizer, device, log):
    batch_time, top1 = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for images, target in loader:
        if len(log.lines) == args.steps:
            return
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, _ = accuracy(output, target, topk=(1, 5))
        top1.update(acc1.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end, 1)
        end = time.time()
        log.note(loss=loss.item())


def main():
    torch.manual_seed(0)
    side, count, batch_size = (32, 16, 4) if args.is_tiny else (64, 512, 16)
    crop = v2.Compose(
        [
            v2.RandomResizedCrop(side, scale=(0.5, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = torchvision.datasets.FakeData(count, (3, side, side), 10, transform=v2.Compose([v2.PILToTensor(), crop]))
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torchvision.models.resnet18(num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    log = Log()
    while len(log.lines) < args.steps:
        train(loader, model, criterion, optimizer, device, log)
        scheduler.step()
    log.dump()


if __name__ == "__main__":
    main()
