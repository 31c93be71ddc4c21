"""A script for `profile` without cavvy.train. The name of its fault is its argument."""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005 if sys.argv[1] == "data" else 0)
        return torch.full((8,), index / 800), index % 2


def main(fault: str) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Samples(), batch_size=8):
        if fault == "memory":
            time.sleep(0.04)  # the script prepares its batch
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "save":
            torch.save(model.state_dict(), "model.pt")
            time.sleep(0.04)


if __name__ == "__main__":
    main(sys.argv[1])
