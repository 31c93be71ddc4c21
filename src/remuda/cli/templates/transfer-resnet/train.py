"""Transfer learning with a ResNet, in the three steps that it always has: freeze, replace the head, fine-tune.

    python train.py base && python train.py tune

No wheel carries the weights of a ResNet, so `base` trains a small one first: on the digits 0 to 4 of scikit-learn.
`tune` then learns the digits 5 to 9 from 100 images alone, and says how a network without that experience does. With
weights of your own, put them into backbone.pt and leave out `base`.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from remuda import train

FOLDER = Path(os.environ.get("REMUDA_CHECKPOINT_DIR", "checkpoints"))
FEW = 100  # images of the new task
PLAIN = train.Plan(shards=1)  # the whole model on each device, so that each can write or read the backbone


class Residual(nn.Module):
    """Two convolutions that say what to change about their input."""

    def __init__(self, come: int, go: int, stride: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            *(nn.Conv2d(come, go, 3, stride, 1, bias=False), nn.BatchNorm2d(go), nn.ReLU()),
            *(nn.Conv2d(go, go, 3, 1, 1, bias=False), nn.BatchNorm2d(go)),
        )
        same = stride == 1 and come == go
        self.carry = nn.Identity() if same else nn.Conv2d(come, go, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.carry(x) + self.change(x))


class ResNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


def load(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of the five digits from `first` on, shuffled."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[(labels[order] >= first) & (labels[order] < first + 5)]
    return images[order], labels[order] - first


def fit(run: train.Run, model: nn.Module, source: train.Tensors, epochs: int, lr: float, params=None) -> None:
    optimizer = run.optimizer(torch.optim.AdamW, params, lr=lr)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(run.data(source, global_batch=50), epochs=epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    device = next(model.parameters()).device
    return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def base(epochs: int, lr: float) -> None:
    images, labels = load(0)
    run = train.Run(FOLDER / "base", plan=PLAIN)
    model = run.model(lambda: ResNet(classes=5))
    fit(run, model, train.Tensors(images[180:], labels[180:]), epochs, lr)
    right = accuracy(model, images[:180], labels[:180])
    if run.world.is_first:
        torch.save(model.backbone.state_dict(), FOLDER / "backbone.pt")
        print(f"backbone: accuracy {right:.4f} on 180 images of the digits 0 to 4")
    run.close()


def frozen(freeze: bool) -> ResNet:
    """The backbone as it was learnt, with a new head; frozen, or free to learn on."""
    model = ResNet(classes=5)
    model.backbone.load_state_dict(torch.load(FOLDER / "backbone.pt", map_location="cpu", weights_only=True))
    for parameter in model.backbone.parameters():
        parameter.requires_grad = not freeze
    if freeze:  # running means stay as they are, too: momentum 0 keeps them
        for layer in model.backbone.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.0
    return model


def tune(epochs: int, lr: float) -> None:
    images, labels = load(5)
    few, test = train.Tensors(images[:FEW], labels[:FEW]), (images[FEW:], labels[FEW:])
    said = []

    run = train.Run(FOLDER / "head", plan=PLAIN)
    model = run.model(lambda: frozen(freeze=True))
    fit(run, model, few, epochs, lr, list(model.head.parameters()))  # only the new head learns
    said.append(("the head alone", accuracy(model, *test)))
    head = {name: value.detach().cpu().clone() for name, value in model.head.state_dict().items()}

    run = train.Run(FOLDER / "tune", plan=PLAIN)

    def tuned() -> ResNet:
        made = frozen(freeze=False)
        made.head.load_state_dict(head)
        return made

    model = run.model(tuned)  # then all of it, in small steps
    fit(run, model, few, epochs, lr / 10)
    said.append(("fine-tuned", accuracy(model, *test)))

    run = train.Run(FOLDER / "scratch", plan=PLAIN)
    model = run.model(lambda: ResNet(classes=5))
    fit(run, model, few, epochs, lr)
    said.append(("without any backbone", accuracy(model, *test)))
    if run.world.is_first:
        for name, right in said:
            print(f"{name}: accuracy {right:.4f} on {len(test[1])} images of the digits 5 to 9")
    run.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["base", "tune"])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.003)
    options = parser.parse_args()
    {"base": base, "tune": tune}[options.stage](options.epochs, options.lr)
