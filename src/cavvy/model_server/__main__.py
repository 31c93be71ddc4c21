"""Loads a model, optimises it on request, and serves it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .http_server import ModelServer
from .inference import CountedModel, OnnxModel, WrongRequest
from .processing import FILE, Processing, ProcessingFailed

# an optimised model is served if it is faster by this factor; a smaller gain is noise
_FASTER = 1.05


def main(arguments: list[str] | None = None) -> None:
    options = _read_options(arguments)
    if options.with_parent:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    started = time.monotonic()
    path = Path(options.model)
    try:
        original = OnnxModel(path, options.threads)
    except Exception as error:  # noqa: BLE001 - the errors that a file causes have no common class
        sys.exit(f"{path} cannot be loaded: {error}")
    model = original
    notes: dict[str, Any] = {}
    if options.optimise:
        model, notes = _optimise(original, options)
    served = CountedModel(options.name or path.stem, model, notes)
    try:
        processing = Processing(path.with_name(FILE))
    except ProcessingFailed as error:
        sys.exit(str(error))
    with ModelServer((options.host, options.port), served, processing) as server:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        took = time.monotonic() - started
        _say(f"serves {model.path.name} as {served.name} after {took:.1f} s")
        server.serve_forever()


def _end_with(parent: int) -> None:
    """End this process when another one has become its parent, because the first was killed."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1)
    os._exit(1)


def _optimise(original: OnnxModel, options: argparse.Namespace) -> tuple[OnnxModel, dict[str, Any]]:
    """Return the fastest optimised model that agrees with the original (or the original if none
    agrees), and the measurements.
    """
    from .optimise import compare, convert, list_kinds, read_samples

    folder = Path(tempfile.mkdtemp(prefix="cavvy-model-"))
    best: tuple[OnnxModel, dict[str, Any]] = original, {"optimised": 0, "speed_up": _FASTER}
    try:
        samples = read_samples(original, options.samples)
        for kind in list_kinds(original.path):
            target = folder / f"int8-{kind}.onnx"
            # the samples that calibrate the model do not judge it
            convert(original.path, target, kind, samples[::2])
            model = OnnxModel(target, options.threads)
            found = compare(original, model, samples[1::2] or samples, options.compare)
            _say(_describe(kind, found, options))
            good = found["agreement"] >= options.agree
            if good and found["speed_up"] >= best[1]["speed_up"]:
                best = model, {**found, "optimised": 1}
    except (ImportError, OSError, ValueError, KeyError, WrongRequest) as error:
        sys.exit(f"the model cannot be optimised: {type(error).__name__}: {error}")
    if best[0] is original:
        _say(
            "the original model is served, because no optimised model is faster and gives nearly "
            "the same answers"
        )
        return original, {"optimised": 0}
    return best


def _describe(kind: str, found: dict[str, float], options: argparse.Namespace) -> str:
    return (
        f"{options.optimise} ({kind}): {found['optimised_ms']:.2f} ms instead of "
        f"{found['original_ms']:.2f} ms a sample, agreement {found['agreement']:.4f} "
        f"({options.compare}), {int(found['samples'])} "
        f"{'samples' if options.samples else 'made-up samples'}"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="model_server", description=__doc__)
    parser.add_argument("--model", required=True, help="a .onnx file")
    parser.add_argument(
        "--name", default="", help="the model's name in URLs; the default is the name of the file"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of one request; 0: all cores"
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the process that started this one ends"
    )
    parser.add_argument("--optimise", choices=["onnx-int8"], default="")
    parser.add_argument("--samples", default="", help="a .npz file, or JSON lines")
    parser.add_argument("--agree", type=float, default=0.99)
    parser.add_argument("--compare", choices=["top", "cosine"], default="top")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
