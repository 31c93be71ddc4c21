"""Train a small network on scikit-learn's digits with NumPy alone; resume after any loss.

It behaves as `examples/digits/train.py` does (checkpoint after each epoch and on SIGTERM, progress
lines, exit code 75), but starts in a tenth of the time: it imports neither PyTorch nor
scikit-learn, of which it reads only the file of digits. Tests run it on nodes as `slow.py`. It
tells a digest of the weights that it ends with. With HOLDS=n each of its first n runs stops after
two epochs and waits to be interrupted, so that no test has to be quicker than the training.
"""

import os

# Before NumPy is imported: the same kernels on nodes, which do not have these variables, and here.
os.environ.pop("OPENBLAS_CORETYPE", None)
os.environ.pop("OPENBLAS_L2_SIZE", None)
os.environ.pop("NPY_DISABLE_CPU_FEATURES", None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # sums in one order only

import hashlib
import importlib.util
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np

EPOCHS, BATCH, HIDDEN, RATE, MOMENTUM = 6, 32, 32, 0.1, 0.9
TEST_IMAGES = 360
HOLD_S = 120.0  # at most
CHECKPOINTED = 75  # EX_TEMPFAIL: "saved, run me again"
SHAPES = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
Arrays = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 64) scaled to 0..1 and labels (N,)."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits are part of scikit-learn, which is not installed")
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return rows[:, :-1] / 16, rows[:, -1].astype(int)


def run_step(state: Arrays, images: np.ndarray, labels: np.ndarray) -> float:
    """One step of stochastic gradient descent with momentum on the mean cross-entropy; return the
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
    gradients = {
        "w1": images.T @ back,
        "b1": back.sum(0),
        "w2": hidden.T @ errors,
        "b2": errors.sum(0),
    }
    for name, gradient in gradients.items():
        state["m" + name] = MOMENTUM * state["m" + name] + gradient
        state[name] = state[name] - RATE * state["m" + name]
    return float(loss)


def start_state() -> Arrays:
    random = np.random.default_rng(1)
    weights = {name: random.normal(0, 0.1, shape) for name, shape in SHAPES.items()}
    moments = {"m" + name: np.zeros(shape) for name, shape in SHAPES.items()}
    return {**weights, **moments, "epoch": np.zeros(()), "step": np.zeros(()), "run": np.zeros(())}


def save(path: Path, state: Arrays) -> None:
    half = path.with_suffix(".half")
    with half.open("wb") as file:
        np.savez(file, **state)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    half.rename(path)


def tell(epoch: int, loss: float) -> None:
    print(f"epoch {epoch:3d}/{EPOCHS}  loss {loss:.4f}", flush=True)
    if path := os.environ.get("CAVVY_PROGRESS_FILE"):
        line = {"done": epoch, "total": EPOCHS, "unit": "epochs", "loss": round(loss, 4)}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def hold(leaving: list[int]) -> None:
    """Until this run is asked to leave, or killed."""
    ends = time.monotonic() + HOLD_S
    while not leaving and time.monotonic() < ends:
        time.sleep(0.05)


def main() -> int:
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    images, labels = load_digits()
    train_x, train_y = images[:-TEST_IMAGES], labels[:-TEST_IMAGES]
    folder = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "state.npz"
    state = start_state()
    if path.exists():
        with np.load(path) as kept:
            state = dict(kept)
        print(f"resumed at epoch {int(state['epoch'])}, step {int(state['step'])}", flush=True)
        state["run"] = state["run"] + 1
    run, holds = int(state["run"]), int(os.environ.get("HOLDS", "0"))
    loss, steps = 0.0, len(train_y) // BATCH
    while (epoch := int(state["epoch"])) < EPOCHS:
        order = np.random.default_rng(epoch).permutation(len(train_y))
        while (step := int(state["step"])) < steps and not leaving:
            chosen = order[step * BATCH : (step + 1) * BATCH]
            loss = run_step(state, train_x[chosen], train_y[chosen])
            state["step"] = state["step"] + 1
        if step == steps:
            state["epoch"], state["step"] = state["epoch"] + 1, np.zeros(())
        save(path, state)
        if leaving:
            print(f"asked to leave: saved at epoch {epoch}, step {step}", flush=True)
            return CHECKPOINTED
        tell(epoch + 1, loss)
        if run < holds and epoch + 1 == 2 * (run + 1):
            hold(leaving)
    hidden = np.tanh(images[-TEST_IMAGES:] @ state["w1"] + state["b1"])
    right = (hidden @ state["w2"] + state["b2"]).argmax(1) == labels[-TEST_IMAGES:]
    print(f"accuracy {right.mean():.4f} on {TEST_IMAGES} images never trained on", flush=True)
    digest = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(SHAPES)))
    print("weights", digest.hexdigest(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
