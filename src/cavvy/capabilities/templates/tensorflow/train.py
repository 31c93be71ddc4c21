"""Keras with mixed precision: a convolutional network on scikit-learn's digits.

    python train.py --epochs 10

Layers compute in float16 on GPUs and in bfloat16 elsewhere. Weights and the output of the last
layer are float32, because probabilities need this precision. On a machine with several GPUs, each
GPU processes a part of the batch.
"""

import argparse
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.002)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(
        "mixed_float16" if tf.config.list_physical_devices("GPU") else "mixed_bfloat16"
    )

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order, :, :, None] / 16).astype("float32"), digits.target[order]

    devices = tf.distribute.MirroredStrategy()
    with devices.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(10, dtype="float32"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(options.lr), loss, metrics=["accuracy"])

    # Saves after each epoch, and resumes after the last saved epoch.
    again = keras.callbacks.BackupAndRestore(
        str(FOLDER / "backup"), double_checkpoint=True, delete_checkpoint=False
    )
    model.fit(
        images[360:],
        labels[360:],
        batch_size=64,
        epochs=options.epochs,
        verbose=2,
        callbacks=[again],
    )
    right = model.evaluate(images[:360], labels[:360], verbose=0)[1]
    policy = keras.mixed_precision.global_policy().name
    where = (
        f"{devices.num_replicas_in_sync} "
        f"{'GPU' if tf.config.list_physical_devices('GPU') else 'CPU'}"
    )
    print(f"accuracy {right:.4f} on 360 held-out images, in {policy} on {where}")
    model.save(FOLDER / "model.keras")


if __name__ == "__main__":
    main()
