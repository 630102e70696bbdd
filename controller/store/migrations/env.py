"""Runs the migrations on the connection that `controller.store.database` hands over.

Called by Alembic only. There is no offline mode and no URL: the controller migrates at its start.
"""

from alembic import context

from controller.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
