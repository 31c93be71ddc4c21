"""A model that needs no packages: a line through noisy points, fitted by gradient descent.

python3 model.py train --steps 200 model.json     fit it and write it
python3 model.py better new.json old.json         exit 1 unless the new model has the lower error
python3 model.py serve model.json                 answer GET /?x=2 with the model's y
"""

import argparse
import json
import os
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


def make_points(seed: int) -> list[tuple[float, float]]:
    noise = random.Random(seed)
    return [(x / 50, 3 * x / 50 + 1 + noise.gauss(0, 0.1)) for x in range(-50, 50)]


def measure_error(model: dict[str, float], points: list[tuple[float, float]]) -> float:
    """The mean squared error."""
    return sum((model["a"] * x + model["b"] - y) ** 2 for x, y in points) / len(points)


def train(steps: int) -> dict[str, float]:
    points, model = make_points(seed=0), {"a": 0.0, "b": 0.0}
    for _ in range(steps):
        errors = [(model["a"] * x + model["b"] - y, x) for x, y in points]
        model["a"] -= 0.1 * sum(error * x for error, x in errors) / len(points)
        model["b"] -= 0.1 * sum(error for error, _ in errors) / len(points)
    return model


def is_better(new: Path, old: Path) -> bool:
    """Compare the models on points that neither was trained on."""
    points = make_points(seed=1)
    error = measure_error(json.loads(new.read_text()), points)
    best = measure_error(json.loads(old.read_text()), points) if old.exists() else float("inf")
    print(f"error {error:.5f}, served {best:.5f}")
    return error < best


def serve(model: dict[str, float]) -> None:
    """Serve the model at the port in PORT, until the program is stopped."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                x = float(parse_qs(urlsplit(self.path).query).get("x", ["0"])[0])
            except ValueError:
                self.send_error(400, "x must be a number")
                return
            told = json.dumps({"y": model["a"] * x + model["b"]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Answers).serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train_command = commands.add_parser("train")
    train_command.add_argument("--steps", type=int, default=200)
    train_command.add_argument("file", type=Path)
    better_command = commands.add_parser("better")
    better_command.add_argument("new", type=Path)
    better_command.add_argument("old", type=Path)
    commands.add_parser("serve").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(json.loads(arguments.file.read_text()))
    if arguments.command == "better":
        return 0 if is_better(arguments.new, arguments.old) else 1
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(train(arguments.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
