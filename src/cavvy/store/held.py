"""What jobs hold now: the shares of users in projects, the running members of arrays, and the
allocations on hosts. All of it is read once. Later reads compare a mark, and read only the rows
that have changed, whichever server has changed them.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from threading import Lock

from cavvy.domain.allocations import Allocation
from cavvy.domain.shares import HeldShare
from cavvy.domain.values import Struct
from cavvy.store.base import AtomicWrite
from cavvy.store.drivers import DatabaseSession
from cavvy.store.prepared import Row
from cavvy.store.rows import ALLOCATIONS

# The marks of the open attempts and of the allocations. The database has a number for each row: in
# SQLite, a new row has a larger one than all rows that exist, and in PostgreSQL, it is a hash of
# the key. A row that changes gets a higher version, so each change gives another mark. Allocations
# never change; they are added and removed with their attempts, whose mark is compared, too, because
# a new allocation may have the number of one that was removed.
_MARKS = (
    "SELECT COUNT(*), CAST(COALESCE(SUM({0}), 0) AS {2}), CAST(COALESCE(SUM(version), 0) AS {2}) "
    "FROM attempts a WHERE phase <> 'ended' UNION ALL "
    "SELECT COUNT(*), CAST(COALESCE(SUM({1}), 0) AS {2}), 0 FROM allocations"
)
_OPEN = "SELECT id, version FROM attempts WHERE phase <> 'ended'"
_FACTS = (
    "SELECT a.id, {0}, a.version, a.project, j.user_name, j.size, a.phase, j.id, j.array_id "
    "FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.phase <> 'ended'"
)
_KEYS = "SELECT gang, rank FROM allocations"
_ALLOCATED = f"{ALLOCATIONS.select.replace(' FROM', ', {1} FROM')} WHERE TRUE"
_SQLITE = ("a.rowid", "rowid", "BIGINT")
_POSTGRESQL = ("hashtextextended(a.id, 0)", "hashtextextended(gang, rank)", "NUMERIC")
# Jobs that wait for their next attempt do not run, though their last nodes may still be held.
_AGAIN = "SELECT id FROM jobs WHERE phase = 'queued' AND attempt > 0"
_AT_ONCE = 500  # rows that are read by their keys in one statement

_Mark = tuple[int, int, int]
_Index = defaultdict[object, set[str]]  # the IDs of attempts


class _OpenAttempt(Struct, frozen=True):
    """The part of an open attempt and its job that says what is held."""

    number: int
    version: int
    project: str
    user: str
    size: float
    phase: str
    job_id: str
    array: str | None


class HeldReader:
    """Reads what is held. Several threads may use it, each with its own session."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Jobs and gangs that this server has written, which the next read looks at first. If they
        # do not explain the mark, or are too many, it compares all keys.
        self._jobs: deque[str] = deque(maxlen=_AT_ONCE)
        self._gangs: deque[str] = deque(maxlen=_AT_ONCE)
        self._attempts: dict[str, _OpenAttempt] = {}
        self._mark: _Mark = (0, 0, 0)  # of `_attempts`
        self._again: frozenset[str] = frozenset()
        self._of_job: _Index = defaultdict(set)
        self._of_user: _Index = defaultdict(set)
        self._of_array: _Index = defaultdict(set)
        self._shares: dict[tuple[str, str], HeldShare] = {}
        self._listed: Sequence[HeldShare] | None = None  # the same, sorted
        self._running: dict[str, int] = {}
        self._allocations: list[Allocation] = []
        self._places: list[tuple[str, str, int]] = []  # host, gang and rank of each of them
        self._numbers: dict[Row, tuple[int, str]] = {}  # and its number and host, by its key
        self._total = 0  # the sum of the numbers
        self._marks_of_allocations: tuple[_Mark, _Mark] = ((0, 0, 0), (0, 0, 0))

    def note(self, changes: AtomicWrite) -> None:
        """Look at these changes first in the next read."""
        self._jobs.extend({each.job_id for each in changes.attempts})
        self._gangs.extend({*changes.release, *(each.gang for each in changes.allocations)})

    def read_held(self, session: DatabaseSession) -> tuple[Sequence[HeldShare], Mapping[str, int]]:
        """Return what each user holds in each project now, and how many members of each array
        run."""
        with self._lock:
            mark = read_marks(session)[0]
            if self._jobs or mark != self._mark:
                self._read_attempts(session, mark)
            self._read_again(session)
            if self._listed is None:
                self._listed = [self._shares[key] for key in sorted(self._shares)]
            return self._listed, dict(self._running)

    def read_allocations(self, session: DatabaseSession) -> Sequence[Allocation]:
        """Return all allocations, sorted by host, gang and rank. The same list is returned until
        they change."""
        with self._lock:
            marks = read_marks(session)
            if self._gangs or marks != self._marks_of_allocations:
                self._change_allocations(session, marks[1])
                self._marks_of_allocations = marks
            return self._allocations

    # Attempts

    def _read_attempts(self, session: DatabaseSession, mark: _Mark) -> None:
        jobs = _take(self._jobs)
        if jobs:
            known = {each for job_id in jobs for each in self._of_job.get(job_id, ())}
            self._replace(known, _read_by(session, _FACTS, "a.job_id", sorted({*jobs})))
        if mark == self._mark and len(jobs) < _AT_ONCE:
            return
        versions: dict[str, int] = dict(session.run(_OPEN).fetchall())
        before = {attempt_id: each.version for attempt_id, each in self._attempts.items()}
        changed = {attempt_id for attempt_id, _ in versions.items() ^ before.items()}
        rows = _read_by(session, _FACTS, "a.id", sorted(changed & versions.keys()))
        self._replace(changed & before.keys(), (row for row in rows if row[0] in changed))

    def _replace(self, old: Iterable[str], rows: Iterable[Row]) -> None:
        touched = [self._forget(attempt_id) for attempt_id in old]
        touched += [self._note(row[0], _OpenAttempt(*row[1:])) for row in rows]
        self._add_up(touched)

    def _note(self, attempt_id: str, attempt: _OpenAttempt) -> _OpenAttempt:
        self._attempts[attempt_id] = attempt
        self._mark = _add(self._mark, 1, attempt.number, attempt.version)
        for index, key in self._list_keys(attempt):
            index[key].add(attempt_id)
        return attempt

    def _forget(self, attempt_id: str) -> _OpenAttempt:
        attempt = self._attempts.pop(attempt_id)
        self._mark = _add(self._mark, -1, -attempt.number, -attempt.version)
        for index, key in self._list_keys(attempt):
            index[key].discard(attempt_id)
            if not index[key]:
                del index[key]
        return attempt

    def _list_keys(self, attempt: _OpenAttempt) -> Sequence[tuple[_Index, object]]:
        """Return where the attempt is found."""
        found: list[tuple[_Index, object]] = [
            (self._of_job, attempt.job_id),
            (self._of_user, (attempt.project, attempt.user)),
        ]
        return found if attempt.array is None else [*found, (self._of_array, attempt.array)]

    def _read_again(self, session: DatabaseSession) -> None:
        again = frozenset(row[0] for row in session.run(_AGAIN).fetchall())
        flipped, self._again = again ^ self._again, again
        self._add_up(
            [self._attempts[each] for job in flipped for each in self._of_job.get(job, ())]
        )

    def _add_up(self, touched: Iterable[_OpenAttempt]) -> None:
        """Compute again what the users and arrays of these attempts hold."""
        touched = list(touched)
        for user in {(each.project, each.user) for each in touched}:
            found = [self._attempts[each] for each in self._of_user.get(user, ())]
            self._shares.pop(user, None)
            self._listed = None
            if found:
                self._shares[user] = HeldShare(
                    *user,
                    fsum(each.size for each in found if each.phase != "kept"),
                    self._count_running(found),
                    fsum(each.size for each in found if each.phase == "kept"),
                )
        for array in {each.array for each in touched if each.array is not None}:
            self._running.pop(array, None)
            members = [self._attempts[each] for each in self._of_array.get(array, ())]
            if jobs := self._count_running(members):
                self._running[array] = jobs

    def _count_running(self, attempts: Iterable[_OpenAttempt]) -> int:
        jobs = {each.job_id for each in attempts if each.phase != "kept"}
        return len(jobs - self._again)

    # Allocations

    def _change_allocations(self, session: DatabaseSession, mark: _Mark) -> None:
        found, places = list(self._allocations), list(self._places)
        numbers, total = dict(self._numbers), self._total

        def change(old: Iterable[Row], rows: Iterable[Row]) -> None:
            nonlocal total
            for key in old:
                number, host = numbers.pop(key)
                total -= number
                at = bisect_left(places, (host, *key))
                del found[at], places[at]
            for row in rows:
                each = ALLOCATIONS.make(row)
                if (each.gang, each.rank) in numbers:
                    continue
                place = each.host, each.gang, each.rank
                at = bisect_left(places, place)
                found.insert(at, each)
                places.insert(at, place)
                numbers[each.gang, each.rank] = row[-1], each.host
                total += row[-1]

        hints = _take(self._gangs)
        if gangs := set(hints):
            rows = _read_by(session, _ALLOCATED, "gang", sorted(gangs))
            change([key for key in numbers if key[0] in gangs], rows)
        counted = len(numbers), total, 0
        if mark != counted or not 0 < len(hints) < _AT_ONCE:
            keys = set(session.run(_KEYS).fetchall())
            added = {gang for gang, _ in keys - numbers.keys()}
            change(numbers.keys() - keys, _read_by(session, _ALLOCATED, "gang", sorted(added)))
        self._allocations, self._places = found, places
        self._numbers, self._total = numbers, total


def _add(mark: _Mark, rows: int, number: int, version: int) -> _Mark:
    return mark[0] + rows, mark[1] + number, mark[2] + version


def _take(hints: deque[str]) -> Sequence[str]:
    """Remove all hints. Other threads may add some meanwhile."""
    return [hints.popleft() for _ in range(len(hints))]


def _name_numbers(session: DatabaseSession, sql: str) -> str:
    return sql.format(*(_SQLITE if session.driver.is_sqlite else _POSTGRESQL))


def read_marks(session: DatabaseSession) -> tuple[_Mark, _Mark]:
    """Return values that differ from the last ones if other attempts or allocations are open now,
    or others of their versions."""
    (a, b, c), (d, e, f) = session.run(_name_numbers(session, _MARKS)).fetchall()
    return (int(a), int(b), int(c)), (int(d), int(e), int(f))


def _read_by(
    session: DatabaseSession, select: str, column: str, keys: Sequence[str]
) -> Sequence[Row]:
    """Return the rows with these keys or, if there are many, all rows."""
    sql = _name_numbers(session, select)
    if len(keys) > _AT_ONCE:
        return session.run(sql).fetchall()
    if not keys:
        return []
    marks = ", ".join("?" * len(keys))
    return session.run(f"{sql} AND {column} IN ({marks})", keys).fetchall()
