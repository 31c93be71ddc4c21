"""What providers keep: their launch ledgers, and the machines that joined."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "provider_state",
        sa.Column("provider", sa.Text, primary_key=True),
        sa.Column("collection", sa.Text, primary_key=True),
        sa.Column("name", _ID, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
