"""A running sum of each job's charges, so that listings scan none, and its snapshot's hash, so
that blobs are swept.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("spent", sa.BigInteger, nullable=False, server_default=sa.text("0"))
    )
    op.execute(
        "UPDATE jobs SET spent = (SELECT SUM(amount) FROM charges WHERE charges.job_id = jobs.id)"
        " WHERE EXISTS (SELECT 1 FROM charges WHERE charges.job_id = jobs.id)"
    )
    op.add_column("documents", sa.Column("snapshot", sa.Text))
    _fill_snapshots(op.get_bind())
    frozen = sa.text("snapshot IS NOT NULL")
    op.create_index(
        "documents_snapshot",
        "documents",
        ["snapshot"],
        sqlite_where=frozen,
        postgresql_where=frozen,
    )


def _fill_snapshots(connection: sa.Connection) -> None:
    """In slices by key, so that the memory it takes does not grow with the number of jobs."""
    select = sa.text(
        "SELECT job_id, origin FROM documents WHERE job_id > :after ORDER BY job_id LIMIT 500"
    )
    update = sa.text("UPDATE documents SET snapshot = :snapshot WHERE job_id = :job_id")
    after = ""
    while rows := connection.execute(select, {"after": after}).fetchall():
        found = [{"job_id": row[0], "snapshot": json.loads(row[1]).get("snapshot")} for row in rows]
        if filled := [each for each in found if each["snapshot"]]:
            connection.execute(update, filled)
        after = rows[-1][0]
