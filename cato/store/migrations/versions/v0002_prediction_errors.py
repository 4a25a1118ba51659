"""What was predicted of each pool's queue and service, beside what came."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "pool_errors",
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("predicted_queue_s", sa.Double, nullable=False),
        sa.Column("queue_s", sa.Double, nullable=False),
        sa.Column("predicted_service_s", sa.Double, nullable=False),
        sa.Column("service_s", sa.Double, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
    )
