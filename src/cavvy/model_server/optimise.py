"""Converts a model to 8-bit integers, and compares the result with the original on samples of the
model's inputs, from a file or random.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from .inference import TYPES, OnnxModel

_ROUNDS = 3  # how often each sample is timed, alternating between the two models
MADE_UP = 32  # number of samples if the user gives none


class SampleReader:
    """Samples in the form that ONNX Runtime's calibration reads."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._samples, None)


def list_kinds(source: Path) -> list[str]:
    """Return the conversions to try: `dynamic` converts only matrices; `static` also converts
    convolutions, and is tried only if the model has convolutions.
    """
    import onnx

    graph = onnx.load(str(source), load_external_data=False).graph
    has_kernels = any(node.op_type == "Conv" for node in graph.node)
    return ["dynamic", "static"] if has_kernels else ["dynamic"]


def convert(source: Path, target: Path, kind: str, samples: list[dict[str, Any]]) -> None:
    """Write the model with weights of 8 bits. The samples calibrate the activations of `static`."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    if kind == "static":
        CalibrationDataReader.register(SampleReader)
        quantize_static(str(source), str(target), SampleReader(samples))
        return
    # ONNX Runtime has no convolution with signed weights of 8 bits and dynamic activations
    matrices = ["MatMul", "Gemm", "Gather", "Attention", "LSTM"]
    quantize_dynamic(
        str(source), str(target), op_types_to_quantize=matrices, weight_type=QuantType.QInt8
    )


def compare(
    old: OnnxModel, new: OnnxModel, samples: list[dict[str, Any]], measure: str
) -> dict[str, float]:
    """Measure how well `new` agrees with the original, and how fast `new` is. `agreement` is the
    share of rows in which the largest value of an output has the same index (measure `top`), or the
    mean cosine similarity of the outputs (`cosine`). `speed_up` is the original's median time for a
    sample divided by the median time of `new`.
    """
    names = list(old.outputs)
    agreements: list[float] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index, sample in enumerate(samples * _ROUNDS):
        found = {}
        for is_new in (False, True) if index % 2 else (True, False):
            started = time.perf_counter()
            found[is_new] = (new if is_new else old).run(sample, names)
            seconds[is_new].append(time.perf_counter() - started)
        if index < len(samples):
            pairs = zip(found[False], found[True])  # noqa: B905 - Python 3.8 runs this too
            agreements += [_agree(was, now, measure) for was, now in pairs if was.dtype.kind == "f"]
    return {
        "agreement": statistics.fmean(agreements) if agreements else 0.0,
        "speed_up": statistics.median(seconds[False]) / statistics.median(seconds[True]),
        "original_ms": 1000 * statistics.median(seconds[False]),
        "optimised_ms": 1000 * statistics.median(seconds[True]),
        "samples": float(len(samples)),
    }


def _agree(was: Any, now: Any, measure: str) -> float:
    if measure == "top":
        return float(np.mean(was.argmax(-1) == now.argmax(-1)))
    one, two = was.ravel().astype(np.float64), now.ravel().astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / length if length else float(not one.any() and not two.any())


def read_samples(model: OnnxModel, file: str) -> list[dict[str, Any]]:
    """Return the samples in a file: either bodies of requests as JSON lines, or a .npz file with an
    array for each input. The first axis of each array is the index of the sample. Each sample is a
    batch of size one if the model's first axis is dynamic. Without a file, inputs are normally
    distributed random numbers. Raises WrongRequest, ValueError, OSError.
    """
    if not file:
        return _make_up(model)
    if file.endswith(".npz"):
        with np.load(file) as arrays:
            found = {name: arrays[name] for name in model.inputs}
        count = min(map(len, found.values()))
        return [
            {name: _as_batch(model, name, value[index]) for name, value in found.items()}
            for index in range(count)
        ]
    lines = [line for line in Path(file).read_text().splitlines() if line.strip()]
    return [dict(map(model.read_tensor, json.loads(line)["inputs"])) for line in lines]


def _as_batch(model: OnnxModel, name: str, value: Any) -> Any:
    known = model.inputs[name]
    value = np.asarray(value, TYPES[known.type][1])
    return value[np.newaxis] if value.ndim == len(known.shape) - 1 else value


def _make_up(model: OnnxModel) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    samples = []
    for _ in range(MADE_UP):
        sample = {}
        for name, known in model.inputs.items():
            shape = [each if isinstance(each, int) and each > 0 else 1 for each in known.shape]
            kind, dtype = TYPES[known.type]
            if not kind.startswith("FP"):
                raise ValueError(f"the input {name} has no real numbers: provide samples")
            sample[name] = random.standard_normal(shape).astype(dtype)
        samples.append(sample)
    return samples
