"""Measures the CPU seconds of `cavvy offers --gpu A100:8`, including all processes that it starts.
No server runs.

    python benchmarks/offers_cli.py

For comparison, `sky show-gpus` (SkyPilot 0.14.1) on the same kind of machine takes 1.34 s in the
client, plus seconds on its server. If `sky` is installed in this environment, it is measured too.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from measure import CAVVY, PYTHON, adopt_orphans, children_cpu_s, median_of, record, table

from cavvy.store.snapshot import CatalogSnapshot

BAR_S = 0.20
WISHES = (
    ["--gpu", "A100:8"],
    ["--gpu", "H100:8", "--spot", "--max-price", "20", "--region", "eu", "-o", "json"],
    ["--cpus", "32", "--memory", "128GB", "--region", "us"],
)


def main() -> None:
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as home:
        env = {**os.environ, "CAVVY_HOME": home}
        os.environ.update(env)
        with CatalogSnapshot.open() as snapshot:
            rows, accelerated = snapshot.info().rows, snapshot.info().rows_with_accelerator
        python_s = median_of(lambda: _cpu_s([PYTHON, "-c", "pass"], env))
        lines = []
        for wish in WISHES:
            cpu_s = median_of(lambda wish=wish: _cpu_s([CAVVY, "offers", *wish], env))
            what = " ".join(["cavvy offers", *wish])
            verdict = record(what, cpu_s, BAR_S, "CPU s")
            lines.append((what, cpu_s, cpu_s / python_s, BAR_S, verdict))
        if peer := shutil.which("sky"):
            cpu_s = median_of(lambda: _cpu_s([peer, "show-gpus", "A100:8"], env))
            lines.append(
                ("sky show-gpus A100:8 (client alone)", cpu_s, cpu_s / python_s, "-", "peer")
            )
    columns = ("command", "CPU s (median of 7)", "times python -c pass", "bar, CPU s", "")
    table(
        f"listing offers, cold, over {rows:,} rows, {accelerated:,} with an accelerator",
        columns,
        lines,
    )


def _cpu_s(command: Sequence[str], env: Mapping[str, str]) -> float:
    """The CPU seconds of a command, including processes that it leaves running, until all have
    ended.
    """
    before = children_cpu_s()
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, check=True
    )
    return children_cpu_s() - before


if __name__ == "__main__":
    main()
