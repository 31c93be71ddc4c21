"""Converts rows to domain objects and back. A codec maps each field of a value to a column."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache
from operator import attrgetter
from threading import Lock
from types import MappingProxyType, NoneType
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.arrays import make_member
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import FAR, Attempt, JobRecord, Node, RunOrigin
from cavvy.domain.machines import NamedMachine
from cavvy.domain.markets import MarketTally, Observation
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.shares import size_of_task
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, fields
from cavvy.store.base import JobSummary, Recipe, SealedSecret
from cavvy.store.documents import (
    JOB_FIELDS,
    decode_attempt,
    decode_devices,
    decode_machine,
    decode_node,
    decode_origin,
    decode_policy,
    decode_rest,
    decode_tags,
    decode_task,
    encode,
    encode_rest,
    to_micros,
    to_time,
)
from cavvy.store.drivers import DatabaseSession
from cavvy.store.prepared import Row

_T = TypeVar("_T")
_Convert = Callable[[Any], Any]
# For each of these types, two functions: one encodes a field for its column, the other decodes it.
# Fields of other types are stored unchanged.
_CONVERSIONS: Mapping[object, tuple[_Convert, _Convert]] = {
    str: (str, str),
    bool: (bool, bool),
    datetime: (to_micros, to_time),
    Money: (attrgetter("micros"), Money),
    HourlyRate: (attrgetter("micros_per_hour"), HourlyRate),
    tuple[str, ...]: (encode, decode_devices),
    dict[str, str]: (encode, decode_tags),
}


@cache
def insert_into(table: str, columns: tuple[str, ...], then: str = "") -> str:
    """Return the SQL that inserts one row, with the values in the order of `columns`. `then` is
    appended to the SQL."""
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) {then}"


def insert_many(
    session: DatabaseSession,
    table: str,
    columns: tuple[str, ...],
    rows: Sequence[Sequence[object]],
    then: str = "",
) -> list[Row]:
    """Insert rows with one statement. Return the rows that the statement returns, or [] if `then`
    is empty."""
    cursor = session.run(
        insert_all_into(table, columns, len(rows), then), [x for row in rows for x in row]
    )
    return cursor.fetchall() if then else []


@cache
def insert_all_into(table: str, columns: tuple[str, ...], count: int, then: str = "") -> str:
    """Return the SQL that inserts `count` rows; see `insert_into`."""
    marks = ", ".join([f"({', '.join('?' * len(columns))})"] * count)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {marks} {then}"


@cache
def update_of(table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> str:
    """Return the SQL that updates `columns` where `key` matches; the statement's values are the
    values of `columns`, then the values of `key`.
    """
    return f"UPDATE {table} SET {' = ?, '.join(columns)} = ? WHERE {' = ? AND '.join(key)} = ?"


class RowReader(Struct, Generic[_T], frozen=True):
    """A SELECT statement without its condition, and the decoder of its rows."""

    select: str
    make: Callable[[Row], _T]


class RowCodec(Generic[_T]):
    """Maps one kind of value to one table. Each field has a column with the same name.

    `only` lists the fields that have a column, by default all. `columns` maps a field to a column
    with another name, or to an SQL expression. `assigned` is the field whose value the database
    sets. `key` lists the columns that identify a row for `upsert`, which replaces all columns that
    are not in `key`.
    """

    def __init__(
        self,
        kind: Callable[..., _T],
        table: str,
        *,
        only: Sequence[str] = (),
        columns: Mapping[str, str] = MappingProxyType({}),
        assigned: str | None = None,
        key: Sequence[str] = (),
    ) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._names = only or [field.name for field in fields(cast(Any, kind))]
        conversions = {name: _conversion(hints[name]) for name in self._names}
        self._decoders = [
            (name, found[1]) for name, found in conversions.items() if found and found[1] is not str
        ]
        written = [name for name in self._names if name != assigned]
        self._encoders = [(name, (conversions[name] or (None,))[0]) for name in written]
        self.columns = tuple(columns.get(name, name) for name in written)
        selected = ", ".join(columns.get(name, name) for name in self._names)
        self.select = f"SELECT {selected} FROM {table}"
        self.insert = insert_into(table, self.columns)
        replaced = ", ".join(
            f"{name} = excluded.{name}" for name in self.columns if name not in key
        )
        where = " AND ".join(f"{name} = ?" for name in key)
        self.delete = f"DELETE FROM {table} WHERE {where}"
        self.reseal = f"UPDATE {table} SET sealed = ? WHERE {where} AND sealed = ?"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {replaced}"

    def fields(self, row: Sequence[Any]) -> dict[str, Any]:
        """Decode the fields from a row of `select`. Additional columns are ignored."""
        found = dict(zip(self._names, row, strict=False))
        for name, decode in self._decoders:
            if (value := found[name]) is not None:
                found[name] = decode(value)
        return found

    def make(self, row: Row) -> _T:
        return self._kind(**self.fields(row))

    def values(self, item: _T) -> list[object]:
        """Return the encoded values of an object, in the order of the table's columns."""
        values = []
        for name, encode_field in self._encoders:
            value = getattr(item, name)
            values.append(value if value is None or encode_field is None else encode_field(value))
        return values


def _conversion(hint: Any) -> tuple[_Convert, _Convert] | None:
    kind = next((each for each in get_args(hint) if NoneType in get_args(hint)), hint)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return str, kind
    return _CONVERSIONS.get(kind)


EVENTS = RowCodec(Event, "events", assigned="id")
CHARGES = RowCodec(Charge, "charges", key=("attempt_id", "rank", "kind", "since"))
CHECKPOINTS = RowCodec(SavedCheckpoint, "checkpoints")
OBSERVATIONS = RowCodec(Observation, "observations")
TALLIES = RowCodec(
    MarketTally,
    "observations",
    columns={
        "count": "COUNT(*)",
        "seconds": "SUM(seconds)",
        "node_seconds": "SUM(seconds * nodes)",
        "first_at": "MIN(at)",
        "last_at": "MAX(at)",
    },
)
HOSTS = RowCodec(Host, "hosts", only=("name", "cpus", "memory_mib", "devices"), key=("name",))
ALLOCATIONS = RowCodec(Allocation, "allocations")
RECIPES = RowCodec(Recipe, "recipes", key=("project", "name"))
SECRETS = RowCodec(SealedSecret, "secrets", key=("project", "name"))
SUMMARIES = RowCodec(
    JobSummary,
    "jobs",
    columns={"user": "user_name", "held": f"COALESCE(not_before, 0) = {to_micros(FAR)}"},
)
ATTEMPTS: RowReader[Attempt] = RowReader(
    "SELECT document FROM attempts", lambda row: decode_attempt(row[0])
)
MACHINES: RowReader[NamedMachine] = RowReader(
    "SELECT document FROM machines", lambda row: decode_machine(row[0])
)
POLICIES: RowReader[BoundPolicy] = RowReader(
    "SELECT project, document FROM project_policies",
    lambda row: BoundPolicy(row[0], decode_policy(row[1])),
)
NODES: RowReader[Node] = RowReader("SELECT document FROM nodes", lambda row: decode_node(row[0]))

_JOBS = RowCodec(JobRecord, "jobs", only=JOB_FIELDS, columns={"user": "user_name"})
JOB_COLUMNS = (*_JOBS.columns, "priority", "machine", "tags", "size", "pool", "rest", "document")
# columns of a row that come after those of the codec
_APART = ("rest", "document", "task", "origin")


def job_values(job: JobRecord, document: int) -> list[object]:
    """Return the encoded values of a job, in the order of JOB_COLUMNS."""
    task = job.task
    beside = (task.priority, task.machine, encode(task.tags), size_of_task(task), task.pool)
    return [*_JOBS.values(job), *beside, encode_rest(job), document]


_CACHED = 512  # maximum number of cached jobs; a task and its origin take a few KB
_CACHED_CHARACTERS = 65536  # maximum characters of a task and its origin together that are cached


class DocumentCache:
    """Caches the decoded task and origin of jobs, with the version of the job at which each task
    and origin was written. All threads use the same cache.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, TaskSpec, RunOrigin]] = {}
        self._lock = Lock()
        columns = [f"j.{name}" for name in _JOBS.columns]
        self.jobs = RowReader(
            f"SELECT {', '.join(columns)}, j.rest, j.document, COALESCE(d.task, r.task),"
            " COALESCE(d.origin, r.origin) FROM jobs j LEFT JOIN documents d ON d.job_id = j.id"
            " LEFT JOIN job_arrays r ON r.id = j.array_id WHERE j.removed IS NULL",
            self._make_job,
        )

    def _make_job(self, row: Row) -> JobRecord:
        known = _JOBS.fields(row)
        apart = dict(zip(_APART, row[len(known) :], strict=True))
        member = known["member"]
        owner, written = (
            (known["id"], apart["document"]) if member is None else (known["array_id"], 0)
        )
        task, origin = self._read(owner, written, apart["task"], apart["origin"])
        rest = decode_rest(apart["rest"])
        if member is not None:
            task = make_member(task, member, rest.get("point"))
        return JobRecord(**known, **rest, task=task, origin=origin)

    def _read(
        self, job_id: str, written: int, task: str, origin: str
    ) -> tuple[TaskSpec, RunOrigin]:
        kept = self._kept.get(job_id)
        if kept is not None and kept[0] == written:
            return kept[1], kept[2]
        decoded = decode_task(task), decode_origin(origin)
        if len(task) + len(origin) <= _CACHED_CHARACTERS:
            self.keep(job_id, written, *decoded)
        return decoded

    def keep(self, job_id: str, written: int, task: TaskSpec, origin: RunOrigin) -> None:
        with self._lock:
            self._kept.pop(job_id, None)
            if len(self._kept) >= _CACHED:
                del self._kept[next(iter(self._kept))]
            self._kept[job_id] = (written, task, origin)

    def written_at(self, job: JobRecord) -> int | None:
        """Return the version of the job at which these task and origin objects were written, or
        None if that version is unknown. The task of an array is written once.
        """
        if job.member is not None:
            return 0
        kept = self._kept.get(job.id)
        same = kept is not None and kept[1] is job.task and kept[2] is job.origin
        return kept[0] if kept is not None and same else None
