"""The rows of bills of replicas, and how they were divided among the requests of services."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from cavvy.capabilities.serving.bills import DividedBill, ReplicaBill
from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.ledger import KINDS, OF_SUBJECT, LedgerPosting, LedgerSubject, TokenUse
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.base import StaleVersion
from cavvy.store.documents import encode, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.ledger import append_entries, ensure_subject, read_subject
from cavvy.store.meters import add_tokens
from cavvy.store.rows import insert_into, update_of
from cavvy.store.sql import Store

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


def bills_of(store: Store) -> "SqlReplicaBills":
    """Return the bills of replicas of a store."""
    return SqlReplicaBills(*store.database)


class SqlReplicaBills:
    """The rows of divided bills."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def list(self, jobs: Collection[str]) -> Sequence[ReplicaBill]:
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
