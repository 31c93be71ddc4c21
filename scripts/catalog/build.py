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
from cavvy.store.snapshot.writer import EgressPrice, write_snapshot


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
    """The internet egress prices by region, for the tier of the first terabyte. Rows that do not
    state this clearly are skipped.
    """
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            region = row["from_region_group"]
            if "may be a placeholder" in row["to"] or not row["to"].startswith("internet"):
                continue
            for name in _regions(row["provider"], region, row["to"]):
                yield EgressPrice(
                    provider=row["provider"],
                    region=name,
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
