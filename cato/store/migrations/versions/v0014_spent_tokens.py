"""Each tenant's tokens of a month are kept as a sum, so that budgets need not add up all usage."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_SUMS = """
INSERT INTO spent_tokens (month, tenant, tokens)
SELECT substr(day, 1, 7), tenant, sum(prompt_tokens + output_tokens) FROM usage
GROUP BY substr(day, 1, 7), tenant
"""


def upgrade() -> None:
    op.create_table(
        "spent_tokens",
        sa.Column("month", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, primary_key=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.execute(_SUMS)
