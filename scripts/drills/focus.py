"""Checks random statements with the FinOps Foundation's focus-validator.

    python scripts/drills/focus.py --validator /path/to/venv/bin/python --lines 100000

The validator needs numpy 1 and cannot share an environment with Cavvy:

    python -m venv fv && fv/bin/pip install focus-validator==1.0.0 "multimethod<2" "pyarrow<20"

Its list of currencies is at a path relative to the working folder, so it is started in the folder
in which it is installed. The exit code is 1 if a check fails.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cavvy.cli.view.statement import write_csv, write_parquet
from cavvy.domain.credentials import name_account
from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import (
    KINDS,
    REQUEST_LINE,
    STORAGE_LINE,
    EntryKind,
    EntrySource,
    LedgerEntry,
    LedgerLine,
    LedgerSubject,
    QuantityUnit,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

_MONTH = datetime(2026, 11, 1, tzinfo=UTC)


def make_lines(dice: random.Random, count: int) -> Iterator[LedgerLine]:
    """Random lines of all kinds, some with empty texts."""
    for number in range(count):
        charge = dice.choice([*ChargeKind])
        kind = dice.choice([KINDS[charge], KINDS[charge], EntryKind.CORRECTION, EntryKind.DISCOUNT])
        traffic = charge is ChargeKind.TRAFFIC
        since = _MONTH + timedelta(seconds=dice.randrange(29 * 86400))
        length = timedelta(microseconds=dice.choice([0, 1, dice.randrange(86_400_000_000)]))
        sign = -1 if kind is EntryKind.DISCOUNT else dice.choice([1, 1, -1])
        amount = sign * dice.choice([0, 1, dice.randrange(10**9)])
        project = dice.choice(["default", "vision"])
        entry = LedgerEntry(
            number=number + 1,
            subject=f"job{number % 500}-1",
            project=project,
            rank=dice.randrange(8),
            sequence=number + 1,
            kind=kind,
            line=str(charge),
            line_since=since,
            since=since,
            until=since + length,
            quantity=dice.randrange(10**12) if traffic else length // timedelta(microseconds=1),
            unit=QuantityUnit.BYTES if traffic else QuantityUnit.MICROSECONDS,
            rate=HourlyRate(0 if traffic else dice.randrange(10**8)),
            amount=Money(amount),
            source=dice.choice([*EntrySource]),
            corrects=number or 1 if kind is EntryKind.CORRECTION else None,
        )
        line = LedgerLine(entry=entry, subject=_make_subject(dice, entry))
        yield dice.choice([line, line, line, _of_volume(line), _of_requests(dice, line)])


def _of_volume(line: LedgerLine) -> LedgerLine:
    """The line for a volume between jobs."""
    kind = EntryKind.STORAGE
    return LedgerLine(
        entry=replace(line.entry, kind=kind, line=STORAGE_LINE, corrects=None),
        subject=replace(line.subject, job="", job_id="", attempt=0, volume="data"),
    )


def _of_requests(dice: random.Random, line: LedgerLine) -> LedgerLine:
    """The line for a part of a replica's bill, or for what was taken off its kind."""
    parts = (EntryKind.NODE, EntryKind.IDLE, EntryKind.COLD_START, EntryKind.REQUEST)
    kind = dice.choice(parts)
    requests = kind is EntryKind.REQUEST
    entry = replace(
        line.entry,
        kind=kind,
        line=REQUEST_LINE,
        corrects=None,
        quantity=dice.randrange(10**6) if requests else 0,
        unit=QuantityUnit.REQUESTS if requests else QuantityUnit.NONE,
        rate=HourlyRate(),
        source=EntrySource.DIVISION,
    )
    key = dice.choice(["", "web"]) if requests else ""
    return LedgerLine(entry=entry, subject=replace(line.subject, service="chat", key=key))


def _make_subject(dice: random.Random, entry: LedgerEntry) -> LedgerSubject:
    provider = dice.choice(["aws", "gcp", "local"])
    return LedgerSubject(
        id=entry.subject,
        project=entry.project,
        user=dice.choice(["", "ada", "Zoë"]),
        job_id=entry.subject.removesuffix("-1"),
        job=dice.choice(["train", 'quoted, "name"', "ночь"]),
        attempt=1,
        provider=provider,
        account=name_account(provider, dice.choice(["", "vision"])),
        region=dice.choice(["", "us-east-1"]),
        zone=dice.choice(["", "us-east-1a"]),
        instance_type=dice.choice(["p5.48xlarge", "a2-highgpu-1g"]),
        accelerator=dice.choice(["", "H100"]),
        accelerators=dice.choice([0, 0.5, 8]),
        purchase=dice.choice(["on-demand", "spot", "reserved"]),
        tags=dice.choice([{}, {"team": "vision", "größe": 'a"b'}]),
    )


def validate(python: str, file: Path, version: str) -> bool:
    """Whether the validator has no complaint about the file; prints what it says."""
    where = "import focus_validator, os; print(os.path.dirname(focus_validator.__path__[0]))"
    folder = subprocess.run(
        [python, "-c", where], check=True, capture_output=True, text=True
    ).stdout.strip()
    command = [python, "-m", "focus_validator.main", "--data-file", str(file.absolute())]
    told = subprocess.run(
        [*command, "--validate-version", version], capture_output=True, text=True, cwd=folder
    )
    passed = told.returncode == 0 and told.stdout.strip() == "Validation succeeded."
    print(f"{file.name}: {'passed' if passed else told.stdout + told.stderr}")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--validator", required=True, help="a Python with focus-validator")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--version", default="1.0")
    asked = parser.parse_args()
    lines = list(make_lines(random.Random(asked.seed), asked.lines))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "focus.csv")
        with file.open("w", encoding="utf-8", newline="") as out:
            write_csv(out, lines)
        write_parquet(file.with_suffix(".parquet"), lines)
        passed = [
            validate(asked.validator, each, asked.version)
            for each in (file, file.with_suffix(".parquet"))
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
