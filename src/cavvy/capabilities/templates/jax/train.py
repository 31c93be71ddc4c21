"""Trains a small network in JAX on scikit-learn's digits. Each batch is split over all devices that
JAX finds.

    python train.py --steps 400
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python train.py    # four devices on one CPU

Each batch depends only on the step number, so a resumed run gives the same result.
"""

import argparse
import os
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
BATCH, SIZES = 64, (64, 128, 64, 10)


def make(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    pairs = zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    return [
        (jax.random.normal(k, (come, go)) * (2 / come) ** 0.5, jnp.zeros(go))
        for k, come, go in pairs
    ]


def answer(layers, x):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def loss(layers, images, labels):
    odds = jax.nn.log_softmax(answer(layers, images))
    return -jnp.take_along_axis(odds, labels[:, None], axis=1).mean()


@jax.jit
def step(layers, speeds, images, labels, lr):
    """Return one step of gradient descent with momentum. XLA sums the gradients of all devices."""
    value, slopes = jax.value_and_grad(loss)(layers, images, labels)
    speeds = jax.tree.map(lambda speed, slope: 0.9 * speed + slope, speeds, slopes)
    return jax.tree.map(lambda w, speed: w - lr * speed, layers, speeds), speeds, value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("NNODES", "1")) > 1:  # This is a Cavvy job with several nodes.
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(where, int(os.environ["NNODES"]), int(os.environ["NODE_RANK"]))

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    devices = np.array(jax.devices())
    devices = devices[: max(n for n in range(1, len(devices) + 1) if BATCH % n == 0)]
    mesh = Mesh(devices, ("batch",))
    split, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())

    kept = FOLDER / "state.pickle"
    if kept.exists():
        first, layers, speeds = pickle.loads(kept.read_bytes())
        print(f"continuing after step {first}")
    else:
        layers = make(jax.random.key(0))
        first, speeds = 0, jax.tree.map(jnp.zeros_like, layers)
    layers, speeds = jax.device_put((layers, speeds), whole)
    for number in range(first, options.steps):
        chosen = 360 + np.random.default_rng(number).integers(0, len(labels) - 360, BATCH)
        batch = jax.device_put((images[chosen], labels[chosen]), split)
        layers, speeds, value = step(layers, speeds, *batch, options.lr)
        if number % 100 == 99 or number == options.steps - 1:
            print(f"step {number + 1}: loss {float(value):.4f}")
            if jax.process_index() == 0:
                state = (number + 1, *jax.tree.map(np.asarray, (layers, speeds)))
                (FOLDER / "half.pickle").write_bytes(pickle.dumps(state))
                (FOLDER / "half.pickle").replace(kept)
    right = float((answer(layers, images[:360]).argmax(1) == labels[:360]).mean())
    print(
        f"accuracy {right:.4f} on 360 held-out images; number of {devices[0].platform} devices: "
        f"{len(devices)}"
    )


if __name__ == "__main__":
    main()
