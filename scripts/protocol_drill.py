"""Attack the agents' protocol, or the routes of users, with requests whose values have valid types.
Checks that no answer has a status of 500 or above, and that no rank is stuck.

`python scripts/protocol_drill.py --requests 50000 --store sqlite [--routes user]`
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
_ATTACKS = 200  # number of attacks of agents on one server
_USER_REQUESTS = 3000  # number of requests of a user to one server


async def play(requests: int, kind: str, who: str, seed: int, seen: Counter[int]) -> list[str]:
    """Make `requests` requests to a server. Returns the faults."""
    from tests.api.api_state import open_api
    from tests.api.hostile_agent import LASTING, attack_all, make_attacks
    from tests.api.hostile_user import attack_routes

    wrong: list[str] = []
    while seen.total() < requests:
        with TemporaryDirectory() as folder:
            async with open_api(kind, Path(folder), script=LASTING) as api:
                if who == "user":
                    wrong += await attack_routes(api, _USER_REQUESTS, seed, seen)
                else:
                    wrong += await attack_all(api, make_attacks(_ATTACKS, seed), seen)
        print(f"seed {seed}: {seen.total():,} requests, {len(wrong)} wrong", flush=True)
        seed += 1
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--store", choices=("memory", "sqlite", "postgres"), default="sqlite")
    parser.add_argument("--routes", choices=("agent", "user"), default="agent")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, seen = time.monotonic(), Counter[int]()
    wrong = asyncio.run(play(asked.requests, asked.store, asked.routes, asked.seed, seen))
    for each in wrong[:20]:
        print(each)
    answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(seen.items()))
    took = time.monotonic() - began
    print(f"{seen.total():,} requests in {took:.0f} s: {answers}; {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
