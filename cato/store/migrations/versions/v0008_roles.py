"""Roles and bounds of API keys; receipts and reactions are a tenant's own, whatever their ids."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("api_keys") as batch:
        batch.add_column(sa.Column("role", sa.String, nullable=False, server_default="user"))
        batch.add_column(sa.Column("bounds", sa.Text, nullable=False, server_default="[]"))

    op.drop_index("ix_receipts_ended_at_s", "receipts")
    op.drop_index("ix_receipts_session", "receipts")
    op.rename_table("receipts", "earlier_receipts")
    op.create_table(
        "receipts",
        sa.Column("request_id", sa.String),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("met", sa.Boolean, nullable=False),
        sa.Column("ended_at_s", sa.Double, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("tenant", sa.String, server_default=""),
        sa.Column("session", sa.String, nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("request_id", "tenant", name="receipts_of_tenants"),
    )
    columns = "request_id, task, status, met, ended_at_s, document, tenant, session"
    op.execute(f"INSERT INTO receipts ({columns}) SELECT {columns} FROM earlier_receipts")
    op.drop_table("earlier_receipts")
    op.create_index("ix_receipts_ended_at_s", "receipts", ["ended_at_s"])
    op.create_index("ix_receipts_session", "receipts", ["session"])

    op.drop_index("ix_reactions_at_s", "reactions")
    op.rename_table("reactions", "earlier_reactions")
    op.create_table(
        "reactions",
        sa.Column("request_id", sa.String),
        sa.Column("reaction", sa.String),
        sa.Column("choice", sa.Integer),
        sa.Column("view_id", sa.String),
        sa.Column("select_kind", sa.String, nullable=False),
        sa.Column("after_s", sa.Double),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("e2e_s", sa.Double, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("tenant", sa.String, server_default=""),
        sa.PrimaryKeyConstraint(
            "request_id", "reaction", "choice", "view_id", "tenant", name="reactions_of_tenants"
        ),
    )
    columns = (
        "request_id, reaction, choice, view_id, select_kind, after_s, task, model, e2e_s, at_s"
    )
    op.execute(f"INSERT INTO reactions ({columns}) SELECT {columns} FROM earlier_reactions")
    op.drop_table("earlier_reactions")
    op.create_index("ix_reactions_at_s", "reactions", ["at_s"])
