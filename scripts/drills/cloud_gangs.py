"""Run gangs on simulations of EC2 and of all clouds on the shared layer; every fifth request
fails.

Usage: .venv/bin/python scripts/drills/cloud_gangs.py [GANGS] [SEED]

The production control plane runs on virtual time. The drill prints a table of each cloud's gangs,
faults and bills. It exits with 1 if a machine is left or was started twice, or if a bill is wrong.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "cloud", "gangs", "granted", "machines", "requests", "faults", "left", "doubled",
    "billed $", "unsure $", "recount $", "bill/recount", "rolled back", "inside",
)  # fmt: skip


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.providers.aws.sim.test_aws_gangs import ACCOUNT
    from tests.providers.aws.sim.test_aws_gangs import run_drill as run_aws_drill
    from tests.sim.cloud_drill import run_drill

    gangs, seed = [*map(int, sys.argv[1:]), *(200, 1)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as home:
        drill = run_drill(seed, gangs, Path(home))
        os.environ.update(ACCOUNT)
        drill.found["aws"] = run_aws_drill(seed, Path(home))
    print(" ".join(f"{each:>14}" for each in COLUMNS))
    for name, each in sorted(drill.found.items()):
        counts = (each.gangs, each.granted, each.machines, each.requests)
        ends = (sum(each.faults.values()), each.left, each.doubled)
        bills = (each.billed, each.unsure, each.recounted)
        money = [f"{micros / 1_000_000:.4f}" for micros in bills]
        share = f"{each.billed / each.recounted:.4f}" if each.recounted else "-"
        inside = f"{each.inside}/{each.gangs}"
        row = (name, *counts, *ends, *money, share, each.rolled_back, inside)
        print(" ".join(f"{value:>14}" for value in row))
    print(", ".join(f"{count} jobs {phase}" for phase, count in drill.phases.items()))
    for text in [*drill.reasons, *drill.problems]:
        print(text)
    wrong = any(
        each.left or each.doubled or each.inside < each.gangs for each in drill.found.values()
    )
    return 1 if wrong or drill.problems else 0


if __name__ == "__main__":
    sys.exit(main())
