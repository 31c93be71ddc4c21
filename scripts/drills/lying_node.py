"""Let a simulated malicious node attack a running server and the CLI. Prints each attack, and the
check that refused it.

Usage: .venv/bin/python scripts/drills/lying_node.py [--scale 50] [--seed 0]

The drill exits with 1 if an attack succeeded, or if `/v1/health` took more than 5 times as long as
before. The attacks on commands that connect to nodes (cp, exec, forward, ssh) come from
the tests of hostile tasks, and run last.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
MOST_TIMES = 5


def main() -> int:
    from tests.hostile.hostile_node import play

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=50, help="size of floods; CI uses 1")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cavvy-lies-") as folder:
        found, probe, seen = play(Path(folder), seed=asked.seed, scale=asked.scale)
    print("| attack | refused by | went through |\n|---|---|---|")
    for attack, escapes in found.items():
        print(f"| {attack.tried} | {attack.refused_by} | {'; '.join(escapes[:3]) or 'nothing'} |")
    answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(seen.items()))
    print(f"\n{seen.total():,} requests: {answers}")
    for name, times in (("quiet", probe.quiet), ("attacked", probe.attacked)):
        worst = sorted(times)[int(len(times) * 0.99)]
        median = statistics.median(times)
        print(
            f"health, {name}: median {median * 1000:.1f} ms, 99th percentile {worst * 1000:.1f} ms"
        )
    reach = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests", "-k", "hostile or obeyed"]
    rest = subprocess.run(reach, cwd=ROOT).returncode
    escapes = sum(map(len, found.values()))
    print(f"{escapes} escapes; health answered in {probe.ratio:.1f} times its quiet time")
    return 1 if escapes or rest or probe.ratio > MOST_TIMES else 0


if __name__ == "__main__":
    sys.exit(main())
