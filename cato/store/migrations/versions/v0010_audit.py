"""The log of administrative changes, and how long models held cards."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

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


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", _ROW_NUMBER, primary_key=True),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
    )
    op.create_index("ix_audit_tenant", "audit", ["tenant"])
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    of_sqlite = tuple(_SQLITE.format(verb=verb) for verb in ("UPDATE", "DELETE"))
    for statement in of_sqlite if is_sqlite else _POSTGRESQL:
        op.execute(statement)
    op.create_table(
        "card_time",
        sa.Column("day", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("card_s", sa.Double, nullable=False),
    )
