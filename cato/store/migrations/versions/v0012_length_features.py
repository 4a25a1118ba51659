"""Samples of output lengths keep the features that may predict them."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    features = sa.Column("features", sa.Text, nullable=False, server_default="[]")
    op.add_column("length_samples", features)
