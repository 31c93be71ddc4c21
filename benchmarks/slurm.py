"""Measures how much longer a program takes to start through Cavvy than through Slurm's own
commands, from the submission on.

    python benchmarks/slurm.py [--pairs 20]

The benchmark makes a real cluster on this machine (see tests/system/slurm.py for what this needs).
It starts the same program in turn through Slurm and through Cavvy. The program records when it
began. The time is measured from the submission: `sbatch`, or the client's call to a running server.
The result is the median of the differences between the two times of each pair.
"""

import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, fresh_home
from pairs import WAIT_S, compare, make_parser

sys.path.insert(0, str(ROOT))

from tests.system.slurm import Cluster, cluster_at, why_not
from tests.system.trust import environment

from cavvy.client import ApiClient, connect


def plain_s(cluster: Cluster, stamp: Path) -> float:
    """Submit with sbatch a script that starts its program with srun. Returns the seconds until the
    program began.
    """
    script = f"#!/bin/sh\nsrun sh -c 'date +%s.%N > {stamp}.new; mv {stamp}.new {stamp}'\n"
    began = time.time()
    cluster.run("sbatch", "--output=/dev/null", "--cpus-per-task=1", "--mem=512M", stdin=script)
    return _read(stamp) - began


def cavvy_s(client: ApiClient, stamp: Path) -> float:
    task = (
        f"{{name: t, resources: {{cpu: 1, memory: 512MiB}}, run: 'date +%s.%N > {stamp}.new; mv "
        f"{stamp}.new {stamp}'}}"
    )
    began = time.time()
    name = client.submit(task).name
    took = _read(stamp) - began
    for _ in client.follow("default", name):
        pass
    return took


def _calm(cluster: Cluster) -> None:
    """Wait until slurmctld is idle. For a second after the end of a job, it starts no new jobs."""
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))
    time.sleep(1.5)


def _read(stamp: Path) -> float:
    give_up = time.monotonic() + WAIT_S
    while not stamp.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{stamp} never came")
        time.sleep(0.005)
    return float(stamp.read_text())


def main() -> None:
    pairs = make_parser(__doc__).parse_args().pairs
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with (
        tempfile.TemporaryDirectory(prefix="cavvy-slurm-") as folder,
        cluster_at(Path(folder)) as cluster,
        environment(cluster.environ),
        fresh_home() as env,
    ):
        settings = (
            f'[providers.local]\nenabled = false\n[providers.slurm]\nfolder = "{folder}/shared"\n'
        )
        Path(env["CAVVY_CONFIG"]).write_text(settings)
        with connect() as client:
            compare(
                "sbatch and srun",
                lambda number: plain_s(cluster, Path(folder) / f"plain{number}"),
                lambda number: cavvy_s(client, Path(folder) / f"cavvy{number}"),
                lambda: _calm(cluster),
                pairs=pairs,
            )


if __name__ == "__main__":
    main()
