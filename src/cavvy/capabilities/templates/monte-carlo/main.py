"""The risk of a portfolio of five shares, by Monte Carlo: value at risk and expected shortfall over
a year, each with its confidence interval.

    python main.py --paths 2000000

The monthly returns of 1990 to 2022 are drawn again in blocks of three months (a block bootstrap),
which keeps what the shares have in common and the unrest that follows unrest. Each shard has its
own random numbers and becomes one file, so shards are independent: their spread gives the
confidence interval, and a later start computes only those that are missing.
"""

import argparse
import csv
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from scipy.stats import t

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
EDGES = np.linspace(-1, 4, 2001)  # of the histogram of a year's returns
BLOCK, MONTHS = 3, 12


def read_returns() -> np.ndarray:
    """Return the monthly returns of the shares since 1990 (Stocks.csv of matplotlib)."""
    with get_sample_data("Stocks.csv", asfileobj=True) as table:
        rows = [row for row in csv.reader(table) if row[0][-3:] in ("ate", "-01")]
    columns = [rows[0].index(name) for name in ("IBM", "AAPL", "MSFT", "XRX", "ADBE")]
    prices = np.array([[float(row[column]) for column in columns] for row in rows[1:]])
    return prices[1:] / prices[:-1] - 1


def simulate(paths: int, shard: int) -> int:
    """Simulate one shard, unless it is there already, and write it as a whole."""
    target = FOLDER / f"shard-{paths}-{shard:05}.json"
    if not target.exists():
        began = time.monotonic()
        returns = read_returns()
        random = np.random.default_rng([2022, shard])
        starts = random.integers(len(returns) - BLOCK + 1, size=(paths, MONTHS // BLOCK))
        months = (starts[..., None] + np.arange(BLOCK)).reshape(paths, MONTHS)
        worth = np.ones((paths, returns.shape[1]))
        for month in months.T:
            worth *= 1 + returns[month]
        year = worth.mean(1) - 1  # the same sum in each share at the start
        worst = np.sort(year)[: max(paths // 100, 1)]
        found = {
            "value at risk, 99 %": -worst[-1],
            "expected shortfall, 99 %": -worst.mean(),
            "chance of a loss": (year < 0).mean(),
            "mean return": year.mean(),
        }
        counts = np.histogram(year.clip(EDGES[0], EDGES[-1]), EDGES)[0].tolist()
        half = target.with_suffix(".half")
        half.write_text(
            json.dumps([found, counts, time.monotonic() - began], default=float), encoding="utf-8"
        )
        half.replace(target)
    return shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--paths", type=int, default=2_000_000)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.shards < 2 or options.paths < 100 * options.shards:
        parser.error("a confidence interval needs 2 shards, with 100 paths each")
    each = options.paths // options.shards
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    known = sum((FOLDER / f"shard-{each}-{n:05}.json").exists() for n in range(options.shards))
    print(f"{known} of {options.shards} shards are there", flush=True)
    with ProcessPoolExecutor(options.workers) as pool:
        for done in pool.map(partial(simulate, each), range(options.shards)):
            print(f'CAVVY_PROGRESS {{"done": {done + 1}, "total": {options.shards}}}', flush=True)
    parts = [
        json.loads((FOLDER / f"shard-{each}-{n:05}.json").read_text())
        for n in range(options.shards)
    ]
    width = t.ppf(0.975, options.shards - 1) / options.shards**0.5
    rows = []
    for name in parts[0][0]:
        values = np.array([found[name] for found, _, _ in parts])
        rows.append((name, values.mean(), width * values.std(ddof=1)))
        print(f"{name}: {rows[-1][1]:.2%} +- {rows[-1][2]:.2%}")
    with open(RESULTS / "risk.csv", "w", newline="") as table:
        csv.writer(table).writerows([("measure", "value", "half of the 95 % interval"), *rows])
    counts = np.sum([counts for _, counts, _ in parts], axis=0)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counts / options.paths, EDGES, fill=True)
    axes.axvline(-rows[0][1], color="red", label=f"{rows[0][0]}: {rows[0][1]:.1%}")
    axes.set(xlim=(-1, 2.5), xlabel="return in a year", ylabel="share of the paths")
    axes.legend()
    figure.savefig(RESULTS / "risk.png")
    # Workers share the machine, and each second of a shard costs a worker's part of the price.
    seconds = sum(seconds for _, _, seconds in parts) / options.workers
    millions = each * options.shards / 1e6
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    print(
        f"cost: {seconds / millions:.3g} s and ${price / 3600 * seconds / millions:.3g} "
        "per million paths (`cavvy cost` has the bill)"
    )


if __name__ == "__main__":
    main()
