"""Samples of a model's inputs, from a file or random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .inference import TYPES, OnnxModel

MADE_UP = 32  # number of samples if the user gives none


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
