"""Train a small network on as many nodes as the job has. `cavvy.train` joins the ranks of all
nodes, saves checkpoints, and goes on from the newest one on any number of nodes, at the same step.
"""

import argparse
import os

import torch
from torch import nn

from cavvy import train

SAMPLES, BATCH = 1280, 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=30)
    epochs = parser.parse_args().epochs
    run = train.Run("checkpoints", save_every=5.0)
    model = run.model(make_model)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.001)
    inputs = torch.sin(torch.arange(16.0 * SAMPLES).reshape(SAMPLES, 16))
    data = run.data(train.Tensors(inputs, inputs.sum(1, keepdim=True)), global_batch=BATCH)

    def loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(part[0]), part[1])

    first = True
    for batch in run.batches(data, epochs=epochs):
        value = run.accumulate(loss, batch)
        run.step(optimizer)
        run.log(loss=value)
        if first:
            print(f"on {os.environ.get('NNODES', '1')} nodes, step {run.steps}", flush=True)
            first = False


if __name__ == "__main__":
    main()
