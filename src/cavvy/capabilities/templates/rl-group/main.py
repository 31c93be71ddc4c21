"""Reinforcement learning with a trainer and a server of rollouts, as two jobs of one group.

    python main.py serve &
    python main.py train

The server plays games of a pole on a cart (Barto, Sutton and Anderson, IEEE Transactions SMC 13
(1983) 834) with the weights that it is sent. The trainer improves the weights by evolution
strategies: it follows the noise that scored better. It saves the weights after each round. A server
keeps nothing, so it may be lost at any time, and the trainer waits for the next one. For a large
model, replace `play` by an engine that generates text and scores it.
"""

import argparse
import http.client
import json
import os
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
LONGEST, NOISE, LIMIT = 500, 0.3, 4096
PATIENCE_S = 120.0  # for a server to answer again


def play(policies: np.ndarray, seed: int) -> np.ndarray:
    """Play one game with each policy, all from the same start: the number of steps survived."""
    start = np.random.default_rng([1, seed]).uniform(-0.05, 0.05, 4)
    x, speed, angle, turn = np.repeat(start[:, None], len(policies), axis=1)
    score, alive = np.zeros(len(policies)), np.ones(len(policies), bool)
    for _ in range(LONGEST):
        state = np.stack([x, speed, angle, turn])
        push = np.where((policies.T * state).sum(0) > 0, 10.0, -10.0)
        inertia = (push + 0.05 * turn**2 * np.sin(angle)) / 1.1
        spin = (9.8 * np.sin(angle) - np.cos(angle) * inertia) / (
            0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        )
        force = inertia - 0.05 * spin * np.cos(angle) / 1.1
        x, speed = x + 0.02 * speed, speed + 0.02 * force
        angle, turn = angle + 0.02 * turn, turn + 0.02 * spin
        alive &= (abs(x) < 2.4) & (abs(angle) < 0.2095)  # 12 degrees
        score += alive
        x, speed, angle, turn = np.where(alive, (x, speed, angle, turn), 0)
    return score


class Rollouts(BaseHTTPRequestHandler):
    """POST {"policies": [[4 numbers], ...], "seed": N} is answered with the scores."""

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 < size < 1_000_000:
                raise ValueError("the request is empty or too long")
            sent = json.loads(self.rfile.read(size))
            policies = np.array(sent["policies"], float)
            if policies.shape[1:] != (4,) or len(policies) > LIMIT:
                raise ValueError(f"at most {LIMIT} policies of 4 numbers were expected")
            code, said = 200, play(policies, int(sent["seed"])).tolist()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            code, said = 400, {"error": str(error)}
        body = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def ask(url: str, policies: np.ndarray, seed: int) -> np.ndarray:
    """Have the policies played, and wait while the server is being replaced. One that is replaced
    on another node has another address, which the next attempt of this job gets.
    """
    body = json.dumps({"policies": policies.tolist(), "seed": seed}).encode()
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, body, timeout=60) as answer:
                return np.array(json.load(answer))
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            print(f"waiting for {url}: {error}", flush=True)
            if time.monotonic() > until:
                raise SystemExit(f"{url} has not answered for {PATIENCE_S:g} s") from error
            time.sleep(1)


def train(url: str, rounds: int, policies: int) -> None:
    weights, scores, seconds = np.zeros(4), [], 0.0
    saved = FOLDER / "weights.json"
    if saved.exists():
        weights, scores, seconds = json.loads(saved.read_text())
        weights = np.array(weights)
        print(f"continuing after {len(scores)} rounds", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    for number in range(len(scores), rounds):
        began = time.monotonic()
        noise = np.random.default_rng([2, number]).standard_normal((policies // 2, 4))
        noise = np.concatenate([noise, -noise])
        found = ask(url, weights + NOISE * noise, number)
        ranks = found.argsort(kind="stable").argsort() / (len(found) - 1) - 0.5
        weights = weights + 2 * (ranks @ noise) / len(found)
        scores.append(float(found.mean()))
        seconds += time.monotonic() - began
        half = saved.with_suffix(".half")
        half.write_text(json.dumps([weights.tolist(), scores, seconds]))
        half.replace(saved)
        print(f"round {number + 1}: {scores[-1]:.1f} steps", flush=True)
        print(f'CAVVY_PROGRESS {{"done": {number + 1}, "total": {rounds}}}', flush=True)
    final = [float(ask(url, weights[None], 10**6 + game)[0]) for game in range(10)]
    print(f"score {np.mean(final):.1f} of {LONGEST} in {len(final)} new games")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, rounds + 1), scores[:rounds])
    axes.set(xlabel="round", ylabel="mean score of the policies with noise")
    figure.savefig(RESULTS / "scores.png")
    games = len(scores) * policies / 1000
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    print(
        f"cost of the trainer: {seconds / games:.3g} s and ${price / 3600 * seconds / games:.3g} "
        "per 1,000 games (`cavvy cost` has the bill, also of the server)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["serve", "train"])
    parser.add_argument("--host", default="127.0.0.1", help="the address of the server")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--policies", type=int, default=64, help="games per round")
    options = parser.parse_args()
    if not 2 <= options.policies <= LIMIT or options.policies % 2:
        parser.error(f"--policies: an even number from 2 to {LIMIT} was expected")
    if options.part == "serve":
        ThreadingHTTPServer((options.host, options.port), Rollouts).serve_forever()
    else:
        train(f"http://{options.host}:{options.port}", options.rounds, options.policies)


if __name__ == "__main__":
    main()
