"""Train a small CNN on the 1,797 handwritten digits that ship inside scikit-learn; resume after any
loss.

A plain PyTorch loop. It reads where to keep its checkpoint from CAVVY_CHECKPOINT_DIR, writes one
after each epoch and, when the machine is about to be taken away (SIGTERM), after the step in hand;
it reports progress by lines in CAVVY_PROGRESS_FILE. Without Cavvy it runs just as well: `python
train.py`.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

CHECKPOINTED = 75  # EX_TEMPFAIL: "saved, run me again"
TEST_IMAGES = 360  # the last fifth of the 1,797 images is never trained on


class Net(nn.Module):
    """Two convolutions and two linear layers over an 8x8 grey image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(F.relu(self.hidden(x.flatten(1))), 0.25, self.training)
        return self.out(x)


def load_images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (N, 1, 8, 8) scaled to 0..1 and labels (N,), for training and for testing."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (
        images[:-TEST_IMAGES],
        labels[:-TEST_IMAGES],
        images[-TEST_IMAGES:],
        labels[-TEST_IMAGES:],
    )


def shift(images: torch.Tensor) -> torch.Tensor:
    """Move the batch by up to one pixel: more images than there are."""
    dx, dy = (int(n) for n in torch.randint(-1, 2, (2,)))
    return torch.roll(images, (dy, dx), (2, 3))


class Checkpoint:
    """The newest complete state in a folder; a half-written one is never the newest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.pt"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: dict[str, Any]) -> None:
        half = self.path.with_suffix(".half")
        with half.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        half.rename(self.path)

    def load(self) -> dict[str, Any] | None:
        return torch.load(self.path, weights_only=True) if self.path.exists() else None


def report(**values: float | str) -> None:
    path = os.environ.get("CAVVY_PROGRESS_FILE")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(values) + "\n")


class Training:
    """Model, optimizer and how far they are; what a checkpoint keeps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.batch, self.epochs = arguments.batch, arguments.epochs
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.train_x, self.train_y, self.test_x, self.test_y = (
            tensor.to(self.device) for tensor in load_images()
        )
        self.model = Net(arguments.width).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr)
        self.epoch, self.step, self.accuracy = 0, 0, 0.0
        self.steps = len(self.train_y) // self.batch  # of one epoch
        self.kept_s, self.started = 0.0, time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds of work so far, over all attempts."""
        return self.kept_s + time.monotonic() - self.started

    def state(self) -> dict[str, Any]:
        progress = {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.spent_s,
            "rng": torch.get_rng_state(),
        }
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **progress,
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.epoch, self.step, self.kept_s = state["epoch"], state["step"], state["seconds"]

    def run_epoch(self, leaving: list[int]) -> float:
        """Train to the end of this epoch, or until asked to leave; return the last loss."""
        order = torch.randperm(
            len(self.train_y), generator=torch.Generator().manual_seed(self.epoch)
        ).to(self.device)
        self.model.train()
        loss = torch.zeros(())
        while self.step < self.steps and not leaving:
            chosen = order[self.step * self.batch : (self.step + 1) * self.batch]
            loss = F.cross_entropy(self.model(shift(self.train_x[chosen])), self.train_y[chosen])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        if self.step == self.steps:
            self.epoch, self.step = self.epoch + 1, 0
            self.accuracy = self.test()
        return loss.item()

    @torch.no_grad()
    def test(self) -> float:
        self.model.eval()
        return (self.model(self.test_x).argmax(1) == self.test_y).float().mean().item()

    def tell(self, loss: float) -> None:
        left = self.spent_s / self.epoch * (self.epochs - self.epoch)
        if self.epochs <= 10 or self.epoch % (self.epochs // 2) == 0:  # progress tells of each
            print(
                f"epoch {self.epoch:3d}/{self.epochs}  loss {loss:.4f}  "
                f"accuracy {self.accuracy:.4f}  {left:.0f} s left",
                flush=True,
            )
        figures = {
            "loss": round(loss, 4),
            "accuracy": round(self.accuracy, 4),
            "left_s": round(left, 1),
        }
        report(done=self.epoch, total=self.epochs, unit="epochs", **figures)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=48, help="channels of the first convolution")
    return parser.parse_args()


def main() -> int:
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads wait for each other longer than such small layers take
    training = Training(read_arguments())
    checkpoint = Checkpoint(Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints")))
    if state := checkpoint.load():
        training.resume(state)
        print(
            f"resumed at epoch {training.epoch}, step {training.step}: {training.kept_s:.1f} s of "
            "work kept",
            flush=True,
        )
    else:
        parameters = sum(p.numel() for p in training.model.parameters())
        print(
            f"{parameters:,} parameters, {len(training.train_y)} images, on {training.device}",
            flush=True,
        )
    while training.epoch < training.epochs:
        loss = training.run_epoch(leaving)
        checkpoint.save(training.state())
        if leaving:
            print(
                f"asked to leave: saved at epoch {training.epoch}, step {training.step}", flush=True
            )
            return CHECKPOINTED
        training.tell(loss)
    print(
        f"accuracy {training.test():.4f} on {TEST_IMAGES} images never trained on, "
        f"{training.spent_s:.1f} s",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
