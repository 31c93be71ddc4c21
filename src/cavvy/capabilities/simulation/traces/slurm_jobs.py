"""Reads the jobs that a Slurm cluster has run, as `sacct --parsable2` prints them."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

# https://slurm.schedmd.com/sacct.html#SECTION_Job-Accounting-Fields: ElapsedRaw is in seconds,
# Submit is local time, AllocTRES is a list such as billing=8,cpu=8,gres/gpu=8,gres/gpu:a100=8
FIELDS = ("Submit", "ElapsedRaw", "AllocTRES", "Partition")
_GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]*)?=(\d+)")


def is_accounting(header: str) -> bool:
    """Whether a file with this first line is a list that sacct has printed."""
    return "|" in header


def read_accounting(lines: Iterable[str]) -> Iterator[tuple[float, float, int, str]]:
    """Yield arrival and duration in seconds, GPUs and partition of each job that has had GPUs. The
    first arrival is 0. Steps, and jobs that have not started, are left out.

    Raises ValueError if a field is missing or is no such value; the message names the line.
    """
    rows = csv.DictReader(lines, delimiter="|", quoting=csv.QUOTE_NONE)
    if lacking := [each for each in FIELDS if each not in (rows.fieldnames or ())]:
        raise ValueError(
            f"the list has no field {' and no '.join(lacking)}; expected the output of "
            f"`sacct --allocations --parsable2 --format={','.join(FIELDS)}`"
        )
    found: list[tuple[datetime, float, int, str]] = []
    for row in rows:
        try:
            if (job := _read_job(row)) is not None:
                found.append(job)
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
    found.sort(key=lambda job: job[0])
    for submitted, elapsed, gpus, partition in found:
        yield (submitted - found[0][0]).total_seconds(), elapsed, gpus, partition


def _read_job(row: Mapping[str, str]) -> tuple[datetime, float, int, str] | None:
    resources, elapsed = row["AllocTRES"], float(row["ElapsedRaw"] or 0)
    gpus = _count_gpus(resources)
    if "." in (row.get("JobID") or "") or not gpus or not elapsed:
        return None
    return datetime.fromisoformat(row["Submit"]), elapsed, gpus, row["Partition"]


def _count_gpus(resources: str) -> int:
    """Count `gres/gpu=8` or, where a cluster counts by type alone, each `gres/gpu:a100=8`."""
    counts = [(kind, int(count)) for kind, count in _GPUS.findall(resources)]
    whole = [count for kind, count in counts if not kind]
    return whole[0] if whole else sum(count for _, count in counts)
