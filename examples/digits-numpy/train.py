"""Train a small network on the 1,797 handwritten digits that ship inside scikit-learn, with NumPy
alone; resume after any loss at the very step.

A plain loop. It reads where to keep its checkpoint from CAVVY_CHECKPOINT_DIR, writes one after each
epoch and, when the machine is about to be taken away (SIGTERM), after the step in hand; it reports
progress by lines in CAVVY_PROGRESS_FILE. The last line is a digest of the weights, which is the
same with and without a loss. Without Cavvy it runs just as well: `python train.py`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # sums in one order only

import numpy as np

CHECKPOINTED = 75  # EX_TEMPFAIL: "saved, run me again"
TEST_IMAGES = 360  # the last fifth of the 1,797 images is never trained on
BATCH, RATE, MOMENTUM = 32, 0.01, 0.9
Array = np.ndarray
Arrays = dict[str, Array]


def load_digits() -> tuple[Array, Array]:
    """Images (N, 64) scaled to 0..1 and labels (N,)."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits are part of scikit-learn, which is not installed")
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return rows[:, :-1] / 16, rows[:, -1].astype(int)


def start_state(width: int) -> Arrays:
    """Weights, their momentum, and how far the training is: what a checkpoint keeps."""
    random = np.random.default_rng(1)
    shapes = {"w1": (64, width), "b1": (width,), "w2": (width, 10), "b2": (10,)}
    weights = {name: random.normal(0, 0.1, shape) for name, shape in shapes.items()}
    moments = {"m" + name: np.zeros(shape) for name, shape in shapes.items()}
    return {**weights, **moments, "epoch": np.array(0), "step": np.array(0)}


def shift(images: Array, step: int) -> Array:
    """Move the batch by up to one pixel: more images than there are."""
    dy, dx = np.random.default_rng(step).integers(-1, 2, 2)
    return np.roll(images.reshape(-1, 8, 8), (dy, dx), (1, 2)).reshape(-1, 64)


def run_step(state: Arrays, images: Array, labels: Array) -> float:
    """Take one step of gradient descent with momentum on the mean cross-entropy; return the
    loss.
    """
    hidden = np.tanh(images @ state["w1"] + state["b1"])
    scores = hidden @ state["w2"] + state["b2"]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(shares[rows, labels]).mean()
    shares[rows, labels] -= 1
    errors = shares / len(labels)
    back = errors @ state["w2"].T * (1 - hidden**2)
    for name, gradient in {
        "w1": images.T @ back,
        "b1": back.sum(0),
        "w2": hidden.T @ errors,
        "b2": errors.sum(0),
    }.items():
        state["m" + name] = MOMENTUM * state["m" + name] + gradient
        state[name] = state[name] - RATE * state["m" + name]
    return float(loss)


def test(state: Arrays, images: Array, labels: Array) -> float:
    hidden = np.tanh(images @ state["w1"] + state["b1"])
    return float(((hidden @ state["w2"] + state["b2"]).argmax(1) == labels).mean())


def save(path: Path, state: Arrays) -> None:
    """Write the state beside the last one, and then replace that: it is never half-written."""
    half = path.with_suffix(".half")
    with half.open("wb") as file:
        np.savez(file, **state)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    half.rename(path)


def tell(epoch: int, epochs: int, loss: float, accuracy: float) -> None:
    if epoch % max(1, epochs // 2) == 0 or epoch == epochs:
        print(f"epoch {epoch:3d}/{epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
    if path := os.environ.get("CAVVY_PROGRESS_FILE"):
        figures = {"loss": round(loss, 4), "accuracy": round(accuracy, 4)}
        line = {"done": epoch, "total": epochs, "unit": "epochs", **figures}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def train(state: Arrays, epochs: int, path: Path, leaving: list[int]) -> int:
    """Train to the last epoch, or until asked to leave; return the exit code."""
    images, labels = load_digits()
    train_x, train_y = images[:-TEST_IMAGES], labels[:-TEST_IMAGES]
    steps, loss = len(train_y) // BATCH, 0.0
    while (epoch := int(state["epoch"])) < epochs:
        order = np.random.default_rng(epoch).permutation(len(train_y))
        while (step := int(state["step"])) < steps and not leaving:
            chosen = order[step * BATCH : (step + 1) * BATCH]
            loss = run_step(state, shift(train_x[chosen], epoch * steps + step), train_y[chosen])
            state["step"] += 1
        if step == steps:
            state["epoch"], state["step"] = np.array(epoch + 1), np.array(0)
        save(path, state)
        if leaving:
            at = f"epoch {state['epoch']}, step {state['step']}"
            print(f"asked to leave: saved at {at}", flush=True)
            return CHECKPOINTED
        tell(epoch + 1, epochs, loss, test(state, images[-TEST_IMAGES:], labels[-TEST_IMAGES:]))
    accuracy = test(state, images[-TEST_IMAGES:], labels[-TEST_IMAGES:])
    print(f"accuracy {accuracy:.4f} on {TEST_IMAGES} images never trained on", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=180)
    parser.add_argument("--width", type=int, default=512, help="units of the hidden layer")
    arguments = parser.parse_args()
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    path = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"), "state.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    state = start_state(arguments.width)
    if path.exists():
        with np.load(path) as kept:
            state = dict(kept)
        print(f"resumed at epoch {state['epoch']}, step {state['step']}", flush=True)
    if code := train(state, arguments.epochs, path, leaving):
        return code
    weights = b"".join(state[name].tobytes() for name in ("w1", "b1", "w2", "b2"))
    print("weights", hashlib.sha256(weights).hexdigest()[:16], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
