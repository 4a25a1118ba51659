"""The session of each receipt, and whose it is."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("receipts") as batch:
        batch.add_column(sa.Column("tenant", sa.String, nullable=False, server_default=""))
        batch.add_column(sa.Column("session", sa.String, nullable=False, server_default=""))
        batch.create_index("ix_receipts_session", ["session"])
