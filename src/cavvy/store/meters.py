"""Bills of volumes for the time between jobs, and divided bills of replicas (`Store.meters`); next
to the ledger's entries, the tokens of language models by client key, model and day, and the energy
that nodes measured by attempt and day."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import add
from typing import Any

import msgspec

from cavvy.domain.events import ChargeKind
from cavvy.domain.figures import FigureBlock
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import (
    EnergyUse,
    EntryKind,
    LedgerPosting,
    LedgerSubject,
    TokenUse,
    combine_tokens,
)
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeBill, VolumeOwner, VolumeUse
from cavvy.store.base import LedgerFilter, StaleVersion
from cavvy.store.documents import decode_attempt, decode_tags, encode, to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.ledger import (
    DIMENSIONS,
    append_entries,
    ensure_subject,
    filter_subjects,
    make_group,
)
from cavvy.store.rows import insert_into, update_of

_decode_volume = msgspec.json.Decoder(VolumeBill).decode
_VOLUMES = "SELECT document FROM volume_bills ORDER BY id"
_INSERT = insert_into("volume_bills", ("document", "version", "id"), "ON CONFLICT DO NOTHING")
_UPDATE = update_of("volume_bills", ("document", "version"), ("id", "version"))
_OWNER = (
    "SELECT a.project, j.user_name, j.tags FROM attempts a JOIN jobs j ON j.id = a.job_id "
    "WHERE a.bought_as = ? ORDER BY a.id LIMIT 1"
)
_USERS = "SELECT bought_as, id, phase, document FROM attempts WHERE bought_as = ?"
_CHARGED = "SELECT kind, since, until FROM charges WHERE attempt_id = ?"


class SqlMeters:
    """The rows of bills that do not belong to jobs."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def volumes(self) -> Sequence[VolumeBill]:
        """Return the bills of all volumes that a provider has ever listed."""
        rows = await self._read(lambda session: session.run(_VOLUMES).fetchall())
        return [_decode_volume(row[0]) for row in rows]

    async def owner(self, gang: str) -> VolumeOwner | None:
        """Return the project, user and tags of the job that bought the gang with this name, or None
        if the job is not known.
        """
        row = await self._read(lambda session: session.run(_OWNER, (gang,)).fetchone())
        if row is None:
            return None
        return VolumeOwner(project=row[0], user=row[1], tags=decode_tags(row[2]))

    async def uses(self, gangs: Collection[str]) -> Mapping[str, Sequence[VolumeUse]]:
        """Return, by gang, the periods in which jobs paid for the disks of the gang."""
        return await self._read(lambda session: _read_uses(session, gangs))

    async def put_volume(self, bill: VolumeBill, postings: Sequence[LedgerPosting]) -> VolumeBill:
        """Store a bill, and append the ledger entries for the change of the bill since its last
        version. Raises StaleVersion if another server has already stored a newer version of the
        bill.
        """
        stored = replace(bill, version=bill.version + 1)
        await self._write(lambda session: _put_volume(session, stored, postings))
        return stored

    async def sum_tokens(
        self, which: LedgerFilter, by: Sequence[str]
    ) -> Mapping[tuple[str, ...], Mapping[str, TokenUse]]:
        """Return the tokens of language models by model, for each combination of values of the
        dimensions `by` of `Store.sum_ledger`. Days in UTC count whole.
        """
        return await self._read(lambda session: sum_tokens(session, which, by))

    async def sum_energy(
        self, which: LedgerFilter, by: Sequence[str]
    ) -> Mapping[tuple[str, ...], Sequence[EnergyUse]]:
        """Return the energy that nodes measured, as `sum_tokens` returns tokens."""
        return await self._read(lambda session: sum_energy(session, which, by))

    async def energy_of(self, attempts: Collection[str]) -> Mapping[str, int]:
        """Return the joules of each of these attempts that has measured any."""
        return await self._read(lambda session: read_energy(session, attempts))


def _read_uses(
    session: DatabaseSession, gangs: Collection[str]
) -> Mapping[str, Sequence[VolumeUse]]:
    found: defaultdict[str, list[VolumeUse]] = defaultdict(list)
    for gang in gangs:
        for name, attempt_id, phase, document in session.run(_USERS, (gang,)).fetchall():
            charges = session.run(_CHARGED, (attempt_id,)).fetchall()
            disks = [(since, until) for kind, since, until in charges if kind == ChargeKind.DISK]
            if phase == AttemptPhase.ENDED:
                found[name] += [VolumeUse(since=to_time(a), until=to_time(b)) for a, b in disks]
            elif disks:
                found[name].append(VolumeUse(since=to_time(min(disks)[0]), until=None))
            elif not charges:  # the attempt is starting; its charges will begin later
                found[name].append(VolumeUse(since=decode_attempt(document).created_at, until=None))
    return found


def _put_volume(
    session: DatabaseSession, stored: VolumeBill, postings: Sequence[LedgerPosting]
) -> None:
    subject = stored.subject
    values: list[object] = [encode(stored), stored.version, subject.id]
    if stored.version > 1:
        done = session.run(_UPDATE, [*values, stored.version - 1]).rowcount
    else:
        done = session.run(_INSERT, values).rowcount
    if done == 0:
        raise StaleVersion(f"the bill of {subject.volume} is not at version {stored.version - 1}")
    _append(session, subject, postings)


def _append(
    session: DatabaseSession, subject: LedgerSubject, postings: Sequence[LedgerPosting]
) -> None:
    if postings:
        ensure_subject(session, subject)
        append_entries(session, subject.id, subject.project, 0, postings)


_NUMBERS = ("prompt", "cached", "completion", "estimated")
_ADD = (
    f"INSERT INTO token_uses (subject, model, day, {', '.join(_NUMBERS)}) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (subject, model, day) DO UPDATE SET "
    f"{', '.join(f'{name} = token_uses.{name} + excluded.{name}' for name in _NUMBERS)}"
)
_COLUMNS = {**DIMENSIONS, "subject": "t.subject"}
ENERGY = "work_energy_j"  # the figure that agents report: joules of a minute
# of one node and minute: 50 kW, which no node with 16 accelerators reaches; an agent may lie
_MOST_JOULES = 3_000_000
_DAY_MINUTES = 24 * 60
_MICROS = 60_000_000  # of a minute
_SPEND = (
    "INSERT INTO energy_uses (subject, day, joules) VALUES (?, ?, ?) "
    "ON CONFLICT (subject, day) DO UPDATE SET joules = energy_uses.joules + excluded.joules"
)
Group = tuple[str, ...]


def add_tokens(
    session: DatabaseSession, subject: str, at: datetime, uses: Mapping[str, TokenUse]
) -> None:
    """Add the tokens of a subject by model, in the open transaction."""
    day = to_micros(_day_of(at))
    for model, use in uses.items():
        numbers = [getattr(use, name) for name in _NUMBERS]
        session.run(_ADD, (subject, model, day, *numbers))


def sum_tokens(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Mapping[Group, Mapping[str, TokenUse]]:
    """Return the tokens by model of the whole days that overlap the period, for each combination of
    values of the dimensions `by`, as `ledger.add_up` names them.
    """
    found: defaultdict[Group, dict[str, TokenUse]] = defaultdict(dict)
    # entries of a key's requests have this kind
    table = ("token_uses", EntryKind.REQUEST, ("t.model",), _NUMBERS)
    for key, (model, *numbers) in _sum_days(session, *table, which, by):
        use = TokenUse(**dict(zip(_NUMBERS, numbers, strict=True)))
        found[key] = combine_tokens(add, found[key], {model: use})
    return found


def add_energy(session: DatabaseSession, block: FigureBlock) -> None:
    """Add the energy of a new block of one minute to its attempt, in the open transaction."""
    if found := block.columns.get(ENERGY):
        joules = round(min(max(0.0, found.mean[0]), _MOST_JOULES))
        day = block.minutes[0] // _DAY_MINUTES * _DAY_MINUTES * _MICROS
        session.run(_SPEND, (block.attempt_id, day, joules))


def sum_energy(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Mapping[Group, Sequence[EnergyUse]]:
    """Return the energy by provider and region of the whole days that overlap the period, for each
    combination of values of the dimensions `by`, as `ledger.add_up` names them. The energy of a
    replica belongs to none of its keys.
    """
    found: defaultdict[Group, list[EnergyUse]] = defaultdict(list)
    table = ("energy_uses", EntryKind.NODE, ("s.provider", "s.region"), ("joules",))
    for key, (provider, region, joules) in _sum_days(session, *table, which, by):
        found[key].append(EnergyUse(provider=provider, region=region, joules=joules))
    return found


def read_energy(session: DatabaseSession, attempts: Collection[str]) -> Mapping[str, int]:
    """Return the joules of each of these attempts that has measured any."""
    if not attempts:
        return {}
    sql = (
        "SELECT subject, CAST(SUM(joules) AS BIGINT) FROM energy_uses "
        f"WHERE subject IN ({', '.join('?' * len(attempts))}) GROUP BY subject"
    )
    return {subject: joules for subject, joules in session.run(sql, [*attempts]).fetchall()}


def _sum_days(
    session: DatabaseSession,
    table: str,
    kind: EntryKind,
    more: Sequence[str],
    numbers: Sequence[str],
    which: LedgerFilter,
    by: Sequence[str],
) -> Iterator[tuple[Group, Sequence[Any]]]:
    """Yield the groups of the rows of a table by subject and day, which have the kind `kind`, with
    the columns `more` and the sums of `numbers`. A group may come several times.
    """
    columns = [name for name in by if name in _COLUMNS]
    names = [*(_COLUMNS[name] for name in columns if name != "kind"), "s.tags", "t.day", *more]
    shown = [f"'{kind}'" if name == "kind" else _COLUMNS[name] for name in columns]
    keys = ", ".join([*shown, "s.tags", "t.day", *more])
    conditions, values = filter_subjects(session, which, "s.project")
    since = 0 if which.since is None else to_micros(_day_of(which.since))
    until = 2**62 if which.until is None else to_micros(which.until)
    sums = ", ".join(f"CAST(SUM(t.{name}) AS BIGINT)" for name in numbers)
    sql = (
        f"SELECT {keys}, {sums} FROM {table} t JOIN ledger_subjects s ON s.id = t.subject "
        f"WHERE {' AND '.join(conditions)} AND t.day >= ? AND t.day < ? "
        f"GROUP BY {', '.join(dict.fromkeys(names))}"
    )
    for row in session.run(sql, (*values, since, until)).fetchall():
        stored = dict(zip(columns, row, strict=False))
        tags, day, *rest = row[len(columns) :]
        yield make_group(by, stored, tags, to_time(day)), rest


def _day_of(at: datetime) -> datetime:
    at = at.astimezone(UTC)
    return at - timedelta(
        hours=at.hour, minutes=at.minute, seconds=at.second, microseconds=at.microsecond
    )
