"""One trial of the sweep: trains a small network on digits and prints its accuracy after each pass.

python train.py --epochs 20 --lr 0.003 --width 16
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cavvy import train


class SweepNet(nn.Module):
    """Two convolutions with normalization and a linear layer, for 8x8 images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width * 4, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    device = next(model.parameters()).device
    model.eval()
    right = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, known = order[:360], order[360:]

    run = train.Run()
    model = run.model(lambda: SweepNet(options.width))
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    data = run.data(train.Tensors(images[known], labels[known]), global_batch=64)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    passes = len(known) // 64  # number of steps in one pass
    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)
        if run.steps % passes == 0:
            right = accuracy(model, images[test], labels[test])
            if run.world.is_first:  # sweep.py reads these lines
                print(f"pass {run.steps // passes}: accuracy {right:.4f}", flush=True)

    run.close()


if __name__ == "__main__":
    main()
