"""Posts new bills to the rows of the ledger, and adds up the entries."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from cavvy.domain.events import Charge
from cavvy.domain.jobs import Attempt
from cavvy.domain.ledger import (
    OF_SUBJECT,
    ChargedPeriod,
    EntryKind,
    EntrySource,
    LedgerEntry,
    LedgerLine,
    LedgerPosting,
    LedgerSubject,
    LedgerSum,
    MonthDiscounts,
    QuantityUnit,
    find_discounted,
    list_months,
    month_of,
    next_month,
    post,
    share_of,
)
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.accounts import in_projects
from cavvy.store.base import LedgerFilter, RowNotFound
from cavvy.store.documents import decode_attempt, decode_tags, decode_task, to_micros, to_time
from cavvy.store.drivers import DatabaseSession
from cavvy.store.prepared import Row, SqlCursor
from cavvy.store.rows import RowCodec

SUBJECTS = RowCodec(
    LedgerSubject, "ledger_subjects", columns={"user": "user_name", "key": "key_name"}
)
ENTRIES = RowCodec(LedgerEntry, "ledger", assigned="number")
# The dimensions by which sums can be grouped, and the column of each.
DIMENSIONS = {
    "project": "s.project",
    "user": "s.user_name",
    "job": "s.job",
    "machine": "s.machine",
    "service": "s.service",
    "key": "s.key_name",
    "volume": "s.volume",
    "provider": "s.provider",
    "account": "s.account",
    "region": "s.region",
    "zone": "s.zone",
    "instance": "s.instance_type",
    "gpu": "s.accelerator",
    "purchase": "s.purchase",
    "kind": "e.kind",
    "subject": "e.subject",
}
MONTH, TAGS = "month", "tags"  # dimensions that are not columns of their own
_JOINED = "FROM ledger e JOIN ledger_subjects s ON s.id = e.subject"
_AMOUNTS = (  # amount, discount, and the time that the entries other than discounts cover
    "CAST(SUM(e.amount) AS BIGINT), "
    f"CAST(SUM(CASE e.kind WHEN '{EntryKind.DISCOUNT}' THEN e.amount ELSE 0 END) AS BIGINT), "
    f"MIN(CASE WHEN e.kind <> '{EntryKind.DISCOUNT}' THEN e.since END), "
    f"MAX(CASE WHEN e.kind <> '{EntryKind.DISCOUNT}' THEN e.until END)"
)
TOTAL = "SELECT CAST(COALESCE(SUM(amount), 0) AS BIGINT) FROM ledger WHERE project = ?"
_LAST = "SELECT COALESCE(MAX(sequence), 0) FROM ledger WHERE subject = ? AND rank = ?"
_KNOWN = f"SELECT ({_LAST}), (SELECT 1 FROM ledger_subjects WHERE id = ?)"
_CORRECTED = (
    "SELECT MAX(sequence) FROM ledger WHERE subject = ? AND rank = ? AND line = ? "
    "AND line_since = ?"
)
_DISCOUNTED = (
    "SELECT line, subject, CAST(SUM(amount) AS BIGINT), MIN(since), MAX(until) FROM ledger "
    f"WHERE kind = '{EntryKind.DISCOUNT}' AND line_since = ? GROUP BY line, subject"
)
_ATTEMPT = (
    "SELECT a.document, j.user_name, COALESCE(j.removed, j.name), COALESCE(j.machine, ''), j.tags, "
    "d.task FROM attempts a JOIN jobs j ON j.id = a.job_id "
    "LEFT JOIN documents d ON d.job_id = j.id WHERE a.id IN ({})"
)
_MANY = 500  # subjects that one query reads


def read_open_subjects(
    session: DatabaseSession, attempts: Collection[str]
) -> Mapping[str, LedgerSubject]:
    """Return the subjects of attempts by their IDs, whether or not the ledger has entries of them.
    Attempts that do not exist are omitted."""
    found, wanted = {}, sorted(attempts)
    for start in range(0, len(wanted), _MANY):
        some = tuple(wanted[start : start + _MANY])
        for row in session.run(_ATTEMPT.format(", ".join("?" * len(some))), some).fetchall():
            subject = _make_attempt_subject(row)
            found[subject.id] = subject
    return found


def find_posted(charge: Charge) -> tuple[str, tuple[object, ...]]:
    """Return the query, with its values, whose result `post_bill` needs for this node."""
    return _KNOWN, (charge.attempt_id, charge.rank, charge.attempt_id)


def post_bill(
    session: DatabaseSession, before: Iterable[Charge], after: Sequence[Charge], posted: SqlCursor
) -> None:
    """Post the difference between the stored charges of one node and its new charges, which were
    written in the same transaction. `posted` is the result of `find_posted`. Raises RowNotFound if
    the attempt does not exist.
    """
    postings = post(before, after)
    if postings:
        charge = after[0]
        subject = charge.attempt_id
        row = posted.fetchone()
        assert row is not None
        if row[1] is None:
            _insert_attempt(session, subject)
        append_entries(session, subject, charge.project, charge.rank, postings, last=int(row[0]))


def append_entries(
    session: DatabaseSession,
    subject: str,
    project: str,
    rank: int,
    postings: Iterable[LedgerPosting],
    *,
    last: int | None = None,
) -> None:
    """Append entries to the ledger, in the open transaction. `last` is the sequence number of the
    subject's last entry of this rank, if the caller has read it.
    """
    if last is None:
        row = session.run(_LAST, (subject, rank)).fetchone()
        last = 0 if row is None else int(row[0])
    for sequence, posting in enumerate(postings, last + 1):
        entry = LedgerEntry(
            **{name: getattr(posting, name) for name in LedgerPosting.__struct_fields__},
            subject=subject,
            project=project,
            rank=rank,
            sequence=sequence,
            corrects=_find_corrected(session, subject, rank, posting),
        )
        session.run_later(ENTRIES.insert, ENTRIES.values(entry))


def post_discounts(session: DatabaseSession, discounts: MonthDiscounts) -> int:
    """Post each subject's discounts for a month. If a discount was posted earlier, only the
    difference from the earlier amount is posted. Posted discounts that `discounts` does not contain
    are reversed. Returns the number of new entries.
    """
    month, count = discounts.month, 0
    before: dict[tuple[str, str], int] = {}
    covered: dict[tuple[str, str], ChargedPeriod] = {}
    for name, subject, amount, since, until in session.run(
        _DISCOUNTED, (to_micros(month),)
    ).fetchall():
        before[name, subject] = int(amount)
        covered[name, subject] = to_time(since), to_time(until)
    spread = discounts.spread
    wanted = {(name, key): part for name, parts in spread.items() for key, part in parts.items()}
    for key in (*sorted(before.keys() - wanted.keys()), *wanted):
        more = -wanted.get(key, 0) - before.get(key, 0)
        if not more:
            continue
        name, subject = key
        project = read_subject(session, subject).project
        earlier = covered.get(key)
        charged = discounts.periods.get(subject, earlier) or (month, next_month(month))
        period = find_discounted(charged, earlier, more)
        posting = _make_discount(name, month, period, more)
        append_entries(session, subject, project, OF_SUBJECT, [posting])
        count += 1
    return count


def _make_discount(name: str, month: datetime, period: ChargedPeriod, amount: int) -> LedgerPosting:
    return LedgerPosting(
        kind=EntryKind.DISCOUNT,
        line=name,
        line_since=month,
        since=period[0],
        until=period[1],
        quantity=0,
        unit=QuantityUnit.NONE,
        rate=HourlyRate(),
        amount=Money(amount),
        source=EntrySource.SETTING,
    )


def _find_corrected(
    session: DatabaseSession, subject: str, rank: int, posting: LedgerPosting
) -> int | None:
    if posting.kind is not EntryKind.CORRECTION:
        return None
    line = (subject, rank, posting.line, to_micros(posting.line_since))
    row = session.run(_CORRECTED, line).fetchone()
    return None if row is None else row[0]


def _insert_attempt(session: DatabaseSession, attempt_id: str) -> None:
    row = session.run(_ATTEMPT.format("?"), (attempt_id,)).fetchone()
    if row is None:
        raise RowNotFound(f"no attempt {attempt_id}")
    ensure_subject(session, _make_attempt_subject(row))


def _make_attempt_subject(row: Row) -> LedgerSubject:
    """Return the subject of an attempt from a row of `_ATTEMPT`."""
    document, user, job, machine, tags, task = row
    subject = make_subject(decode_attempt(document), user, job, machine, decode_tags(tags))
    if task is not None and decode_task(task).service is not None:
        subject = replace(subject, service=subject.tags.get(SERVICE_TAG, ""))
    return subject


def ensure_subject(session: DatabaseSession, subject: LedgerSubject) -> None:
    """Write the row of the subject, unless it exists."""
    session.run_later(f"{SUBJECTS.insert} ON CONFLICT DO NOTHING", SUBJECTS.values(subject))


def read_subject(session: DatabaseSession, subject_id: str) -> LedgerSubject:
    """Raises RowNotFound."""
    row = session.run(f"{SUBJECTS.select} WHERE id = ?", (subject_id,)).fetchone()
    if row is None:
        raise RowNotFound(f"nothing was charged for {subject_id}")
    return SUBJECTS.make(row)


def make_subject(
    attempt: Attempt, user: str, job: str, machine: str, tags: dict[str, str]
) -> LedgerSubject:
    """Return the subject of an attempt's charges in the ledger."""
    offer = attempt.offer
    return LedgerSubject(
        id=attempt.id,
        project=attempt.project,
        user=user,
        job_id=attempt.job_id,
        job=job,
        machine=machine,
        attempt=attempt.number,
        provider=offer.provider,
        account=offer.account,
        region=offer.region,
        zone=offer.zone or "",
        instance_type=offer.instance_type,
        accelerator=offer.accelerator or "",
        accelerators=offer.accelerator_count * offer.accelerator_part,
        purchase=str(offer.purchase),
        tags=tags,
    )


def read_lines(
    session: DatabaseSession, which: LedgerFilter, *, after: int, limit: int
) -> Sequence[LedgerLine]:
    """Return the entries with a number above `after` that overlap the period, in the order of their
    numbers."""
    where, values = _conditions(session, which)
    subject = [f"s.{name}" for name in SUBJECTS.columns]
    entry = ["e.number", *(f"e.{name}" for name in ENTRIES.columns)]
    sql = (
        f"SELECT {', '.join((*entry, *subject))} {_JOINED} WHERE {where} AND e.number > ? "
        "ORDER BY e.number LIMIT ?"
    )
    return [
        LedgerLine(
            entry=LedgerEntry(number=row[0], **_ENTRY_COLUMNS.fields(row[1:])),
            subject=SUBJECTS.make(row[len(entry) :]),
        )
        for row in session.run(sql, (*values, after, limit)).fetchall()
    ]


_ENTRY_COLUMNS = RowCodec(LedgerEntry, "ledger", only=ENTRIES.columns)


def add_up(session: DatabaseSession, which: LedgerFilter, by: Sequence[str]) -> Sequence[LedgerSum]:
    """Return the sums of the entries in the period for each combination of values of the dimensions
    `by`, the largest sum first. Each item of `by` is a key of DIMENSIONS, the constant MONTH, the
    constant TAGS (all tags as JSON), or `tag:NAME` (one tag).
    """
    if which.since is None and which.until is None and DIMENSIONS.keys() >= set(by):
        return _add_up_whole(session, which, by)
    groups: dict[tuple[str, ...], _GroupTotal] = defaultdict(_GroupTotal)
    for month, window in _windows(session, which, by):
        for row in _read_sums(session, window, by):
            key = tuple(_value(name, row.values.get(name, ""), row.tags, month) for name in by)
            groups[key].add(row)
    found = [
        LedgerSum(
            groups=dict(zip(by, key, strict=True)),
            amount=Money(group.amount),
            discount=Money(group.discount),
            jobs=len(group.jobs),
            since=group.since,
            until=group.until,
        )
        for key, group in groups.items()
    ]
    return _sort(found)


def _add_up_whole(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Sequence[LedgerSum]:
    """Do the same as `add_up` in the database, for sums of whole entries by columns."""
    where, values = _conditions(session, which)
    keys = [DIMENSIONS[name] for name in by]
    columns = [*keys, f"{_AMOUNTS}, COUNT(DISTINCT NULLIF(s.job_id, ''))"]
    sql = f"SELECT {', '.join(columns)} {_JOINED} WHERE {where}"
    if keys:
        sql += f" GROUP BY {', '.join(keys)}"
    found = []
    for *group, amount, discount, since, until, jobs in session.run(sql, values).fetchall():
        if amount is None:
            continue  # no entries
        found.append(
            LedgerSum(
                groups=dict(zip(by, group, strict=True)),
                amount=Money(amount),
                discount=Money(discount),
                jobs=jobs,
                since=None if since is None else to_time(since),
                until=None if until is None else to_time(until),
            )
        )
    return _sort(found)


def _sort(sums: Iterable[LedgerSum]) -> Sequence[LedgerSum]:
    return sorted(sums, key=lambda each: (-each.amount.micros, [*each.groups.values()]))


class _GroupTotal:
    def __init__(self) -> None:
        self.amount = self.discount = 0
        self.jobs: set[str] = set()
        self.since: datetime | None = None
        self.until: datetime | None = None

    def add(self, row: "_PartialSum") -> None:
        self.amount += row.amount
        self.discount += row.discount
        if row.job_id:
            self.jobs.add(row.job_id)
        if row.since is not None and row.until is not None:
            self.since = min(self.since or row.since, row.since)
            self.until = max(self.until or row.until, row.until)


class _PartialSum:
    """A row of sums: the amounts, the values of those dimensions that are database columns, and the
    time that the entries other than discounts cover.
    """

    __slots__ = ("amount", "discount", "job_id", "since", "tags", "until", "values")

    def __init__(self, columns: Sequence[str], row: Row) -> None:
        self.values = dict(zip(columns, row, strict=False))
        self.tags, self.job_id, self.amount, self.discount, since, until = row[len(columns) :]
        self.since = None if since is None else to_time(since)
        self.until = None if until is None else to_time(until)


def make_group(
    by: Sequence[str], stored: Mapping[str, str], tags: str, at: datetime
) -> tuple[str, ...]:
    """Return the values of the dimensions `by`, from those of columns, the tags and the time."""
    month = f"{month_of(at):%Y-%m}"
    return tuple(_value(name, stored.get(name, ""), tags, month) for name in by)


def group_subject(
    by: Sequence[str], subject: LedgerSubject, kind: EntryKind, at: datetime
) -> tuple[str, ...]:
    """Return the values of the dimensions `by` of an amount for the subject at this time."""
    texts = dict(zip(SUBJECTS.columns, SUBJECTS.values(subject), strict=True))
    columns = {**{f"s.{name}": text for name, text in texts.items()}, "e.kind": str(kind)}
    columns["e.subject"] = subject.id
    stored = {name: str(columns[column]) for name, column in DIMENSIONS.items()}
    return make_group(by, stored, str(texts["tags"]), at)


def _value(name: str, stored: str, tags: str, month: str) -> str:
    if name == MONTH:
        return month
    if name == TAGS:
        return tags
    if name.startswith("tag:"):
        return decode_tags(tags).get(name.removeprefix("tag:"), "")
    return stored


def _windows(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Iterator[tuple[str, LedgerFilter]]:
    """Yield the period as a whole or, if sums by month are wanted, each month of the period."""
    if MONTH not in by:
        yield "", which
        return
    where, values = _conditions(session, which)
    sql = f"SELECT MIN(e.since), MAX(e.until) {_JOINED} WHERE {where}"
    row = session.run(sql, values).fetchone()
    if row is None or row[0] is None:
        return
    first = to_time(row[0]) if which.since is None else max(which.since, to_time(row[0]))
    last = to_time(row[1] + 1) if which.until is None else min(which.until, to_time(row[1] + 1))
    for start in (first, *list_months(first, last)):
        until = min(last, next_month(start))
        yield f"{month_of(start):%Y-%m}", replace(which, since=start, until=until)


def _read_sums(
    session: DatabaseSession, which: LedgerFilter, by: Sequence[str]
) -> Iterator[_PartialSum]:
    """Yield the sums of the entries that are wholly in the period. For each entry that is only
    partly in the period, also yield the amount of the part inside the period.
    """
    columns = [name for name in by if name in DIMENSIONS]
    keys = ", ".join([*(DIMENSIONS[name] for name in columns), "s.tags", "s.job_id"])
    where, values = _conditions(session, which)
    since, until = _bounds(which)
    sums = (
        f"SELECT {keys}, {_AMOUNTS} {_JOINED} WHERE {where} "
        f"AND e.since >= ? AND e.until <= ? GROUP BY {keys}"
    )
    for row in session.run(sums, (*values, since, until)).fetchall():
        yield _PartialSum(columns, row)
    cut = (
        f"SELECT {keys}, e.amount, e.kind, e.since, e.until {_JOINED} WHERE {where} "
        "AND (e.since < ? OR e.until > ?)"
    )
    for row in session.run(cut, (*values, since, until)).fetchall():
        *group, amount, kind, begin, end = row
        times = (to_time(begin), to_time(end), which.since, which.until)
        part = share_of(amount, *times)
        if kind == EntryKind.DISCOUNT:
            yield _PartialSum(columns, (*group, part, part, None, None))
        else:
            yield _PartialSum(columns, (*group, part, 0, max(begin, since), min(end, until)))


def _conditions(session: DatabaseSession, which: LedgerFilter) -> tuple[str, tuple[object, ...]]:
    """Return the SQL condition for entries `e` with the subject `s` that overlap the period."""
    conditions, given = filter_subjects(session, which)
    since, until = _bounds(which)
    conditions.append("e.since < ? AND (e.until > ? OR e.since >= ?)")
    given += [until, since, since]
    if which.since is not None:
        conditions.append("e.until >= ?")  # follows from the others, and uses an index
        given.append(since)
    return " AND ".join(conditions), tuple(given)


def filter_subjects(
    session: DatabaseSession, which: LedgerFilter, project: str = "e.project"
) -> tuple[list[str], list[object]]:
    """Return the SQL conditions for subjects `s`, and their values."""
    where, values = in_projects(project, which.projects)
    conditions: list[str] = [where]
    given: list[object] = [*values]
    if which.user is not None:
        conditions.append("s.user_name = ?")
        given.append(which.user)
    tags = [which.tag, None if which.service is None else (SERVICE_TAG, which.service)]
    for tag in tags:
        if tag is not None:
            conditions.append(
                "EXISTS (SELECT 1 FROM json_each(s.tags) t WHERE t.key = ? AND t.value = ?)"
                if session.driver.is_sqlite
                else "EXISTS (SELECT 1 FROM json_each_text(CAST(s.tags AS JSON)) t "
                "WHERE t.key = ? AND t.value = ?)"
            )
            given += tag
    return conditions, given


_FAR_MICROS = 1 << 62


def _bounds(which: LedgerFilter) -> tuple[int, int]:
    since = -_FAR_MICROS if which.since is None else to_micros(which.since)
    return since, _FAR_MICROS if which.until is None else to_micros(which.until)
