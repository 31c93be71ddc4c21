"""Bills that no job has: those of volumes between jobs (`SqlStore.meters`)."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import LedgerPosting, LedgerSubject
from cavvy.domain.values import replace
from cavvy.domain.volumes import VolumeBill, VolumeOwner, VolumeUse
from cavvy.store.base import StaleVersion
from cavvy.store.documents import decode_attempt, decode_tags, encode, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.ledger import append_entries, ensure_subject
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
    """The rows of bills that no job has."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def volumes(self) -> Sequence[VolumeBill]:
        """The bills of all volumes that were ever seen."""
        rows = await self._read(lambda session: session.run(_VOLUMES).fetchall())
        return [_decode_volume(row[0]) for row in rows]

    async def owner(self, gang: str) -> VolumeOwner | None:
        """Whose job bought the gang with this name; None if it is not known."""
        row = await self._read(lambda session: session.run(_OWNER, (gang,)).fetchone())
        if row is None:
            return None
        return VolumeOwner(project=row[0], user=row[1], tags=decode_tags(row[2]))

    async def uses(self, gangs: Collection[str]) -> Mapping[str, Sequence[VolumeUse]]:
        """When jobs paid for the disks of these gangs, by gang."""
        return await self._read(lambda session: _read_uses(session, gangs))

    async def put_volume(self, bill: VolumeBill, postings: Sequence[LedgerPosting]) -> VolumeBill:
        """Store a bill and append the entries that lead to it. Raises StaleVersion if another
        server was first.
        """
        stored = replace(bill, version=bill.version + 1)
        await self._write(lambda session: _put_volume(session, stored, postings))
        return stored


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
            elif not charges:  # it starts; its charges will begin later
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
