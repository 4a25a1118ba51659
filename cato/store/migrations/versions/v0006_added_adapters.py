"""LoRA adapters that were added to a base at run time."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "added_adapters",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("aliases", sa.Text, nullable=False),
    )
