"""Baselines are those of a node with a model.

An LLM node's earlier ones are those of the model that answered it last.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.execute("CREATE TABLE earlier_means AS SELECT * FROM node_means")
    op.drop_table("node_means")
    op.create_table(
        "node_means",
        sa.Column("task", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("quantity", sa.String, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
    )
    op.execute(
        """
        INSERT INTO node_means (task, node, model, quantity, value, samples)
        SELECT m.task, m.node,
            CASE WHEN m.quantity = 'runs' THEN '' ELSE COALESCE(
                (SELECT s.model FROM length_samples s WHERE s.task = m.task AND s.node = m.node
                 ORDER BY s.id DESC LIMIT 1), '') END,
            m.quantity, m.value, m.samples
        FROM earlier_means m
        """
    )
    op.drop_table("earlier_means")
