"""Heat maps that show which parts of an image a network uses, made with Grad-CAM and related
methods.

    python train.py --method grad-cam    # writes heatmaps/grad-cam.png

    with gradients:     Grad-CAM, Grad-CAM++, XGrad-CAM, HiRes-CAM, Layer-CAM, Eigen-Grad-CAM
    without gradients:  Score-CAM (keeps only the bright parts of a channel), Ablation-CAM (removes
                        a channel), Eigen-CAM

Each image is a digit of scikit-learn at a random position on a patch of a photograph. The network
learns to classify the digit without being given its position, so the quality of a map is the share
of its heat within the digit's box. `heat_map` works for any network and any of its convolutions.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import nn
from torch.nn import functional as F

from cavvy import train

SIDE, DIGIT = 32, 16
FOLDER = Path("heatmaps")
METHODS = (
    *("grad-cam", "grad-cam++", "xgrad-cam", "hires-cam", "layer-cam", "eigen-grad-cam"),
    *("score-cam", "ablation-cam", "eigen-cam"),
)


def make_images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create images (N, 3, 32, 32) with values from 0 to 1. Returns the images, their digits, and
    the corner of each digit.
    """
    digits, photos = load_digits(), load_sample_images().images
    random = np.random.default_rng(0)
    order = random.permutation(len(digits.images))
    images = np.empty((len(order), 3, SIDE, SIDE), np.float32)
    corners = random.integers(0, SIDE - DIGIT + 1, (len(order), 2))
    for image, (top, left), number in zip(images, corners, order, strict=True):
        photo = photos[random.integers(2)]
        y, x = random.integers(photo.shape[0] - SIDE), random.integers(photo.shape[1] - SIDE)
        image[:] = photo[y : y + SIDE, x : x + SIDE].transpose(2, 0, 1) / 255 * 0.5
        ink = np.kron(digits.images[number] / 16, np.ones((2, 2)))
        image[:, top : top + DIGIT, left : left + DIGIT] += ink
    return (
        torch.from_numpy(images).clamp(0, 1),
        torch.tensor(digits.target[order]),
        torch.from_numpy(corners),
    )


class GradCamNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        )
        self.out = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(images).amax((2, 3)))


def heat_map(
    model: nn.Module, layer: nn.Module, image: torch.Tensor, method: str, label: int | None = None
):
    """Return a map (H, W) with values from 0 to 1 that shows which parts of `image` (3, H, W)
    support `label`. By default, `label` is the label that the network predicts.

    Most maps are a weighted sum of the channels of the output of `layer`. The methods differ in how
    they compute the weights of the channels or pixels.
    """
    model.eval()
    kept: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        scores = model(image[None])[0]
    finally:
        handle.remove()
    label = int(scores.argmax()) if label is None else label
    (slope,) = torch.autograd.grad(scores[label], kept[0])
    seen, slope, score = kept[0].detach()[0], slope[0], scores[label].detach()  # channels, h, w
    if method == "grad-cam":  # weight of a channel: its mean gradient
        heat = (slope.mean((1, 2), keepdim=True) * seen).sum(0)
    elif method == "grad-cam++":  # each pixel's gradient, weighted by its share of the evidence
        share = _share_evidence(seen, slope)
        heat = ((share * slope.relu()).sum((1, 2), keepdim=True) * seen).sum(0)
    elif method == "xgrad-cam":  # the mean gradient, weighted by the brightness of the channel
        total = seen.sum((1, 2), keepdim=True)
        heat = ((slope * seen).sum((1, 2), keepdim=True) / (total + 1e-7) * seen).sum(0)
    elif method == "hires-cam":  # the weight of a pixel is its own gradient
        heat = (slope * seen).sum(0)
    elif method == "layer-cam":  # the weight of a pixel is its own gradient if that is positive
        heat = (slope.relu() * seen).sum(0)
    elif method == "eigen-cam":  # the pattern that most channels share, for any label
        heat = _agreed(seen)
    elif method == "eigen-grad-cam":  # the shared pattern, restricted to what supports the label
        heat = _agreed(slope * seen)
    elif method == "score-cam":
        masks = F.interpolate(seen[:, None], image.shape[1:], mode="bilinear", align_corners=False)
        low, high = masks.amin((2, 3), keepdim=True), masks.amax((2, 3), keepdim=True)
        with torch.no_grad():
            said = model(image[None] * (masks - low) / (high - low).clamp_min(1e-7)).softmax(1)[
                :, label
            ]
            nothing = model(torch.zeros_like(image[None])).softmax(1)[0, label]
        heat = ((said - nothing)[:, None, None] * seen).sum(0)
    elif method == "ablation-cam":
        left = _without_each(model, layer, image, len(seen))[:, label]
        heat = (((score - left) / (score.abs() + 1e-7))[:, None, None] * seen).sum(0)
    else:
        raise ValueError(f"{method!r} is not one of {', '.join(METHODS)}")
    heat = F.interpolate(
        heat.relu()[None, None], image.shape[1:], mode="bilinear", align_corners=False
    )[0, 0]
    return (heat / heat.max().clamp_min(1e-7)).cpu()


def _share_evidence(seen: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Return the weights (C, h, w) of the gradients in Grad-CAM++: equation 19 of Chattopadhyay et
    al. 2018 (arXiv:1710.11063).

    The paper differentiates the exponential of the score. In a network of linear layers and ReLU,
    the n-th derivative of this exponential by one pixel equals the exponential times g^n, where g
    is the gradient of the score. The exponential cancels out, so the weight is g^2 / (2 g^2 + (sum
    of the channel) g^3).
    """
    second, third = slope**2, slope**3
    whole = 2 * second + seen.sum((1, 2), keepdim=True) * third
    return second / torch.where(whole == 0, 1.0, whole)


def _agreed(seen: torch.Tensor) -> torch.Tensor:
    """Return the first principal component (h, w) of channels (C, h, w)."""
    flat = seen.flatten(1).T
    flat = flat - flat.mean(0)
    heat = (flat @ torch.linalg.svd(flat, full_matrices=False)[2][0]).view(seen.shape[1:])
    # The sign of a component is arbitrary.
    return heat if (heat * seen.sum(0)).sum() > 0 else -heat


@torch.no_grad()
def _without_each(
    model: nn.Module, layer: nn.Module, image: torch.Tensor, channels: int
) -> torch.Tensor:
    """Return scores (channels, classes): row c is computed without channel c of the output of
    `layer`.
    """
    keep = 1 - torch.eye(channels, device=image.device)[:, :, None, None]
    handle = layer.register_forward_hook(lambda _module, _inputs, output: output * keep)
    try:
        return model(image.expand(channels, -1, -1, -1))
    finally:
        handle.remove()


def paint(image: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
    """Return a picture with the image on the left and a copy of the image under a coloured heat map
    on the right.
    """
    colours = torch.stack([(1.5 - (4 * heat - peak).abs()).clamp(0, 1) for peak in (3, 2, 1)])
    return torch.cat([image, 0.5 * image + 0.5 * colours], 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--method", choices=[*METHODS, "all"], default="grad-cam")
    options = parser.parse_args()

    images, labels, corners = make_images()
    run = train.Run()
    model = run.model(GradCamNet)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.003)
    data = run.data(train.Tensors(images[300:], labels[300:]), global_batch=64)
    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)

    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        answers = model(images[:300].to(device)).argmax(1).cpu()
    if run.world.is_first:
        FOLDER.mkdir(exist_ok=True)
        print(f"accuracy {(answers == labels[:300]).float().mean():.4f} on 300 held-out pictures")
        for method in METHODS if options.method == "all" else [options.method]:
            inside, rows = [], []
            for image, (top, left) in zip(images[:24], corners[:24].tolist(), strict=True):
                heat = heat_map(model, model.features, image.to(device), method)
                inside.append(
                    float(
                        heat[top : top + DIGIT, left : left + DIGIT].sum()
                        / heat.sum().clamp_min(1e-7)
                    )
                )
                rows.append(
                    F.pad(paint(image, heat), (1, 1, 1, 1), value=1.0)
                )  # Draw a white frame around each pair.
            picture = torch.cat([torch.cat(rows[n : n + 4], 2) for n in range(0, 24, 4)], 1)
            pixels = (picture.permute(1, 2, 0) * 255).byte().numpy()
            file = FOLDER / f"{method}.png"
            Image.fromarray(pixels).resize((pixels.shape[1] * 4, pixels.shape[0] * 4)).save(file)
            print(
                f"{method}: {np.mean(inside):.2f} of the heat map's sum is in the digit's box, "
                f"which covers 0.25 of the picture: {file}"
            )
    run.close()


if __name__ == "__main__":
    main()
