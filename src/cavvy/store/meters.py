"""Bills of volumes for the time between jobs, and divided bills of replicas (`Store.meters`)."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import KINDS, OF_SUBJECT, EnergyUse, LedgerPosting, LedgerSubject
from cavvy.domain.request_bills import DividedBill, ReplicaBill, TokenUse
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeBill, VolumeOwner, VolumeUse
from cavvy.store.base import LedgerFilter, StaleVersion
from cavvy.store.documents import decode_attempt, decode_tags, encode, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.ledger import append_entries, ensure_subject, read_subject
from cavvy.store.rows import insert_into, update_of
from cavvy.store.token_uses import add_tokens, read_energy, sum_energy, sum_tokens

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
_decode_divided = msgspec.json.Decoder(DividedBill).decode
_SUMS = (
    "SELECT attempt_id, kind, MIN(since), MAX(until), CAST(SUM(amount) AS BIGINT) FROM charges "
    "WHERE job_id = ? GROUP BY attempt_id, kind"
)
_RATE = (
    "SELECT CAST(COALESCE(SUM(rate), 0) AS BIGINT) FROM charges WHERE attempt_id = ? AND until = "
    "(SELECT MAX(until) FROM charges WHERE attempt_id = ? AND rate > 0)"
)
_DIVIDED = "SELECT document FROM divided_bills WHERE attempt_id = ?"
_NEW_DIVISION = insert_into(
    "divided_bills", ("moved", "document", "version", "attempt_id"), "ON CONFLICT DO NOTHING"
)
_NEXT_DIVISION = update_of(
    "divided_bills", ("moved", "document", "version"), ("attempt_id", "version")
)
_LATE = (
    # the order of the tables is fixed: few subjects are replicas, and these have an index
    "SELECT DISTINCT a.job_id FROM ledger_subjects s CROSS JOIN attempts a "
    "LEFT JOIN divided_bills d ON d.attempt_id = a.id "
    f"WHERE s.service <> '' AND a.id = s.id AND a.phase = '{AttemptPhase.ENDED}' "
    "AND COALESCE(d.moved, 0) <> "
    "(SELECT COALESCE(SUM(c.amount), 0) FROM charges c WHERE c.attempt_id = a.id)"
)


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

    async def replica_bills(self, jobs: Collection[str]) -> Sequence[ReplicaBill]:
        """Return the bills of all attempts of these jobs, which are replicas of services."""
        return await self._read(lambda session: _read_bills(session, jobs))

    async def late_replicas(self) -> Sequence[str]:
        """Return the job IDs of ended replicas whose bills are not yet divided completely."""
        rows = await self._read(lambda session: session.run(_LATE).fetchall())
        return [row[0] for row in rows]

    async def divide(
        self,
        divided: DividedBill,
        postings: Mapping[str, Sequence[LedgerPosting]],
        labels: Mapping[str, str],
        tokens: Mapping[str, Mapping[str, TokenUse]] | None = None,
        subject: LedgerSubject | None = None,
    ) -> None:
        """Store how a bill was divided among the client keys, together with the ledger entries and
        the tokens by key and model that result. `labels` names keys. `subject` is written first if
        the bill is not that of an attempt. Raises StaleVersion if another server has already
        divided a later state of the bill.
        """

        def write(session: DatabaseSession) -> None:
            if subject is not None:
                ensure_subject(session, subject)
            _divide(session, divided, postings, labels, tokens or {})

        await self._write(write)

    async def division(self, subject: str) -> DividedBill | None:
        """Return how the bill of an attempt or of an API was divided."""
        row = await self._read(lambda session: session.run(_DIVIDED, (subject,)).fetchone())
        return None if row is None else _decode_divided(row[0])

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


def _read_bills(session: DatabaseSession, jobs: Collection[str]) -> Sequence[ReplicaBill]:
    found: dict[str, ReplicaBill] = {}
    for job_id in jobs:
        for attempt, kind, since, until, amount in session.run(_SUMS, (job_id,)).fetchall():
            entry = KINDS[ChargeKind(kind)]
            known = found.get(attempt)
            if known is None:
                row = session.run(_DIVIDED, (attempt,)).fetchone()
                known = ReplicaBill(
                    attempt_id=attempt,
                    job_id=job_id,
                    since=to_time(since),
                    until=to_time(until),
                    amounts={},
                    rate=HourlyRate(session.run(_RATE, (attempt, attempt)).fetchall()[0][0]),
                    divided=None if row is None else _decode_divided(row[0]),
                )
            amounts = {**known.amounts, entry: known.amounts.get(entry, 0) + amount}
            found[attempt] = replace(
                known,
                since=min(known.since, to_time(since)),
                until=max(known.until, to_time(until)),
                amounts=amounts,
            )
    return list(found.values())


def _divide(
    session: DatabaseSession,
    divided: DividedBill,
    postings: Mapping[str, Sequence[LedgerPosting]],
    labels: Mapping[str, str],
    tokens: Mapping[str, Mapping[str, TokenUse]],
) -> None:
    stored = replace(divided, version=divided.version + 1)
    moved = sum(stored.moved.values())
    values: list[object] = [moved, encode(stored), stored.version, stored.attempt_id]
    if divided.version:
        done = session.run(_NEXT_DIVISION, [*values, divided.version]).rowcount
    else:
        done = session.run(_NEW_DIVISION, values).rowcount
    if done == 0:
        raise StaleVersion(f"the bill of {stored.attempt_id} was divided meanwhile")
    subject = read_subject(session, stored.attempt_id)
    for key in {**postings, **tokens}:
        place = subject
        if key:
            place = replace(subject, id=f"{subject.id}:{key}", key=labels.get(key) or key)
            ensure_subject(session, place)
        append_entries(session, place.id, place.project, OF_SUBJECT, postings.get(key, ()))
        add_tokens(session, place.id, stored.until, tokens.get(key, {}))


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
