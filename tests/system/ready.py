"""`python -m tests.system.ready` gets what tests of real servers need and have to wait for where it
is missing.

`make test` starts it beside the first tests, which need no servers. It is no condition: a test that
finds something missing installs it itself, or says why it is skipped.
"""

import signal
import sys
import time
from collections.abc import Callable

import pytest
from tests.system import hosts, postgres, ray_cluster, slurm, storages, workload_packages
from tests.system.kubernetes import cluster

STEPS: dict[str, Callable[[], object]] = {
    "PostgreSQL": postgres.find,
    "OpenSSH": hosts.require_hosts,
    "Slurm": slurm.why_not,
    "Ray": ray_cluster.installed,
    "SeaweedFS": storages.install_weed,
    "Azurite": storages.install_azurite,
    "packages of templates": workload_packages.install,
    "Kubernetes": cluster.why_not,  # built from its source where it is not there: the longest
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which also ends what a step has started
    for name, get in STEPS.items():
        began = time.monotonic()
        try:
            found = get()
        except (pytest.skip.Exception, postgres.PostgresMissing) as error:
            found = str(error)
        why = f": {found}" if isinstance(found, str) and found else ""
        print(
            f"{name} {'is not to be had' if why else 'is there'} after "
            f"{time.monotonic() - began:.0f} s{why}",
            flush=True,
        )


if __name__ == "__main__":
    main()
