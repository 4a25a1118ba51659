"""When models of shared pools are asked for."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "usual_arrivals",
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("is_weekend", sa.Boolean, primary_key=True),
        sa.Column("slice", sa.Integer, primary_key=True),
        sa.Column("arrivals", sa.Double, nullable=False),
        sa.Column("days", sa.Integer, nullable=False),
    )
