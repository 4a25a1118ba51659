"""Rollouts of models."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
