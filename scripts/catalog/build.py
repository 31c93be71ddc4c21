"""Builds the snapshot of prices that ships with Cavvy from a folder of price tables.

    python scripts/catalog/build.py --facts FOLDER [--out src/cavvy/catalog/snapshot.db]

Equal tables give files with equal bytes. At the end, the script prints how many rows were left out,
by reason.
"""

import argparse
import csv
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from clouds import COLLECTED, Reader

from cavvy.domain.units import parse_usd
from cavvy.store.snapshot.choose import SHIPPED
from cavvy.store.snapshot.refresh import EgressPrice, write_snapshot


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--facts", type=Path, required=True, help="the folder with aws_vms.csv and the others"
    )
    arguments.add_argument(
        "--out", type=Path, default=SHIPPED, help="the file to write (default: the shipped one)"
    )
    given = arguments.parse_args()
    reader = Reader(given.facts)
    offers = list(reader.offers())
    egress = list(read_egress(given.facts / "egress.csv"))
    newest = max(offer.as_of for offer in offers if offer.as_of)
    with tempfile.TemporaryDirectory(dir=given.out.parent) as folder:
        new = Path(folder) / "snapshot.db"
        rows = write_snapshot(new, offers, egress, as_of=newest)
        new.chmod(0o644)
        new.replace(given.out)
    report(reader.left_out, rows, len(offers), given.out)


def read_egress(path: Path) -> Iterator[EgressPrice]:
    """The egress prices to the internet by region, for the tier of the first terabyte, and those to
    other regions of the same cloud. Rows that do not state this clearly are skipped.
    """
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            region = row["from_region_group"]
            target, names = "internet", tuple[str, ...]()
            if row["to"].startswith("internet"):
                if "may be a placeholder" not in row["to"]:
                    names = _regions(row["provider"], region, row["to"])
            else:
                target, names = _within_cloud(row["provider"], region, row["to"])
            for name in names:
                yield EgressPrice(
                    provider=row["provider"],
                    region=name,
                    target=target,
                    per_gb=parse_usd(row["usd_per_gb"]),
                    source=row["source"],
                    as_of=_date(row["source"]),
                )


def _regions(provider: str, group: str, target: str) -> tuple[str, ...]:
    """The regions to which a row applies; "" means all regions. The result is empty for a row about
    a later tier or an unclear group."""
    match provider, group, target:
        case "aws", _, "internet":
            return (group,)
        case "gcp", "worldwide (not China, Australia)", "internet, 0-1 TB":
            return ("",)
        case "azure", "eastus", "internet, 1 GB-10 TB":
            return ("eastus",)
        case "azure", "north america, europe", "internet/other cloud":
            return ("",)
        case "coreweave", "all", "internet":
            return ("",)
        case "oci", "all", "internet, first 10 TB/month":
            return ("",)
        case "ibm", "us-south", "internet, 0-50 (code threshold units GB)":
            return ("us-south",)
        case _:
            return ()


# the groups of regions in the facts -> the areas of `cavvy.catalog.regions`, by continent
_CONTINENTS = {
    "us, northamerica": ("north-america",),
    "europe": ("eu",),
    "asia": ("asia",),
    "southamerica": ("south-america",),
    "australia": ("oceania",),
    "any (not indonesia, australia)": ("",),
    "asia-southeast2, australia": ("oceania",),
    "north america, europe": ("north-america", "eu"),
    "asia, oceania, middle east, africa": ("asia", "oceania", "middle-east", "africa"),
    "south america": ("south-america",),
}


def _within_cloud(provider: str, group: str, target: str) -> tuple[str, tuple[str, ...]]:
    """The target of a row about other regions of the same cloud, and the regions or continents to
    which the row applies. A target is a region, `region` for any other one, `continent` for one
    of the same continent, or `elsewhere` for one of another."""
    if provider == "aws" and target.startswith("aws: "):
        named = target.removeprefix("aws: ").split()
        return (named[0] if len(named) == 1 else "region"), (group,)
    match provider, target:
        case "aws", "other aws region (all listed)":
            return "region", (group,)
        case "oci", "other oci region":
            return "region", ("",)
        case _, "other region, same continent":
            return "continent", _CONTINENTS.get(group, ())
        case _, "other continent" | "other continent (either direction)":
            return "elsewhere", _CONTINENTS.get(group, ())
        case _:
            return "", ()


def _date(source: str) -> date:
    named = re.search(r"(\d{4})-(\d\d)(?:-(\d\d))?", source)
    return date(int(named[1]), int(named[2]), int(named[3] or 1)) if named else COLLECTED


def report(left_out: Counter[str], rows: int, read: int, path: Path) -> None:
    print(
        f"{rows:,} offers in {path} ({path.stat().st_size / 1e6:.1f} MB); {read - rows:,} seen "
        "twice, left out:"
    )
    for reason, number in left_out.most_common():
        print(f"  {number:>6,}  {reason}", file=sys.stdout)


if __name__ == "__main__":
    main()
