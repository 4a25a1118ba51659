"""Entries of the audit log may be deleted, but only once they are a year old."""

from alembic import op

revision = "0015"
down_revision = "0014"

_SQLITE = (
    "DROP TRIGGER audit_no_DELETE",
    """
CREATE TRIGGER audit_no_DELETE BEFORE DELETE ON audit
WHEN OLD.at_s > strftime('%s', 'now') - 365 * 86400
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only for a year'); END
""",
)
_POSTGRESQL = (
    "DROP TRIGGER audit_no_change ON audit",
    """
CREATE TRIGGER audit_no_change BEFORE UPDATE OR TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()
""",
    """
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit
FOR EACH ROW WHEN (OLD.at_s > extract(epoch from now()) - 365 * 86400)
EXECUTE FUNCTION audit_is_append_only()
""",
)


def upgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in _SQLITE if is_sqlite else _POSTGRESQL:
        op.execute(statement)
