"""Does mining bitcoin pay on a rented machine? The program measures how fast this machine hashes,
and compares what that earns with what the machine costs: by orders of magnitude, the answer is no.

    python main.py --price 100000

A machine earns a part of each day's coins: its part of the hashes in the world. `--hashes 150e6`
answers for another machine, such as a GPU, without measuring. `--price` and `--network` are
assumptions: look them up. Read your cloud's terms, too: many forbid mining.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
BLOCKS_A_DAY = 144  # one in ten minutes, to which the difficulty adapts
REWARD = 3.125  # coins per block from April 2024 to 2028; fees add some per cent
# The first block's header (19 times 4 bytes, and the nonce): what miners try in a loop.
HEADER = bytes.fromhex(
    "01000000" + "00" * 32 + "3ba3edfd7a7b12b27ac72c3e67768f617fc81bc3888a51323a9fb8aa4b1e5e4a"
    "29ab5f49ffff001d"
)
FIRST_NONCE = 2083236893


def count_hashes(seconds: float) -> float:
    """Return how many headers a core tries in a second, in Python with OpenSSL's SHA-256."""
    sha, start, tried = hashlib.sha256, time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for nonce in range(tried, tried + 10_000):
            sha(sha(HEADER + nonce.to_bytes(4, "little")).digest()).digest()
        tried += 10_000
    return tried / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--price", type=float, default=100_000, help="dollars of a coin")
    parser.add_argument("--network", type=float, default=1e21, help="hashes a second in the world")
    parser.add_argument("--hashes", type=float, help="hashes a second, instead of measuring")
    parser.add_argument("--watts", type=float, default=300, help="of a machine of your own")
    parser.add_argument("--tariff", type=float, default=0.12, help="dollars per kWh for it")
    parser.add_argument("--seconds", type=float, default=5, help="of measuring")
    options = parser.parse_args()
    for name, value in vars(options).items():
        if value is not None and not (math.isfinite(value) and value > 0):
            parser.error(f"--{name}: a number above 0 was expected, not {value}")
    block = hashlib.sha256(
        hashlib.sha256(HEADER + FIRST_NONCE.to_bytes(4, "little")).digest()
    ).digest()
    assert block[::-1].hex().startswith("000000000019d668"), "the hash is wrong"
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    saved, cores, rate = FOLDER / "rate.json", len(os.sched_getaffinity(0)), options.hashes
    if rate is None and saved.exists():
        rate = json.loads(saved.read_text())
        print("the speed was measured before", flush=True)
    if rate is None:
        with ProcessPoolExecutor(cores) as pool:
            rate = sum(pool.map(count_hashes, [options.seconds] * cores))
        saved.with_suffix(".half").write_text(json.dumps(rate))
        saved.with_suffix(".half").replace(saved)
    earned = rate / (options.network + rate) * BLOCKS_A_DAY * REWARD * options.price
    rented = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan")) * 24
    owned = options.watts / 1000 * 24 * options.tariff
    costs = owned if not rented > 0 else rented
    what = "the electricity of a machine of your own" if costs is owned else "this machine's rent"
    rows = [
        ("hashes a second", f"{rate:.4g}"),
        ("earnings, dollars a day", f"{earned:.4g}"),
        (f"{what}, dollars a day", f"{costs:.4g}"),
        ("dollars spent per dollar earned", f"{costs / earned:.4g}"),
        ("days until this machine finds a block", f"{options.network / rate / BLOCKS_A_DAY:.4g}"),
        ("price of a coin at which it would pay, dollars", f"{options.price * costs / earned:.4g}"),
    ]
    with open(RESULTS / "mining.csv", "w", newline="") as table:
        csv.writer(table).writerows(rows)
    for name, value in rows:
        print(f"{name:60} {value:>10}")
    if earned > costs:
        print("yes, with these assumptions: check --price, --network and the terms of your cloud")
    else:
        print(f"no: a day costs ${costs:.4g} and earns ${earned:.4g}")


if __name__ == "__main__":
    main()
