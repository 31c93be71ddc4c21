"""Sends 10,000 damaged requests to a gateway, and checks that it goes on and mixes no answers; then
as many damaged bodies for a language model whose answers are damaged, too.

python scripts/drills/gateway_fuzz.py [--count N] [--seed N]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.contract.gateway_process import GatewayProcess
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.hostile.gateway_fuzz import DamagedEngine, fuzz_bodies, run_fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    replica = ReplicaStandIn().start()
    engine = DamagedEngine().start()
    service = {"name": "svc", "hosts": ["svc.example"], "concurrency": 64}
    model = {"name": "llm", "prefix": "/default/llm", "models": ["m"], "concurrency": 64}
    gateway = GatewayProcess(services=[service, {**model, "routing": {"by": "cache"}}])
    try:
        gateway.set_replicas("svc", [replica])
        gateway.set_replicas("llm", [engine])
        report = run_fuzz(gateway.port, gateway.process.pid, options.seed, options.count)
        assert gateway.process.poll() is None, "the gateway ended"
        assert replica.broken == [], replica.broken
        print(report)
        print(fuzz_bodies(gateway.port, gateway.process.pid, options.seed, options.count))
        assert gateway.process.poll() is None, "the gateway ended"
    finally:
        gateway.remove()
        replica.stop()
        engine.stop()


if __name__ == "__main__":
    main()
