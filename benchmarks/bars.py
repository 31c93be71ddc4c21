"""Measures every bar of the interface and the server, and prints one table: the figure, its bar,
and whether it is met. Ends with 1 if a bar is missed or a program fails.

    python benchmarks/bars.py [NAME ...]

Each NAME is one of the programs in this folder that are listed below; without names, all of them
run, one after the other. Other work on the machine slows the figures in seconds of wall-clock time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import BARS_FILE, PYTHON, table

# program -> its arguments
PROGRAMS: dict[str, tuple[str, ...]] = {
    "cli_start": (),
    "rank_catalog": (),
    "offers_cli": (),
    "server": (),
    "jobs": (),
    "latency": (),
    "year": ("--keep", "0", "--logs", "0"),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    names = parser.parse_args().names or list(PROGRAMS)
    if unknown := [each for each in names if each not in PROGRAMS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PROGRAMS)}")
    with tempfile.TemporaryDirectory(prefix="cavvy-bars-") as folder:
        rows = [row for name in names for row in measure(name, Path(folder, name))]
    columns = ("program", "what", "figure", "bar", "unit", "")
    table(f"{len(rows)} bars", columns, rows)
    if any(row[-1] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
