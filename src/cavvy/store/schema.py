"""The tables at revision HEAD, and the only list of them beside the migrations.

After a change here, add a migration and run `python -m cavvy.store.schema`. It writes
`migrations/head.DIALECT.sql`, which creates a fresh database without importing SQLAlchemy; a test
compares the three. Times are microseconds since 1970, money is micro-US-dollars, documents are JSON
text. Every row has its project.
"""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from cavvy.store.migrate import VERSION_TABLE

metadata = sa.MetaData()

# Ids are compared by byte, so that PostgreSQL sorts them as Python and SQLite do in any locale.
_ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _text(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=False)


def _number(name: str, kind: Any = sa.BigInteger) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _key(name: str, kind: Any = sa.Text, parent: str | None = None) -> sa.Column[Any]:
    """A column of the primary key; `parent` is the column that it refers to."""
    return sa.Column(name, kind, *map(sa.ForeignKey, [parent] if parent else ()), primary_key=True)


def _parent(name: str, column: str) -> sa.Column[Any]:
    return sa.Column(name, _ID, sa.ForeignKey(column), nullable=False)


sa.Table("meta", metadata, _key("key"), _text("value"))

jobs = sa.Table(
    "jobs",
    metadata,
    _key("id", _ID),
    _text("project"),
    _text("name"),
    _text("user_name"),
    _text("phase"),
    _text("reason"),
    _number("priority"),
    _number("submitted_at"),
    _number("since"),
    sa.Column("not_before", sa.BigInteger),
    sa.Column("stop_reason", sa.Text),
    sa.Column("ended_at", sa.BigInteger),
    _number("attempt"),
    sa.Column("exit_code", sa.BigInteger),
    sa.Column("place", sa.Text),  # offer key of the latest attempt
    _text("rest"),  # the other fields of a job
    _number("document"),  # the job's version at which its row in `documents` was written
    _number("version"),
    sa.Column(
        "spent", sa.BigInteger, nullable=False, server_default=sa.text("0")
    ),  # running sum of the charges
    sa.UniqueConstraint("project", "name", name="jobs_name"),
)
sa.Index("jobs_project", jobs.c.project, jobs.c.id)
sa.Index("jobs_phase", jobs.c.phase, jobs.c.id)
sa.Index("jobs_project_phase", jobs.c.project, jobs.c.phase, jobs.c.id)

# Apart from `jobs`, so that a change of phase does not write the task and its diff again.
documents = sa.Table(
    "documents",
    metadata,
    _key("job_id", _ID, "jobs.id"),
    _text("task"),
    _text("origin"),
    sa.Column("snapshot", sa.Text),  # content hash of the working folder
)

# The last number given to a name that was taken: the next free one is found without trying them
# all.
sa.Table(
    "names",
    metadata,
    _key("project"),
    _key("name"),
    _number("last"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    _key("id", _ID),
    _parent("job_id", "jobs.id"),
    _text("project"),
    _number("number"),
    _text("gang"),
    _text("phase"),
    _text("document"),
    _number("version"),
    sa.UniqueConstraint("job_id", "number", name="attempts_number"),
    sa.UniqueConstraint("gang", name="attempts_gang"),
)

sa.Table(
    "nodes",
    metadata,
    _key("attempt_id", _ID, "attempts.id"),
    _key("rank", sa.BigInteger),
    _text("project"),
    _text("document"),
    _number("version"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
    _text("project"),
    _parent("job_id", "jobs.id"),
    _number("attempt"),
    sa.Column("rank", sa.BigInteger),
    _number("at"),
    _text("kind"),
    sa.Column("fact", sa.Text),
    _text("text"),
)
sa.Index("events_job", events.c.job_id, events.c.id)

charges = sa.Table(
    "charges",
    metadata,
    _key("attempt_id", _ID, "attempts.id"),
    _key("rank", sa.BigInteger),
    _key("kind"),
    _key("since", sa.BigInteger),
    _text("project"),
    _parent("job_id", "jobs.id"),
    _number("until"),
    _number("rate"),
    _number("amount"),
)
sa.Index("charges_job", charges.c.job_id)
sa.Index("charges_project", charges.c.project, charges.c.since, charges.c.amount)

# The newest few of each job whose nodes cannot reach its folder; their files lie in the job's own
# blobs.
sa.Table(
    "checkpoints",
    metadata,
    _key("job_id", _ID, "jobs.id"),
    _key("number", sa.BigInteger),
    _text("project"),
    _number("attempt"),
    _text("manifest"),
    _number("files"),
    _number("bytes"),
    _number("made_at"),
    _number("saved_at"),
)

# What was seen of each offer's market; old rows are forgotten.
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
    sa.Column("market", _ID, nullable=False),
    _text("kind"),
    _number("at"),
    _number("seconds", sa.Double),
    _number("nodes"),
    sa.Column("rate", sa.BigInteger),
    _text("text"),
)
sa.Index("observations_market", observations.c.market, observations.c.at)
sa.Index("observations_at", observations.c.at)

sa.Table(
    "hosts",
    metadata,
    _key("name"),
    _number("cpus", sa.Double),
    _number("memory_mib"),
    _text("devices"),
)

allocations = sa.Table(
    "allocations",
    metadata,
    _key("gang"),
    _key("rank", sa.BigInteger),
    sa.Column("host", sa.Text, sa.ForeignKey("hosts.name"), nullable=False),
    _text("project"),
    _number("cpus", sa.Double),
    _number("memory_mib"),
    _text("devices"),
)
sa.Index("allocations_host", allocations.c.host)

# One row for each device held: its primary key is what keeps two allocations from one device.
held_devices = sa.Table(
    "held_devices",
    metadata,
    _key("host"),
    _key("device"),
    _text("gang"),
    _number("rank"),
    sa.ForeignKeyConstraint(
        ["gang", "rank"], ["allocations.gang", "allocations.rank"], ondelete="CASCADE"
    ),
)
sa.Index("held_devices_gang", held_devices.c.gang, held_devices.c.rank)

sa.Table(
    "secrets",
    metadata,
    _key("project"),
    _key("name"),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    _number("updated_at"),
)

# What providers keep, as `providers.state` describes it; of no project.
sa.Table(
    "provider_state",
    metadata,
    _key("provider"),
    _key("collection"),
    _key("name", _ID),
    _text("body"),
    _number("version"),
)


def _index_some(name: str, condition: str, *columns: sa.ColumnElement[Any]) -> None:
    """An index of the rows for which the condition holds."""
    where = sa.text(condition)
    sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


_index_some("jobs_queue", "phase = 'queued'", jobs.c.phase, jobs.c.priority.desc(), jobs.c.id)
_index_some("documents_snapshot", "snapshot IS NOT NULL", documents.c.snapshot)
_index_some("attempts_open", "phase <> 'ended'", attempts.c.id)


def make_ddl(dialect: str) -> str:
    """The statements that make a fresh database, the table of revisions included, each ended by
    a semicolon.
    """
    spoken = sa.create_mock_engine(
        f"{dialect}+psycopg://" if dialect == "postgresql" else "sqlite://", print
    ).dialect
    revisions = sa.Table(
        VERSION_TABLE,
        sa.MetaData(),
        sa.Column("version_num", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
    )
    statements: list[sa.schema.ExecutableDDLElement] = [CreateTable(revisions)]
    for table in metadata.tables.values():  # as declared, so that the text is always the same
        statements.append(CreateTable(table))
        statements += [
            CreateIndex(index) for index in sorted(table.indexes, key=lambda index: str(index.name))
        ]
    lines = (
        str(statement.compile(dialect=spoken)).strip().replace("\t", "    ")
        for statement in statements
    )
    return "".join(f"{_trim(text)};\n" for text in lines)


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


if __name__ == "__main__":
    for each in ("sqlite", "postgresql"):
        Path(__file__).with_name("migrations").joinpath(f"head.{each}.sql").write_text(
            make_ddl(each)
        )
