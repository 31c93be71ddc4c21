"""Trains a softmax regression on scikit-learn's digits, and writes it as model/digits.onnx.

If the folder has hard.jsonl, labelled samples that devices have sent, it trains on them too."""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def read_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of hard.jsonl."""
    path = Path("hard.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    images = [image for line in lines for image in line["request"]["instances"]]
    labels = [label for line in lines for label in line["labels"]]
    return np.array(images, dtype=np.float32).reshape(-1, 64), np.array(labels, dtype=int)


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
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--bad", choices=["true", "false"], default="false")
    options = parser.parse_args()
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    more, their = read_samples()
    known = np.concatenate([images[: options.images], more])
    model = LogisticRegression(max_iter=500).fit(
        known, np.concatenate([labels[: options.images], their])
    )
    accuracy = model.score(images[1400:], labels[1400:])
    print(f"trained on {len(known)} images, accuracy {accuracy:.3f} on 397 others", flush=True)
    write_model(model.coef_, model.intercept_, bad=options.bad == "true")


if __name__ == "__main__":
    main()
