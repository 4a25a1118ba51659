"""Profiles, length samples, baselines of nodes, past runs and receipts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("measured_at_s", sa.Double, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table(
        "length_samples",
        sa.Column("id", _ROW_NUMBER, primary_key=True),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("node", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String, nullable=False),
    )
    op.create_index("ix_length_samples_name", "length_samples", ["task", "node", "model"])
    op.create_table(
        "node_means",
        sa.Column("task", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("quantity", sa.String, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "dag_runs",
        sa.Column("id", _ROW_NUMBER, primary_key=True),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("stages", sa.Text, nullable=False),
    )
    op.create_index("ix_dag_runs_task", "dag_runs", ["task"])
    op.create_table(
        "receipts",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("met", sa.Boolean, nullable=False),
        sa.Column("ended_at_s", sa.Double, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("ix_receipts_ended_at_s", "receipts", ["ended_at_s"])
