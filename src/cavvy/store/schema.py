"""The tables as they are at revision HEAD: the source of `migrations/head.DIALECT.sql`, which makes
a fresh database.

After a change here: add a migration, then run `python -m cavvy.store.schema`, which writes these
files again. Times are microseconds since 1970, money is micro-US-dollars, documents are JSON text.
Every row has its project.
"""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from cavvy.store.migrate import VERSION_TABLE

metadata = sa.MetaData()

# Ids are compared by byte, so that PostgreSQL sorts them as Python and SQLite do, whatever its
# locale.
_ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(name: str, kind: type[sa.types.TypeEngine[Any]]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


sa.Table("meta", metadata, sa.Column("key", sa.Text, primary_key=True), _column("value", sa.Text))

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    _column("project", sa.Text),
    _column("name", sa.Text),
    _column("user_name", sa.Text),
    _column("phase", sa.Text),
    _column("reason", sa.Text),
    _column("priority", sa.BigInteger),
    _column("submitted_at", sa.BigInteger),
    _column("since", sa.BigInteger),
    sa.Column("not_before", sa.BigInteger),
    sa.Column("stop_reason", sa.Text),
    sa.Column("ended_at", sa.BigInteger),
    _column("attempt", sa.BigInteger),
    sa.Column("exit_code", sa.BigInteger),
    sa.Column("place", sa.Text),  # offer key of the latest attempt
    _column("rest", sa.Text),  # documents.JobRest
    _column(
        "document", sa.BigInteger
    ),  # the job's version at which its row in `documents` was written
    _column("version", sa.BigInteger),
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
    sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), primary_key=True),
    _column("task", sa.Text),
    _column("origin", sa.Text),
    sa.Column("snapshot", sa.Text),  # content hash of the working folder
)

# The last number given to a name that was taken: the next free one is found without trying them
# all.
sa.Table(
    "names",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    _column("last", sa.BigInteger),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
    _column("project", sa.Text),
    _column("number", sa.BigInteger),
    _column("gang", sa.Text),
    _column("phase", sa.Text),
    _column("document", sa.Text),
    _column("version", sa.BigInteger),
    sa.UniqueConstraint("job_id", "number", name="attempts_number"),
    sa.UniqueConstraint("gang", name="attempts_gang"),
)

sa.Table(
    "nodes",
    metadata,
    sa.Column("attempt_id", _ID, sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("rank", sa.BigInteger, primary_key=True),
    _column("project", sa.Text),
    _column("document", sa.Text),
    _column("version", sa.BigInteger),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
    _column("project", sa.Text),
    sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
    _column("attempt", sa.BigInteger),
    sa.Column("rank", sa.BigInteger),
    _column("at", sa.BigInteger),
    _column("kind", sa.Text),
    sa.Column("fact", sa.Text),
    _column("text", sa.Text),
)
sa.Index("events_job", events.c.job_id, events.c.id)

charges = sa.Table(
    "charges",
    metadata,
    sa.Column("attempt_id", _ID, sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("rank", sa.BigInteger, primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("since", sa.BigInteger, primary_key=True),
    _column("project", sa.Text),
    sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
    _column("until", sa.BigInteger),
    _column("rate", sa.BigInteger),
    _column("amount", sa.BigInteger),
)
sa.Index("charges_job", charges.c.job_id)
sa.Index("charges_project", charges.c.project, charges.c.since, charges.c.amount)

# The newest few of each job whose nodes cannot reach its folder; their files lie in the job's own
# blobs.
sa.Table(
    "checkpoints",
    metadata,
    sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True),
    _column("project", sa.Text),
    _column("attempt", sa.BigInteger),
    _column("manifest", sa.Text),
    _column("files", sa.BigInteger),
    _column("bytes", sa.BigInteger),
    _column("made_at", sa.BigInteger),
    _column("saved_at", sa.BigInteger),
)

# What was seen of each offer's market; old rows are forgotten.
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
    sa.Column("market", _ID, nullable=False),
    _column("kind", sa.Text),
    _column("at", sa.BigInteger),
    _column("seconds", sa.Double),
    _column("nodes", sa.BigInteger),
    sa.Column("rate", sa.BigInteger),
    _column("text", sa.Text),
)
sa.Index("observations_market", observations.c.market, observations.c.at)
sa.Index("observations_at", observations.c.at)

sa.Table(
    "hosts",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    _column("cpus", sa.Double),
    _column("memory_mib", sa.BigInteger),
    _column("devices", sa.Text),
)

allocations = sa.Table(
    "allocations",
    metadata,
    sa.Column("gang", sa.Text, primary_key=True),
    sa.Column("rank", sa.BigInteger, primary_key=True),
    sa.Column("host", sa.Text, sa.ForeignKey("hosts.name"), nullable=False),
    _column("project", sa.Text),
    _column("cpus", sa.Double),
    _column("memory_mib", sa.BigInteger),
    _column("devices", sa.Text),
)
sa.Index("allocations_host", allocations.c.host)

# One row for each device held: its primary key is what keeps two allocations from one device.
held_devices = sa.Table(
    "held_devices",
    metadata,
    sa.Column("host", sa.Text, primary_key=True),
    sa.Column("device", sa.Text, primary_key=True),
    _column("gang", sa.Text),
    _column("rank", sa.BigInteger),
    sa.ForeignKeyConstraint(
        ["gang", "rank"], ["allocations.gang", "allocations.rank"], ondelete="CASCADE"
    ),
)
sa.Index("held_devices_gang", held_devices.c.gang, held_devices.c.rank)

sa.Table(
    "secrets",
    metadata,
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    _column("sealed", sa.LargeBinary),
    _column("updated_at", sa.BigInteger),
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
