"""Tenants, API keys and what they used; what people did with completions."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("tokens_per_month", sa.BigInteger),
        sa.Column("weight", sa.Double, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("sla_class", sa.String, nullable=False),
        sa.Column("tasks", sa.Text, nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("default_task", sa.String, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("expires_at_s", sa.Double),
    )
    op.create_table(
        "usage",
        sa.Column("day", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("task", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "reactions",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("reaction", sa.String, primary_key=True),
        sa.Column("choice", sa.Integer, primary_key=True),
        sa.Column("view_id", sa.String, primary_key=True),
        sa.Column("select_kind", sa.String, nullable=False),
        sa.Column("after_s", sa.Double),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("e2e_s", sa.Double, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
    )
    op.create_index("ix_reactions_at_s", "reactions", ["at_s"])
