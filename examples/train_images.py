"""Image classification: augmentation of torchvision, loader workers, evaluation, and checkpoints that resume.

    python examples/train_images.py                     # stop it with Ctrl-C, and start it again: training resumes
    python examples/train_images.py --epochs 2 --steps 5 --batch-size 16 --model shufflenet_v2_x0_5

Needs torchvision, and scikit-learn for the images.
"""

import argparse

import torch
import torchvision
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

import flatout

TO_FLOATS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.3] * 3, [0.36] * 3)]
AUGMENT = [v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1)), v2.ColorJitter(brightness=0.2, contrast=0.2)]


class Images(Dataset):
    """Digits of scikit-learn, in place of ``torchvision.datasets.ImageFolder(folder, transform)``."""

    def __init__(self, transform):
        digits = load_digits()
        images = torch.from_numpy(digits.images * 15.9).to(torch.uint8)  # [N, 8, 8]
        self.images = v2.functional.resize(images.unsqueeze(1).expand(-1, 3, -1, -1), [32, 32])
        self.labels, self.transform = digits.target, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def accuracy(outputs, batch):
    return (outputs.argmax(1) == batch[1]).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10, help="of the whole training, with earlier starts")
    parser.add_argument("--steps", type=int, default=22, help="steps of an epoch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="resnet18", help="name of a model of torchvision")
    parser.add_argument("--checkpoints", default="checkpoints/images", help="folder of this training's checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    order = torch.randperm(1797).tolist()
    train = Subset(Images(v2.Compose(AUGMENT + TO_FLOATS)), order[360:][: args.steps * args.batch_size])
    held_out = DataLoader(Subset(Images(v2.Compose(TO_FLOATS)), order[:360]), batch_size=120)
    loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers)
    loader = flatout.data.seed_samples(loader)  # equal augmentation with any number of workers, and after a restart
    model = torchvision.models.get_model(args.model, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4 * len(loader), gamma=0.3)

    plan = flatout.Plan.from_checkpoints(args.checkpoints) or "cached"  # the decisions of the earlier process
    steps = args.epochs * len(loader)
    run = flatout.optimize(
        model, loader, optimizer, cross_entropy, scheduler=scheduler, expected_steps=steps, plan=plan
    )
    history = run.fit(args.epochs, held_out, {"accuracy": accuracy}, checkpoint_dir=args.checkpoints)

    print(run.report)
    for epoch, row in enumerate(history, 1):
        print(f"epoch {epoch}: loss {row['loss']:.4f}, held-out accuracy {row['eval_accuracy']:.1%}")
    print(f"{run.stats.steps} of {run.steps} updates ran in this process")


if __name__ == "__main__":
    main()
