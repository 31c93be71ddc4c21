"""Two servers on one PostgreSQL serve two services, while everything is killed under load. No
answer may be wrong, no process may be left, and the bills must equal a recount.

    python scripts/drills/kill_serving_pair.py --minutes 5 --plane haproxy --seed 1

Callers send GET and POST requests (with and without an Idempotency-Key), read event streams, defer
calls (`Prefer: respond-async`), queue calls and send signed webhooks, at both servers and for two
services: the requests of one have a host name, which HAProxy passes on by itself, and those of the
other go through the gateway. Meanwhile, servers, gateways, HAProxy processes and replicas are
killed (SIGKILL) in a random order, and PostgreSQL once. At the end:

* Each answer belongs to its request, or is 502 or 504 with a request ID. A request without an
  answer was at a process that was killed. No answer is 503.
* Requests that are not idempotent reached one replica at most.
* Each deferred call, queued call and delivery that was accepted has one result.
* No process of a replica, gateway or HAProxy is left.
* The bills equal the times in the provider's records and the sums of the ledger.
* The requests in the ledger equal those that the replicas have received. Two more are permitted for
  each killed replica, which it may not have read. Fewer are permitted only if HAProxy passed them
  on itself, just before it was killed or replaced.

The exit code is 1 if anything is wrong.
"""

import argparse
import sys
import time
from collections import Counter
from random import Random

# it makes `tests` importable
from server_pair import run_drill
from tests.system.replica_site import ReplicaSite
from tests.system.serving_crashes import KINDS, ServingPair, write_settings


def drill(site: ReplicaSite, plane: str, minutes: float, seed: int) -> list[str]:
    dice, pair = Random(seed), ServingPair(site, plane, pause_s=0.3)
    kinds = [*KINDS, "haproxy"] if plane == "haproxy" else KINDS
    pair.start()
    began = time.monotonic()
    crashes = [began + 30 * minutes]  # of PostgreSQL, in the middle
    while (now := time.monotonic()) < began + 60 * minutes:
        if crashes and now > crashes[0]:
            crashes.clear()
            pair.kill("postgres", dice)
        else:
            pair.kill(dice.choice(kinds), dice)
        time.sleep(dice.uniform(1.0, 5.0))
    wrong = pair.finish()
    print(f"plane {plane}, seed {seed}; kills: {dict(Counter(each.what for each in pair.kills))}")
    print(f"answers: {dict(sorted(pair.load.found.counts.items()))}")
    print(f"{len(pair.read_received())} requests reached replicas")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--plane", choices=("embedded", "haproxy"), default="embedded")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    return run_drill(
        "cavvy-serving-",
        lambda site: drill(site, given.plane, given.minutes, given.seed),
        write_settings(given.plane),
    )


if __name__ == "__main__":
    sys.exit(main())
