"""Train a small CNN on the 1,797 handwritten digits that ship inside scikit-learn; resume after any loss.

A plain PyTorch loop. It reads where to keep its checkpoint from REMUDA_CHECKPOINT_DIR, writes one after each epoch
and, when the machine is about to be taken away (SIGTERM), after the step in hand; it reports progress by lines in
REMUDA_PROGRESS_FILE. Without Remuda it runs just as well: `python train.py`.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

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
    return images[:-TEST_IMAGES], labels[:-TEST_IMAGES], images[-TEST_IMAGES:], labels[-TEST_IMAGES:]


def shift(images: torch.Tensor) -> torch.Tensor:
    """Move the batch by up to one pixel: more images than there are."""
    dx, dy = (int(n) for n in torch.randint(-1, 2, (2,)))
    return torch.roll(images, (dy, dx), (2, 3))


class Checkpoint:
    """The newest complete state in a folder; a half-written one is never the newest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.pt"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: dict[str, object]) -> None:
        half = self.path.with_suffix(".half")
        with half.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        half.rename(self.path)

    def load(self) -> dict[str, object] | None:
        return torch.load(self.path, weights_only=True) if self.path.exists() else None


def report(**values: float | str) -> None:
    path = os.environ.get("REMUDA_PROGRESS_FILE")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=48, help="channels of the first convolution")
    arguments = parser.parse_args()

    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in load_images())
    model = Net(arguments.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    checkpoint = Checkpoint(Path(os.environ.get("REMUDA_CHECKPOINT_DIR", "checkpoints")))

    epoch, step, seconds = 0, 0, 0.0
    if saved := checkpoint.load():
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        epoch, step, seconds = saved["epoch"], saved["step"], saved["seconds"]
        print(f"resumed at epoch {epoch}, step {step}: {seconds:.1f} s of work kept", flush=True)
    else:
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_y)} images, on {device}", flush=True
        )

    def save() -> None:
        checkpoint.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "epoch": epoch,
                "step": step,
                "seconds": seconds + time.monotonic() - started,
            }
        )

    started = time.monotonic()
    steps = len(train_y) // arguments.batch
    total_steps = arguments.epochs * steps
    accuracy = 0.0
    while epoch < arguments.epochs:
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(epoch)).to(device)
        model.train()
        while step < steps:
            chosen = order[step * arguments.batch : (step + 1) * arguments.batch]
            loss = F.cross_entropy(model(shift(train_x[chosen])), train_y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if leaving:
                save()
                print(f"asked to leave: saved at epoch {epoch}, step {step}", flush=True)
                return CHECKPOINTED
        epoch, step = epoch + 1, 0
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        save()
        spent = seconds + time.monotonic() - started
        left = spent / (epoch * steps) * (total_steps - epoch * steps)
        print(
            f"epoch {epoch:3d}/{arguments.epochs}  loss {loss.item():.4f}  accuracy {accuracy:.4f}  {left:.0f} s left",
            flush=True,
        )
        report(
            done=epoch,
            total=arguments.epochs,
            unit="epochs",
            loss=round(loss.item(), 4),
            accuracy=round(accuracy, 4),
            left_s=round(left, 1),
        )
    print(
        f"accuracy {accuracy:.4f} on {TEST_IMAGES} images never trained on, {seconds + time.monotonic() - started:.1f} s",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
