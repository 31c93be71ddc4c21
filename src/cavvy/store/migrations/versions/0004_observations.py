"""What was seen of each offer's market: launches, lives, boot times, prices."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_ID = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "observations",
        sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("market", _ID, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("nodes", sa.BigInteger, nullable=False),
        sa.Column("rate", sa.BigInteger),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_index("observations_at", "observations", ["at"])
    op.create_index("observations_market", "observations", ["market", "at"])
