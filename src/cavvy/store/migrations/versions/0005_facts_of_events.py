"""What a program may want to know of an event, beside the text for people."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("events", sa.Column("fact", sa.Text))
