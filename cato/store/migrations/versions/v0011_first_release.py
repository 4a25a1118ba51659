"""The tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = None

_SQLITE = """
CREATE TRIGGER audit_no_{verb} BEFORE {verb} ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
"""
_POSTGRESQL = (
    """
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
""",
    """
CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()
""",
)
_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_tables = sa.MetaData()

sa.Table(
    "added_adapters",
    _tables,
    sa.Column("name", sa.String, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("base", sa.String, nullable=False),
    sa.Column("source", sa.String, nullable=False),
    sa.Column("aliases", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("name"),
)
sa.Table(
    "api_keys",
    _tables,
    sa.Column("id", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("sla_class", sa.String, nullable=False),
    sa.Column("tasks", sa.Text, nullable=False),
    sa.Column("models", sa.Text, nullable=False),
    sa.Column("default_task", sa.String, nullable=False),
    sa.Column("created_at_s", sa.Double, nullable=False),
    sa.Column("expires_at_s", sa.Double),
    sa.Column("role", sa.String, server_default="user", nullable=False),
    sa.Column("bounds", sa.Text, server_default="[]", nullable=False),
    sa.Column("session_target_s", sa.Double),
    sa.PrimaryKeyConstraint("id"),
)
sa.Table(
    "audit",
    _tables,
    sa.Column("id", _ROW_NUMBER, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("who", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("target", sa.String, nullable=False),
    sa.Column("before", sa.Text),
    sa.Column("after", sa.Text),
    sa.PrimaryKeyConstraint("id"),
    sa.Index("ix_audit_tenant", "tenant"),
)
sa.Table(
    "card_time",
    _tables,
    sa.Column("day", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("card_s", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("day", "model"),
)
sa.Table(
    "dag_runs",
    _tables,
    sa.Column("id", _ROW_NUMBER, nullable=False),
    sa.Column("task", sa.String, nullable=False),
    sa.Column("stages", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("id"),
    sa.Index("ix_dag_runs_task", "task"),
)
sa.Table(
    "hosted_models",
    _tables,
    sa.Column("pool", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("added_at_s", sa.Double, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("profile", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("pool", "name", "version"),
)
sa.Table(
    "length_samples",
    _tables,
    sa.Column("id", _ROW_NUMBER, nullable=False),
    sa.Column("task", sa.String, nullable=False),
    sa.Column("node", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("output_tokens", sa.Integer, nullable=False),
    sa.Column("finish_reason", sa.String, nullable=False),
    sa.PrimaryKeyConstraint("id"),
    sa.Index("ix_length_samples_name", "task", "node", "model"),
)
sa.Table(
    "node_means",
    _tables,
    sa.Column("task", sa.String, nullable=False),
    sa.Column("node", sa.String, nullable=False),
    sa.Column("quantity", sa.String, nullable=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("samples", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("task", "node", "quantity"),
)
sa.Table(
    "pool_errors",
    _tables,
    sa.Column("pool", sa.String, nullable=False),
    sa.Column("predicted_queue_s", sa.Double, nullable=False),
    sa.Column("queue_s", sa.Double, nullable=False),
    sa.Column("predicted_service_s", sa.Double, nullable=False),
    sa.Column("service_s", sa.Double, nullable=False),
    sa.Column("samples", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("pool"),
)
sa.Table(
    "profiles",
    _tables,
    sa.Column("name", sa.String, nullable=False),
    sa.Column("measured_at_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("name", "measured_at_s"),
)
sa.Table(
    "reactions",
    _tables,
    sa.Column("request_id", sa.String, nullable=False),
    sa.Column("reaction", sa.String, nullable=False),
    sa.Column("choice", sa.Integer, nullable=False),
    sa.Column("view_id", sa.String, nullable=False),
    sa.Column("select_kind", sa.String, nullable=False),
    sa.Column("after_s", sa.Double),
    sa.Column("task", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("e2e_s", sa.Double, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("tenant", sa.String, server_default="", nullable=False),
    sa.PrimaryKeyConstraint("request_id", "reaction", "choice", "view_id", "tenant"),
    sa.Index("ix_reactions_at_s", "at_s"),
)
sa.Table(
    "receipts",
    _tables,
    sa.Column("request_id", sa.String, nullable=False),
    sa.Column("task", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("met", sa.Boolean, nullable=False),
    sa.Column("ended_at_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("tenant", sa.String, server_default="", nullable=False),
    sa.Column("session", sa.String, server_default="", nullable=False),
    sa.PrimaryKeyConstraint("request_id", "tenant"),
    sa.Index("ix_receipts_ended_at_s", "ended_at_s"),
    sa.Index("ix_receipts_session", "session"),
)
sa.Table(
    "rollouts",
    _tables,
    sa.Column("name", sa.String, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("name"),
)
sa.Table(
    "tenants",
    _tables,
    sa.Column("name", sa.String, nullable=False),
    sa.Column("requests_per_minute", sa.BigInteger),
    sa.Column("tokens_per_minute", sa.BigInteger),
    sa.Column("tokens_per_month", sa.BigInteger),
    sa.Column("weight", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("name"),
)
sa.Table(
    "usage",
    _tables,
    sa.Column("day", sa.String, nullable=False),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("key", sa.String, nullable=False),
    sa.Column("task", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("day", "tenant", "key", "task", "model"),
)
sa.Table(
    "usual_arrivals",
    _tables,
    sa.Column("pool", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("is_weekend", sa.Boolean, nullable=False),
    sa.Column("slice", sa.Integer, nullable=False),
    sa.Column("arrivals", sa.Double, nullable=False),
    sa.Column("days", sa.Integer, nullable=False),
    sa.PrimaryKeyConstraint("pool", "model", "is_weekend", "slice"),
)


def upgrade() -> None:
    _tables.create_all(op.get_bind())
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    of_sqlite = tuple(_SQLITE.format(verb=verb) for verb in ("UPDATE", "DELETE"))
    for statement in of_sqlite if is_sqlite else _POSTGRESQL:
        op.execute(statement)
