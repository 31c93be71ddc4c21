"""The classic example of distributed training, on digits: each process has the whole model and
reads its share of each batch.

    torchrun --nproc-per-node 2 train.py

The global batch is 64 for any number of processes, so the result does not depend on their number. A
run that lost a node continues with fewer processes.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from cavvy import train


class MnistNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Conv2d(1, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(
                nn.Dropout(0.25),
                nn.Flatten(),
                nn.Linear(64 * 16, 128),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(128, 10),
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.003)
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, known = order[:360], order[360:]

    run = train.Run(plan=train.Plan(micro_batch=64))  # DDP over all processes
    model = run.model(MnistNet)
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    data = run.data(train.Tensors(images[known], labels[known]), global_batch=64)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer)
        run.log(loss=value)

    # Each process tests its share of the images, and the counts are summed over all processes.
    model.eval()
    device = next(model.parameters()).device
    mine = test[run.world.rank :: run.world.size]
    with torch.no_grad():
        right = int((model(images[mine].to(device)).argmax(1).cpu() == labels[mine]).sum())
    right = sum(run.world.gather(right))
    if run.world.is_first:
        share = right / len(test)
        print(
            f"accuracy {share:.4f} on {len(test)} images, after {run.steps} steps on "
            f"{run.world.size} processes"
        )
    run.close()


if __name__ == "__main__":
    main()
