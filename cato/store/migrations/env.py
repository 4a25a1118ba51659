"""Alembic runs this to migrate; `cato.store.database` passes in an open transaction."""

from alembic import context

from cato.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
