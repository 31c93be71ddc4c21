"""Data-parallel training over MPI in the style of Horovod: broadcast the weights, then average the
gradients.

    mpirun -np 4 python train.py

Horovod's last release (0.28.1) does not build against current PyTorch. Therefore this program
implements the functions of Horovod that it needs, under the same names, in thirty lines over MPI.
If Horovod is installed, the program uses Horovod instead (untested). For new programs, DDP with
torchrun (template mnist-ddp) is faster and better maintained.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))

try:
    import horovod.torch as hvd
except ImportError:
    from mpi4py import MPI

    class hvd:
        """The functions of Horovod that this program needs."""

        @staticmethod
        def init() -> None:
            torch.set_num_threads(1)

        rank = MPI.COMM_WORLD.Get_rank
        size = MPI.COMM_WORLD.Get_size

        @staticmethod
        def broadcast_parameters(state, root_rank: int) -> None:
            for value in state.values():
                value.copy_(torch.as_tensor(MPI.COMM_WORLD.bcast(value.numpy(), root_rank)))

        @staticmethod
        def allreduce(value: torch.Tensor, name: str = "") -> torch.Tensor:
            total = torch.empty_like(value)
            MPI.COMM_WORLD.Allreduce(value.contiguous().numpy(), total.numpy())
            return total / MPI.COMM_WORLD.Get_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    hvd.init()

    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, known = order[:360], order[360:]

    torch.manual_seed(hvd.rank())  # The weights differ until the broadcast makes them equal.
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    kept, first = FOLDER / "model.pt", 0
    if hvd.rank() == 0 and kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["epochs"]
        print(f"continuing after {first} passes")
    with torch.no_grad():
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    first = int(
        hvd.allreduce(torch.tensor([float(first)]), name="first")[0] * hvd.size()
    )  # The other ranks send 0.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)

    for epoch in range(first, options.epochs):
        shuffled = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled.split(64):
            mine = batch[hvd.rank() :: hvd.size()]  # this rank's share of the batch
            optimizer.zero_grad()
            loss = (
                F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
                / len(batch)
                * hvd.size()
            )
            loss.backward()
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = hvd.allreduce(parameter.grad, name=str(number))
            optimizer.step()
        if hvd.rank() == 0:
            FOLDER.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "epochs": epoch + 1}, FOLDER / "half.pt")
            (FOLDER / "half.pt").replace(kept)
            print(f"pass {epoch + 1}: loss {float(loss):.4f}", flush=True)

    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        weights = torch.cat([p.flatten() for p in model.parameters()])
        apart = float((hvd.allreduce(weights, name="weights") - weights).abs().max())
    if hvd.rank() == 0:
        print(
            f"accuracy {right:.4f} on 360 held-out images, on {hvd.size()} processes, "
            f"whose weights differ by {apart:.1e}"
        )


if __name__ == "__main__":
    main()
