"""Measures every bar of the interface and the server, and prints one table: the figure, its bar,
and whether it is met. Ends with 1 if a bar is missed or a program fails.

    python benchmarks/bars.py [--save] [NAME ...]

With `--save`, the rows of these programs in `results/bars.csv` are replaced. Each NAME is one of
the programs in this folder that are listed below; without names, all of them run, one after the
other.
Other work on the machine slows the figures in seconds of wall-clock time.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from measure import BARS_FILE, PYTHON, table

COLUMNS = ("program", "what", "figure", "bar", "unit", "verdict")
# program -> its arguments
PROGRAMS: dict[str, tuple[str, ...]] = {
    "cli_start": (),
    "rank_catalog": (),
    "offers_cli": (),
    "server": (),
    "jobs": (),
    "latency": (),
    "year": ("--keep", "0", "--logs", "0"),
    "telemetry": (),
    "consoles": (),
    "dev_session": (),
    "hangs": (),
    "hostile_files": (),
}


def measure(name: str, file: Path) -> list[tuple[object, ...]]:
    """Run one program. Returns a row for each bar that it recorded, and one if it failed."""
    print(f"measuring: {name}", file=sys.stderr, flush=True)
    program = Path(__file__).with_name(f"{name}.py")
    command = [PYTHON, str(program), *PROGRAMS[name]]
    ended = subprocess.run(
        command, env={**os.environ, BARS_FILE: str(file)}, stdout=subprocess.DEVNULL, check=False
    )
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows: list[tuple[object, ...]] = [(name, *json.loads(line)) for line in lines]
    if ended.returncode != 0 or not rows:
        rows.append((name, "the program", f"exit code {ended.returncode}", "0", "", "FAILED"))
    return rows


def save(rows: list[tuple[object, ...]], file: Path) -> None:
    """Replace the rows of the measured programs in the file of recorded figures."""
    measured, today = {row[0] for row in rows}, datetime.now(UTC).date()
    kept: list[list[object]] = []
    if file.exists():
        with file.open(encoding="utf-8", newline="") as old:
            kept = [[*row] for row in csv.reader(old) if row[0] not in {*measured, COLUMNS[0]}]
    made = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    with file.open("w", encoding="utf-8", newline="") as new:
        writer = csv.writer(new, lineterminator="\n")
        writer.writerows([[*COLUMNS, "measured"], *kept, *([*row, today] for row in made)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--save", action="store_true", help="record the figures in results/")
    arguments = parser.parse_args()
    names = arguments.names or list(PROGRAMS)
    if unknown := [each for each in names if each not in PROGRAMS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PROGRAMS)}")
    with tempfile.TemporaryDirectory(prefix="cavvy-bars-") as folder:
        rows = [row for name in names for row in measure(name, Path(folder, name))]
    table(f"{len(rows)} bars", (*COLUMNS[:-1], ""), rows)
    if arguments.save:
        save(rows, Path(__file__).parent / "results" / "bars.csv")
    if any(row[-1] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
