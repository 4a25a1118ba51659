"""Models of shared pools that were added at run time."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "hosted_models",
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("added_at_s", sa.Double, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
    )
