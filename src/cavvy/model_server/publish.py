"""Converts a model that is published, and measures it before and after: `python -m
cavvy.model_server.publish --model FILE [--convert onnx|int8|fp16 --target FILE] [--samples FILE]`.
The figures are written as one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .inference import OnnxModel, WrongRequest
from .optimise import compare, convert, list_kinds, read_samples

_MOST_COMPARED = 256  # samples
# Of the largest output. ONNX Runtime sums in another order, which changes some of the last bits.
_MOST_DIFFERENT = 1e-3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cavvy.model_server.publish", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--convert", choices=["onnx", "int8", "fp16"], default="")
    parser.add_argument("--samples", default="", help="a .npz file, or JSON lines")
    options = parser.parse_args(arguments)
    try:
        figures = (
            to_onnx(options.model, options.target, options.samples)
            if options.convert == "onnx"
            else publish(options.model, options.target, options.convert, options.samples)
        )
    except json.JSONDecodeError as error:
        sys.exit(f"{options.samples}: expected a .npz file, or requests as JSON lines: {error}")
    except KeyError as error:
        sys.exit(f"{options.samples} does not fit the model: {error.args[0]}")
    except (OSError, ValueError, TypeError, WrongRequest) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common class
        sys.exit(f"{options.model.name} cannot be used: {error}")
    sys.stdout.write(json.dumps(figures) + "\n")


def publish(source: Path, target: Path | None, kind: str, file: str) -> dict[str, float]:
    """Write the converted model to `target`, and return what was measured: `accuracy`, the share of
    the labels that the model gives, if the samples have labels, and `agreement` with the original.
    Of conversions to 8 bits, the one that scores best is written. Every second sample calibrates;
    the others measure. Raises WrongRequest, ValueError, OSError."""
    old = OnnxModel(source)
    samples, labels = read_samples(old, file), read_labels(file)
    if labels is not None and len(labels) != len(samples):
        raise ValueError(f"{file} has {len(labels)} labels for {len(samples)} samples")
    if not samples:
        raise ValueError(f"{file} has no samples")
    measured = slice(1, None, 2) if kind and len(samples) > 1 else slice(None)
    judging, wanted = samples[measured], None if labels is None else labels[measured]
    before = {} if wanted is None else {"accuracy": find_accuracy(old, judging, wanted)}
    if not kind or target is None:
        return {**before, "samples": float(len(judging))} if file else {}
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="cavvy-model-") as folder:
        for way in ["fp16"] if kind == "fp16" else list_kinds(source):
            made = Path(folder, f"{way}.onnx")
            if way == "fp16":
                to_fp16(source, made)
            else:
                convert(source, made, way, samples[::2])
            found = compare(old, OnnxModel(made), judging, "top")
            figures = {"agreement": found["agreement"], "speed_up": found["speed_up"]}
            if wanted is not None:
                figures["accuracy"] = find_accuracy(OnnxModel(made), judging, wanted)
            if not best or _score(figures) > _score(best):
                best = figures
                target.write_bytes(made.read_bytes())
    more = {f"{name}_before": value for name, value in before.items()}
    return {**best, **more, "samples": float(len(judging)), "bytes_before": source.stat().st_size}


def _score(figures: dict[str, float]) -> tuple[float, float]:
    return figures.get("accuracy", 0.0), figures["agreement"]


def to_fp16(source: Path, target: Path) -> None:
    """Write the model with weights of 16 bits, and with the same types of inputs and outputs."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(source)), keep_io_types=True), str(target))


def to_onnx(source: Path, target: Path, file: str) -> dict[str, float]:
    """Write a TorchScript model as ONNX, whose first axis is that of the batch. Return the largest
    `difference` between the outputs of both, as a share of the largest output, over the samples of
    a .npz file. Raises ValueError, among others if the outputs differ."""
    torch: Any = import_module("torch")
    try:
        module = torch.jit.load(str(source), map_location="cpu").eval()
    except RuntimeError as error:
        raise ValueError(
            f"{source.name} is no TorchScript model, as torch.jit.trace(MODEL, SAMPLE).save writes"
        ) from error
    names = [each.debugName().partition(".")[0] for each in module.graph.inputs()][1:]
    rows = _read_rows(names, file)
    axes = {name: {0: "n"} for name in names}
    first = tuple(torch.from_numpy(each[:1]) for each in rows)
    torch.onnx.export(
        module, first, str(target), input_names=names, dynamic_axes=axes, dynamo=False
    )
    made, worst = OnnxModel(target), 0.0
    outputs = list(made.outputs)
    for batch in ([each[:1] for each in rows], rows):  # one alone, and all at once
        with torch.no_grad():
            found = module(*(torch.from_numpy(each) for each in batch))
        wanted = [found] if isinstance(found, torch.Tensor) else list(found)
        told = made.run(dict(zip(names, batch)), outputs)  # noqa: B905 - Python 3.8 runs this too
        for was, now in zip(wanted, told):  # noqa: B905
            theirs = was.detach().numpy()
            if theirs.shape != now.shape:
                raise ValueError(f"the outputs of {source.name} have other shapes in ONNX")
            largest = float(np.abs(theirs).max(initial=0.0)) or 1.0
            gap = np.abs(theirs.astype(np.float64) - now).max(initial=0.0)
            worst = max(worst, float(np.nan_to_num(gap, nan=np.inf)) / largest)
    if worst > _MOST_DIFFERENT:
        raise ValueError(f"the outputs of {source.name} differ by {worst:.2%} in ONNX")
    return {"difference": worst, "compared": float(len(rows[0]))}


def _read_rows(names: list[str], file: str) -> list[Any]:
    """Return an array of samples for each input. Raises ValueError."""
    if not file.endswith(".npz"):
        raise ValueError("expected samples of the inputs, in a .npz file with an array for each")
    with np.load(file) as arrays:
        known = {name: arrays[name] for name in arrays.files if name != "labels"}
    if len(names) == len(known) == 1:
        known = dict.fromkeys(names, next(iter(known.values())))
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{file} has no array {missing[0]}; the inputs are {', '.join(names)}")
    rows = [known[name][:_MOST_COMPARED] for name in names]
    if not rows or not all(each.ndim and len(each) for each in rows):
        raise ValueError(f"{file} has no samples")
    return [each.astype(np.float32) if each.dtype == np.float64 else each for each in rows]


def read_labels(file: str) -> list[Any] | None:
    """Return the right answer of each sample: the array `labels` of a .npz file, or `label` of each
    line. Returns None if there are none."""
    if not file:
        return None
    if file.endswith(".npz"):
        with np.load(file) as arrays:
            return list(arrays["labels"]) if "labels" in arrays.files else None
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
    found = [line["label"] for line in lines if "label" in line]
    return found or None


def find_accuracy(model: OnnxModel, samples: list[dict[str, Any]], labels: list[Any]) -> float:
    """Return the share of rows whose answer is their label: the index of the largest value of the
    first output with real numbers, or else the first output."""
    names, right, rows = list(model.outputs), 0, 0
    for sample, label in zip(samples, labels):  # noqa: B905 - Python 3.8 runs this too
        outputs = [each for each in model.run(sample, names) if isinstance(each, np.ndarray)]
        scores = [each for each in outputs if each.dtype.kind == "f" and each.ndim > 1]
        told = np.ravel(scores[0].argmax(-1) if scores else outputs[0])
        expected = np.ravel(label)
        if told.size != expected.size:
            raise ValueError(f"the model gives {told.size} answers for {expected.size} labels")
        right += int((told == expected).sum())
        rows += told.size
    return right / max(1, rows)


if __name__ == "__main__":
    main()
