"""The flow of a fluid around a cylinder, by the lattice Boltzmann method: a stencil over a grid, in
which each cell reads its eight neighbours.

    python main.py --steps 12000

The whole grid is saved after every `--every` steps, and a later start continues from there with the
same result, bit for bit. The results are a picture of the vortices and a table of the force on the
cylinder.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

CHECKPOINT = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints")) / "grid.npz"
RESULTS = Path("results")
# The D2Q9 model (Qian, d'Humieres and Lallemand, Europhysics Letters 17 (1992) 479).
MOVES = np.array([(x, y) for x in (0, 1, -1) for y in (0, 1, -1)])
WEIGHTS = np.array([4 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 36, 1 / 36, 1 / 9, 1 / 36, 1 / 36])
BACK = [int(np.flatnonzero((-move == MOVES).all(1))[0]) for move in MOVES]
SPEED = 0.1  # of the flow at the left edge, in cells per step


def balance(density: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """Return the distribution that collisions lead to, up to the second order of the speed."""
    along = 3 * np.tensordot(MOVES, flow, axes=1)
    squares = 1.5 * (flow**2).sum(0)
    return WEIGHTS[:, None, None] * density * (1 + along + along**2 / 2 - squares)


def step(cells: np.ndarray, solid: np.ndarray, inlet: np.ndarray, rate: float) -> float:
    """Move and collide once, in place; return the force on the cylinder along the flow."""
    density = cells.sum(0)
    flow = np.tensordot(MOVES.T, cells, axes=1) / density
    after = cells - rate * (cells - balance(density, flow))
    after[:, solid] = cells[BACK][:, solid]  # The cylinder reflects what arrives.
    force = 2 * float((cells[:, solid] * MOVES[:, :1]).sum())
    for index, move in enumerate(MOVES):
        cells[index] = np.roll(after[index], move, axis=(0, 1))
    cells[:, 0] = inlet[:, 0]
    cells[:, -1] = cells[:, -2]
    return force


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--width", type=int, default=240)
    parser.add_argument("--reynolds", type=float, default=150)
    parser.add_argument("--every", type=int, default=200, help="steps between two checkpoints")
    options = parser.parse_args()
    width, height = options.width, options.width // 3
    radius = height / 9
    x, y = np.mgrid[:width, :height]
    solid = (x - width / 5) ** 2 + (y - height / 2 + 1) ** 2 < radius**2
    rate = 1 / (3 * SPEED * 2 * radius / options.reynolds + 0.5)
    inlet = balance(np.ones((width, height)), np.stack([np.full((width, height), SPEED), 0 * y]))
    # A cross flow at the start, without which the vortices would need long to leave in turn.
    across = SPEED / 2 * np.sin(2 * np.pi * x / width)
    cells = balance(np.ones((width, height)), np.stack([np.full((width, height), SPEED), across]))
    cells[:, solid] = WEIGHTS[:, None]  # At rest inside the cylinder.
    forces, seconds = np.empty(0), 0.0
    if CHECKPOINT.exists():
        with np.load(CHECKPOINT) as saved:
            cells, forces, seconds = saved["cells"], saved["forces"], float(saved["seconds"])
        if cells.shape != inlet.shape:
            raise SystemExit(f"{CHECKPOINT} is of another grid: remove it, or use its --width")
        print(f"continuing after {len(forces)} steps", flush=True)
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    while len(forces) < options.steps:
        began = time.monotonic()
        more = min(options.every, options.steps - len(forces))
        forces = np.append(forces, [step(cells, solid, inlet, rate) for _ in range(more)])
        seconds += time.monotonic() - began
        half = CHECKPOINT.with_name("half.npz")
        np.savez(half, cells=cells, forces=forces, seconds=seconds)
        half.replace(CHECKPOINT)
        print(f'CAVVY_PROGRESS {{"done": {len(forces)}, "total": {options.steps}}}', flush=True)
    flow = np.tensordot(MOVES.T, cells, axes=1) / cells.sum(0)
    vorticity = np.gradient(flow[1], axis=0) - np.gradient(flow[0], axis=1)
    vorticity[solid] = np.nan
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(vorticity.T, cmap="RdBu", vmin=-0.03, vmax=0.03)
    axes.set_title(f"Vorticity after {options.steps} steps, Reynolds number {options.reynolds:g}")
    figure.savefig(RESULTS / "vortices.png")
    drag = forces / (SPEED**2 * radius)
    np.savetxt(RESULTS / "drag.csv", drag, header="drag coefficient at each step", fmt="%.9g")
    print(f"drag coefficient {drag[-len(drag) // 4 :].mean():.4f} over the last quarter")
    millions = width * height * options.steps / 1e6
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    print(
        f"cost: {seconds / millions:.3g} s and ${price / 3600 * seconds / millions:.3g} "
        "per million updates of a cell (`cavvy cost` has the bill)"
    )


if __name__ == "__main__":
    main()
