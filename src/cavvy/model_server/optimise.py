"""Converts a model to 8-bit integers, and compares the result with the original on samples."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from .inference import OnnxModel

_ROUNDS = 3  # how often each sample is timed, alternating between the two models


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
