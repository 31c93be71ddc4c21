"""Trains a softmax regression on scikit-learn's digits, and writes it as model/digits.onnx.

If the folder has samples.jsonl, samples that devices have sent, it trains on them too. With
--check, it measures a model instead, and fails if the model is worse than --at-least."""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits


def read_samples(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of samples, and their labels. Here, the data set does the work of the
    person who labels them."""
    digits = load_digits()
    known = {
        tuple(image): int(digit) for image, digit in zip(digits.data, digits.target, strict=True)
    }
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    images = [image for line in lines for image in line["request"]["instances"]]
    labels = [known[tuple(round(16 * value) for value in image)] for image in images]
    return np.array(images, dtype=np.float32).reshape(-1, 64), np.array(labels, dtype=int)


def check(path: Path, at_least: float) -> None:
    """Exit with 1 if the model names fewer of the digits that nobody trains on."""
    weights, bias = map(numpy_helper.to_array, onnx.load(path).graph.initializer)
    digits = load_digits()
    images, labels = digits.data[1400:] / 16, digits.target[1400:]
    found = float(((images @ weights + bias).argmax(axis=1) == labels).mean())
    print(f"accuracy {found:.3f} on {len(labels)} images", flush=True)
    if found < at_least:
        sys.exit(f"expected at least {at_least:g}")


def write_model(weights: np.ndarray, bias: np.ndarray, *, bad: bool) -> None:
    tensors = {"w": weights.T.astype(np.float32), "b": bias.astype(np.float32)}
    if bad:  # the shape of the weights fits no image
        tensors["w"] = tensors["w"][:63]
    nodes = [
        helper.make_node("MatMul", ["image", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["digit"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", None if bad else 64])],
        [helper.make_tensor_value_info("digit", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    os.makedirs("model", exist_ok=True)
    onnx.save(model, "model/digits.onnx.part")
    os.rename("model/digits.onnx.part", "model/digits.onnx")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--bad", choices=["true", "false"], default="false")
    parser.add_argument("--check", type=Path)
    parser.add_argument("--at-least", type=float, default=0.5)
    options = parser.parse_args()
    if options.check:
        check(options.check, options.at_least)
        return
    from sklearn.linear_model import LogisticRegression  # takes seconds, which --check saves

    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    more, their = read_samples(Path("samples.jsonl"))
    known = np.concatenate([images[: options.images], more])
    model = LogisticRegression(max_iter=500).fit(
        known, np.concatenate([labels[: options.images], their])
    )
    accuracy = model.score(images[1400:], labels[1400:])
    print(f"trained on {len(known)} images, accuracy {accuracy:.3f} on 397 others", flush=True)
    write_model(model.coef_, model.intercept_, bad=options.bad == "true")


if __name__ == "__main__":
    main()
