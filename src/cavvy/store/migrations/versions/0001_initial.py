"""The first schema. A database that is newer goes back by its backup, not by a downgrade."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _key(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, primary_key=True)


def upgrade() -> None:
    op.create_table("meta", _key("key", sa.Text()), _text("value"))
    _create_jobs()
    _create_attempts()
    _create_story()
    _create_places()
    op.create_table(
        "secrets",
        _key("project", sa.Text()),
        _key("name", sa.Text()),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        _number("updated_at"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
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
        sa.Column("place", sa.Text),
        _text("rest"),
        _number("document"),
        _number("version"),
        sa.UniqueConstraint("project", "name", name="jobs_name"),
    )
    op.create_index("jobs_project", "jobs", ["project", "id"])
    op.create_index("jobs_phase", "jobs", ["phase", "id"])
    op.create_index("jobs_project_phase", "jobs", ["project", "phase", "id"])
    queued = sa.text("phase = 'queued'")
    op.create_index(
        "jobs_queue",
        "jobs",
        ["phase", sa.text("priority DESC"), "id"],
        sqlite_where=queued,
        postgresql_where=queued,
    )
    op.create_table(
        "documents",
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), primary_key=True),
        _text("task"),
        _text("origin"),
    )
    op.create_table("names", _key("project", sa.Text()), _key("name", sa.Text()), _number("last"))


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        _key("id", _ID),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
        _text("project"),
        _number("number"),
        _text("gang"),
        _text("phase"),
        _text("document"),
        _number("version"),
        sa.UniqueConstraint("job_id", "number", name="attempts_number"),
        sa.UniqueConstraint("gang", name="attempts_gang"),
    )
    is_open = sa.text("phase <> 'ended'")
    op.create_index(
        "attempts_open", "attempts", ["id"], sqlite_where=is_open, postgresql_where=is_open
    )
    op.create_table(
        "nodes",
        sa.Column("attempt_id", _ID, sa.ForeignKey("attempts.id"), primary_key=True),
        _key("rank", sa.BigInteger()),
        _text("project"),
        _text("document"),
        _number("version"),
    )


def _create_story() -> None:
    op.create_table(
        "events",
        sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
        _text("project"),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
        _number("attempt"),
        sa.Column("rank", sa.BigInteger),
        _number("at"),
        _text("kind"),
        _text("text"),
    )
    op.create_index("events_job", "events", ["job_id", "id"])
    op.create_table(
        "charges",
        sa.Column("attempt_id", _ID, sa.ForeignKey("attempts.id"), primary_key=True),
        _key("rank", sa.BigInteger()),
        _key("kind", sa.Text()),
        _key("since", sa.BigInteger()),
        _text("project"),
        sa.Column("job_id", _ID, sa.ForeignKey("jobs.id"), nullable=False),
        _number("until"),
        _number("rate"),
        _number("amount"),
    )
    op.create_index("charges_job", "charges", ["job_id"])
    op.create_index("charges_project", "charges", ["project", "since", "amount"])


def _create_places() -> None:
    op.create_table(
        "hosts",
        _key("name", sa.Text()),
        sa.Column("cpus", sa.Double, nullable=False),
        _number("memory_mib"),
        _text("devices"),
    )
    op.create_table(
        "allocations",
        _key("gang", sa.Text()),
        _key("rank", sa.BigInteger()),
        sa.Column("host", sa.Text, sa.ForeignKey("hosts.name"), nullable=False),
        _text("project"),
        sa.Column("cpus", sa.Double, nullable=False),
        _number("memory_mib"),
        _text("devices"),
    )
    op.create_index("allocations_host", "allocations", ["host"])
    op.create_table(
        "held_devices",
        _key("host", sa.Text()),
        _key("device", sa.Text()),
        _text("gang"),
        _number("rank"),
        sa.ForeignKeyConstraint(
            ["gang", "rank"], ["allocations.gang", "allocations.rank"], ondelete="CASCADE"
        ),
    )
    op.create_index("held_devices_gang", "held_devices", ["gang", "rank"])
