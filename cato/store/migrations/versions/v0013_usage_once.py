"""The store remembers which usage of an ingress it has, so that none is counted twice."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "usage_senders",
        sa.Column("sender", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("day", sa.String, nullable=False),
    )
