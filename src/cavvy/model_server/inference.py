"""An ONNX model, and its tensors as JSON of the Open Inference Protocol (version 2)."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

# element types of ONNX Runtime -> their name in the protocol, and NumPy's type
TYPES: dict[str, tuple[str, Any]] = {
    "tensor(bool)": ("BOOL", np.bool_),
    "tensor(uint8)": ("UINT8", np.uint8),
    "tensor(uint16)": ("UINT16", np.uint16),
    "tensor(uint32)": ("UINT32", np.uint32),
    "tensor(uint64)": ("UINT64", np.uint64),
    "tensor(int8)": ("INT8", np.int8),
    "tensor(int16)": ("INT16", np.int16),
    "tensor(int32)": ("INT32", np.int32),
    "tensor(int64)": ("INT64", np.int64),
    "tensor(float16)": ("FP16", np.float16),
    "tensor(float)": ("FP32", np.float32),
    "tensor(double)": ("FP64", np.float64),
    "tensor(string)": ("BYTES", np.object_),
}


class WrongRequest(Exception):
    """Raised if the client must change its request."""


class OnnxModel:
    """A loaded model. Several threads may call the model at the same time. `mixes` is true if the
    rows of a batch affect each other's results.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.path = path
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=onnxruntime.get_available_providers()
        )
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = {each.name: each for each in self._session.get_outputs()}
        self.mixes = _has_dynamic_scale(path)

    def describe(self) -> dict[str, Any]:
        """Return the inputs and outputs in the form of the protocol's model metadata."""
        return {
            "platform": "onnxruntime_onnx",
            "inputs": [_describe(each) for each in self.inputs.values()],
            "outputs": [_describe(each) for each in self.outputs.values()],
        }

    def run(self, feeds: dict[str, Any], names: list[str]) -> list[Any]:
        """Return the outputs with these names. Raises WrongRequest."""
        try:
            found: list[Any] = self._session.run(names, feeds)
        except Exception as error:
            raise WrongRequest(str(error)) from error
        return found

    def infer(self, body: Any) -> list[dict[str, Any]]:
        """Return the outputs for a request's body. Raises WrongRequest."""
        if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
            raise WrongRequest("the body needs a list `inputs`")
        feeds = dict(self.read_tensor(each) for each in body["inputs"])
        missing = [name for name in self.inputs if name not in feeds]
        if missing:
            raise WrongRequest(f"the model also needs the inputs {', '.join(missing)}")
        names = self._read_names(body.get("outputs"))
        found = zip(names, self.run(feeds, names))  # noqa: B905 - Python 3.8 runs this too
        return [_write_tensor(self.outputs[name], value) for name, value in found]

    def read_tensor(self, tensor: Any) -> tuple[str, Any]:
        """Return the name and value of an input. Raises WrongRequest."""
        if not isinstance(tensor, dict):
            raise WrongRequest("each of `inputs` is an object with name, shape, datatype and data")
        name = tensor.get("name")
        known = self.inputs.get(name) if isinstance(name, str) else None
        if known is None:
            raise WrongRequest(f"there is no input {name!r}; expected {', '.join(self.inputs)}")
        if known.type not in TYPES:
            raise WrongRequest(
                f"the input {name} is a {known.type}, which a request cannot contain"
            )
        kind, dtype = TYPES[known.type]
        if tensor.get("datatype") != kind:
            raise WrongRequest(f"the datatype of the input {name} must be {kind}")
        data, shape = tensor.get("data"), tensor.get("shape")
        if not isinstance(data, list) or not isinstance(shape, list):
            raise WrongRequest(f"the input {name} needs the lists `data` and `shape`")
        try:
            value = np.asarray(data, dtype=dtype).reshape(shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise WrongRequest(f"the input {name}: {error}") from error
        return str(name), value

    def _read_names(self, outputs: Any) -> list[str]:
        if not outputs:
            return list(self.outputs)
        if not isinstance(outputs, list):
            raise WrongRequest("`outputs` must be a list")
        names = [str(each.get("name")) if isinstance(each, dict) else "" for each in outputs]
        for name in names:
            if name not in self.outputs:
                raise WrongRequest(
                    f"there is no output {name!r}; expected {', '.join(self.outputs)}"
                )
        return names


class CountedModel:
    """The model that is served, and the server's counters."""

    def __init__(self, name: str, model: OnnxModel, notes: dict[str, Any]) -> None:
        self.name, self.model, self.notes = name, model, notes
        self._lock = threading.Lock()
        self._counts = {"success": 0, "failure": 0}
        self._seconds = 0.0

    def count(self, outcome: str, seconds: float) -> None:
        with self._lock:
            self._counts[outcome] += 1
            self._seconds += seconds

    def write_metrics(self) -> str:
        """Return the counters in Prometheus' text format."""
        label = f'model="{self.name}"'
        lines = ["# TYPE model_requests_total counter"]
        lines += [
            f'model_requests_total{{{label},outcome="{outcome}"}} {count}'
            for outcome, count in self._counts.items()
        ]
        lines += [
            "# TYPE model_inference_seconds_total counter",
            f"model_inference_seconds_total{{{label}}} {self._seconds:.6f}",
        ]
        for name, value in self.notes.items():
            if isinstance(value, (int, float)):
                lines += [f"# TYPE model_{name} gauge", f"model_{name}{{{label}}} {value:g}"]
        return "\n".join([*lines, ""])


def _has_dynamic_scale(path: Path) -> bool:
    """Return whether a model computes one scale for its 8-bit activations from all rows of a batch.
    A model with one scale for all rows contains the operator's name, `DynamicQuantize`, as plain
    text in its file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"DynamicQuantize") >= 0


def _describe(tensor: Any) -> dict[str, Any]:
    shape = [each if isinstance(each, int) else -1 for each in tensor.shape]
    kind = TYPES.get(tensor.type, (tensor.type, None))[0]
    return {"name": tensor.name, "datatype": kind, "shape": shape}


def _write_tensor(known: Any, value: Any) -> dict[str, Any]:
    if known.type not in TYPES:
        raise WrongRequest(f"the output {known.name} is not a tensor; name other `outputs`")
    data = value.reshape(-1).tolist()
    return {
        "name": known.name,
        "datatype": TYPES[known.type][0],
        "shape": list(value.shape),
        "data": data,
    }
