"""Finds the disks that a bill assigns to one gang and the ledger to another, so that the charges of
these disks can be compared as one sum.

A cloud bills a volume for its whole life under the tag of the gang for which the volume was
created. In the ledger, the disk charges of a job cover the time in which the job used the volume;
the volume's own entries cover the remaining time. Therefore one sum is compared, which contains the
disk costs of the volume itself, of the gang in the volume's tag, and of all jobs that used the
volume. The volume's own charges cover exactly the time for which no job paid, so the times of the
charges show which jobs used the volume. If a job used the volume, the job's disk charge begins at
the moment when a charge of the volume ends, or ends at the moment when a charge of the volume
begins. The two times are equal to the microsecond.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerEntry, LedgerLine


def group_disks(
    lines: Iterable[LedgerLine],
    provider: str,
    gangs: Mapping[str, str],
    tags: Mapping[str, str],
) -> dict[str, str]:
    """Group the gangs and volumes whose disks must be added up before the comparison. Returns the
    group of each gang and each volume. `gangs` maps attempts to gangs. Each disk in the bill has a
    tag that names a gang; `tags` maps the IDs of the disks to these gangs.
    """
    entries = _list_entries(lines, provider)
    if not (volumes := entries[STORAGE_LINE]):
        return {}
    begins: dict[datetime, list[str]] = {}
    ends: dict[datetime, list[str]] = {}
    for attempt, own in entries[ChargeKind.DISK].items():
        for since, until in _cover(own):
            begins.setdefault(since, []).append(gangs.get(attempt, attempt))
            ends.setdefault(until, []).append(gangs.get(attempt, attempt))
    groups: dict[str, str] = {}
    for volume, own in volumes.items():
        tag = tags.get(name_disk(volume.rpartition(":")[2]), volume)
        found = {volume, tag}
        for since, until in _cover(own):
            found.update(ends.get(since, ()), begins.get(until, ()))
        _join(groups, found, tag)
    return groups


def _list_entries(
    lines: Iterable[LedgerLine], provider: str
) -> dict[str, dict[str, list[LedgerEntry]]]:
    """Return the entries of volumes and of attempts' disks, by `line` and subject."""
    found: dict[str, dict[str, list[LedgerEntry]]] = {STORAGE_LINE: {}, ChargeKind.DISK: {}}
    for line in lines:
        entry, subject = line.entry, line.subject
        if subject.provider != provider or entry.kind is EntryKind.DISCOUNT:
            continue
        if entry.line in found:
            found[entry.line].setdefault(subject.id, []).append(entry)
    return found


def name_disk(resource: str) -> str:
    """Return the id of a disk. A bill may contain the whole path of the disk."""
    return resource.rpartition("/")[2].lower()


def _cover(entries: Iterable[LedgerEntry]) -> Iterator[tuple[datetime, datetime]]:
    """Return the periods that the entries charge. Entries with a negative quantity are corrections,
    which reduce the charged time. Adjacent and overlapping periods are merged.
    """
    steps: dict[datetime, int] = {}
    for entry in entries:
        sign = 1 if entry.quantity > 0 else -1 if entry.quantity < 0 else 0
        steps[entry.since] = steps.get(entry.since, 0) + sign
        steps[entry.until] = steps.get(entry.until, 0) - sign
    depth, since = 0, None
    for at in sorted(steps):
        depth += steps[at]
        if depth > 0 and since is None:
            since = at
        elif depth <= 0 and since is not None:
            yield since, at
            since = None


def _join(groups: dict[str, str], found: Iterable[str], name: str) -> None:
    """Merge these names, and all groups that contain one of these names, into one group."""
    before = {groups[each] for each in found if each in groups}
    name = min(before, default=name)
    for each, group in groups.items():
        if group in before:
            groups[each] = name
    groups.update(dict.fromkeys(found, name))
