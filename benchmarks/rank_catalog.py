"""Measures the CPU milliseconds to rank the whole catalog for a request, in this process and
without a cache between rounds.

    python benchmarks/rank_catalog.py

A round opens the snapshot, ranks its offers, counts the rejected offers by reason, finds the
nearest misses and closes the snapshot. For comparison, SkyPilot 0.14.1 on the same kind of machine
takes 440 ms for A100:8.
"""

import statistics
import time

from measure import record, table

from cavvy.catalog.accelerators import names_matching
from cavvy.catalog.fit import accelerator_fit
from cavvy.catalog.needs import parse_accelerator
from cavvy.catalog.regions import locate
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.domain.units import parse_rate
from cavvy.store.snapshot import CatalogSnapshot

ROUNDS = 41
# request -> (resources, number of requested rows, limit in ms)
NEEDS: dict[str, tuple[ResourceSpec, int | None, float]] = {
    "A100:8": (ResourceSpec(accelerators=parse_accelerator("A100:8")), None, 5.0),
    "H100:8, eu, at most $15": (
        ResourceSpec(
            accelerators=parse_accelerator("H100:8"), regions=("eu",), max_rate=parse_rate(15)
        ),
        None,
        20.0,
    ),
    "four alternatives, spot too": (
        ResourceSpec(
            accelerators=parse_accelerator("H100|A100:80GB|MI300X|H200:8"), spot=SpotPolicy.AUTO
        ),
        None,
        20.0,
    ),
    "any GPU of 24 GB, spot, eu": (
        ResourceSpec(
            accelerators=parse_accelerator("24GB:1.."), spot=SpotPolicy.ONLY, regions=("eu",)
        ),
        None,
        20.0,
    ),
    "8 CPUs, 32 GiB, first 100": (ResourceSpec(cpus_min=8, memory_min_mib=32768), 100, 20.0),
    "8 CPUs, 32 GiB, eu, first 100": (
        ResourceSpec(cpus_min=8, memory_min_mib=32768, regions=("eu",)),
        100,
        20.0,
    ),
    "8 CPUs, spot, at most $0.10": (
        ResourceSpec(cpus_min=8, spot=SpotPolicy.ONLY, max_rate=parse_rate("0.10")),
        100,
        20.0,
    ),
}


def main() -> None:
    lines = []
    for name, (need, limit, bar_ms) in NEEDS.items():
        taken = sorted(_round_ms(need, limit) for _ in range(ROUNDS))
        with CatalogSnapshot.open() as snapshot:
            answer = snapshot.match(need, limit=limit)
        median = statistics.median(taken)
        verdict = record(f"rank {name}", median, bar_ms, "CPU ms")
        lines.append((name, answer.matched, median, taken[int(0.9 * ROUNDS)], bar_ms, verdict))
    columns = (
        "need",
        "offers that fit",
        f"CPU ms (median of {ROUNDS})",
        "90th percentile",
        "bar, CPU ms",
        "",
    )
    table(f"ranking a catalog of {answer.total:,} offers", columns, lines)


def _round_ms(need: ResourceSpec, limit: int | None) -> float:
    for remembered in (names_matching, accelerator_fit, locate):
        remembered.cache_clear()
    started = time.process_time()
    with CatalogSnapshot.open() as snapshot:
        snapshot.match(need, limit=limit)
    return (time.process_time() - started) * 1000


if __name__ == "__main__":
    main()
