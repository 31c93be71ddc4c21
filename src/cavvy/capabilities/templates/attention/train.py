"""Self-attention step by step. A small transformer divides the image of a digit into 16 patches and
classifies it. The script prints which patches the transformer attends to.

python train.py --epochs 30
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cavvy import train

PATCHES = 16  # patches of 2x2 pixels


class Attention(nn.Module):
    """For each patch, computes a mean of the values of all patches, weighted by how well query and
    key match.

    Each head computes `softmax(q k' / sqrt(d)) v`. F.scaled_dot_product_attention computes the same
    result as this class. It is much faster for long sequences, but does not return the attention
    weights, which this script plots.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ask = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weights = torch.empty(0)  # attention of the last call: (batch, head, patch, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, places, width = x.shape
        parts = (
            self.ask(x)
            .view(batch, places, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        question, key, value = parts.unbind(0)
        agreement = question @ key.transpose(-2, -1) / question.shape[-1] ** 0.5
        weights = agreement.softmax(-1)
        self.weights = weights.detach()
        return self.out((weights @ value).transpose(1, 2).reshape(batch, places, width))


class AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads=4)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.think(self.between(x))


class Transformer(nn.Module):
    """Embeds the patches and their positions, applies the blocks, and classifies the mean of all
    patches.
    """

    def __init__(self, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.place = nn.Parameter(torch.zeros(PATCHES, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width) for _ in range(blocks)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        return self.out(self.blocks(x).mean(1))


def show(weights: torch.Tensor) -> str:
    """Return a text picture of the attention to each patch of one image; the denser the character,
    the more attention the patch gets.
    """
    looked = weights.mean((0, 1)).view(4, 4)
    return "\n".join(
        "".join(2 * " .:-=+*#%@"[int(9 * v)] for v in row)
        for row in (looked / looked.max()).tolist()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, known = order[:360], order[360:]

    run = train.Run()
    model = run.model(lambda: Transformer(options.width))
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    data = run.data(train.Tensors(images[known], labels[known]), global_batch=64)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)

    device = next(model.parameters()).device
    with torch.no_grad():
        right = (
            (model(images[test].to(device)).argmax(1).cpu() == labels[test]).float().mean().item()
        )
    if run.world.is_first:
        print(f"accuracy {right:.4f} on {len(test)} held-out images, after {run.steps} steps")
        print(f"an image of a {labels[test][0]}, and where the last block attends in it:")
        print(show(model.blocks[-1].attention.weights[0].cpu()))
    run.close()


if __name__ == "__main__":
    main()
