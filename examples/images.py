"""Classification of image files: decoded once, kept in memory, and cropped at random in each epoch.

    python examples/images.py --epochs 10
    python examples/images.py --folder ~/photos --size 224     # photos/<class>/<name>.jpg

Needs torchvision, and simplejpeg for faster decoding. Without --folder, the script draws its images.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import flatout

SHAPES = {"ellipses": ImageDraw.ImageDraw.ellipse, "rectangles": ImageDraw.ImageDraw.rectangle}


def draw_images(folder, count):
    """Write JPEG files of two classes: ellipses and rectangles on noise."""
    random = np.random.default_rng(0)
    for i in range(count):
        name = list(SHAPES)[i % 2]
        image = Image.fromarray(random.integers(0, 120, (375, 500, 3), dtype=np.uint8))
        left, top = random.integers(20, 150, 2)
        color = tuple(random.integers(150, 256, 3).tolist())
        SHAPES[name](ImageDraw.Draw(image), (left, top, left + 280, top + 200), fill=color)
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{i:04}.jpg", quality=90)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", help="one folder for each class, with its files")
    parser.add_argument("--images", type=int, default=512, help="number of images that are drawn")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=96, help="height and width of the crops")
    parser.add_argument("--model", default="resnet18", help="name of a model of torchvision")
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        if args.folder is None:
            draw_images(Path(made), args.images)
        augment = [transforms.RandomResizedCrop(args.size, scale=(0.3, 1.0)), transforms.RandomHorizontalFlip()]
        floats = [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
        dataset = ImageFolder(args.folder or made, transforms.Compose(augment + floats))
        loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
        model = torchvision.models.get_model(args.model, num_classes=len(dataset.classes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        run = flatout.optimize(model, loader, optimizer, cross_entropy, expected_steps=args.epochs * len(loader))
        for epoch in range(1, args.epochs + 1):
            losses = [run.step(batch) for batch in run.loader]
            print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")
        print(run.report)


if __name__ == "__main__":
    main()
