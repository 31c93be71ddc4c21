"""A simple recurrent network that reads handwritten digits row by row, in eight steps of 8 pixels.

python train.py --epochs 60
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cavvy import train


class Reader(nn.Module):
    """h(t) = tanh(W x(t) + U h(t-1)). The digit is predicted from the last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.again = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 10)
        nn.init.orthogonal_(
            self.again.weight
        )  # With an orthogonal matrix, early rows have as much influence as late ones.

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state = rows.new_zeros(len(rows), self.again.in_features)
        for row in rows.unbind(1):
            state = torch.tanh(self.enter(row) + self.again(state))
        return self.out(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    digits = load_digits()
    rows, labels = (
        torch.tensor(digits.images, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, known = order[:360], order[360:]

    run = train.Run()
    model = run.model(lambda: Reader(options.width))
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    data = run.data(train.Tensors(rows[known], labels[known]), global_batch=64)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer, clip=1.0)  # Recurrent networks need gradient clipping.
        run.log(loss=value)

    device = next(model.parameters()).device
    with torch.no_grad():
        right = (model(rows[test].to(device)).argmax(1).cpu() == labels[test]).float().mean().item()
    if run.world.is_first:
        print(f"accuracy {right:.4f} on {len(test)} held-out images, after {run.steps} steps")
    run.close()


if __name__ == "__main__":
    main()
