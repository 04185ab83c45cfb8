"""CNN on images of digits, with a schedule by epochs and an evaluation after each."""

import torch
import torch.nn.functional as F
from run_log import Log, arguments
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

args = arguments(steps=40)


class Digits(Dataset):
    """Images with a bright square, whose place is the class."""

    def __init__(self, count, transform=None):
        generator = torch.Generator().manual_seed(count)
        self.targets = torch.randint(10, (count,), generator=generator)
        self.images = torch.randint(0, 60, (count, 28, 28), generator=generator, dtype=torch.uint8)
        for image, target in zip(self.images, self.targets.tolist(), strict=True):
            row, column = divmod(target, 5)
            image[4 + 10 * row : 12 + 10 * row, 1 + 5 * column : 6 + 5 * column] = 220
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, target = self.images[index], int(self.targets[index])
        return (self.transform(image) if self.transform else image), target


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def normalize(image):
    return ((image.float() / 255 - 0.1307) / 0.3081).unsqueeze(0)


def train(model, device, loader, optimizer, log):
    model.train()
    for data, target in loader:
        if len(log.lines) == args.steps:
            return
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        log.note(loss=loss.item())


def test(model, device, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    print(f"Test set: {len(loader.dataset)} images")
    return test_loss / len(loader.dataset), correct


def main():
    torch.manual_seed(1)
    device = torch.device("cpu")
    count, batch_size = (32, 8) if args.is_tiny else (6400, 64)
    train_loader = DataLoader(Digits(count, normalize), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(Digits(count // 8, normalize), batch_size=4 * batch_size)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    log = Log()
    while len(log.lines) < args.steps:
        train(model, device, train_loader, optimizer, log)
        test(model, device, test_loader)
        scheduler.step()
    log.dump()


if __name__ == "__main__":
    main()
