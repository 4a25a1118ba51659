"""The tables, as of the newest migration. Times are in seconds since the epoch.

The only text stored is names, and JSON documents made of names and numbers; never text of a prompt
or an answer.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

# SQLite generates row numbers only for a key of the type INTEGER.
_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")

profiles = Table(
    "profiles",
    metadata,
    Column("name", String, primary_key=True),
    Column("measured_at_s", Double, primary_key=True),
    Column("document", Text, nullable=False),
)

hosted_models = Table(
    "hosted_models",
    metadata,
    Column("pool", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("added_at_s", Double, nullable=False),
    Column("model", Text, nullable=False),
    Column("profile", Text, nullable=False),
)

added_adapters = Table(
    "added_adapters",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("base", String, nullable=False),
    Column("source", String, nullable=False),
    Column("aliases", Text, nullable=False),
)

usual_arrivals = Table(
    "usual_arrivals",
    metadata,
    Column("pool", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("is_weekend", Boolean, primary_key=True),
    Column("slice", Integer, primary_key=True),
    Column("arrivals", Double, nullable=False),
    Column("days", Integer, nullable=False),
)

length_samples = Table(
    "length_samples",
    metadata,
    Column("id", _ROW_NUMBER, primary_key=True),
    Column("task", String, nullable=False),
    Column("node", String, nullable=False),
    Column("model", String, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("features", Text, nullable=False, server_default="[]"),
    Index("ix_length_samples_name", "task", "node", "model"),
)

node_means = Table(
    "node_means",
    metadata,
    Column("task", String, primary_key=True),
    Column("node", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("quantity", String, primary_key=True),
    Column("value", Double, nullable=False),
    Column("samples", BigInteger, nullable=False),
)

dag_runs = Table(
    "dag_runs",
    metadata,
    Column("id", _ROW_NUMBER, primary_key=True),
    Column("task", String, nullable=False),
    Column("stages", Text, nullable=False),
    Index("ix_dag_runs_task", "task"),
)

receipts = Table(
    "receipts",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("task", String, nullable=False),
    Column("status", String, nullable=False),
    Column("met", Boolean, nullable=False),
    Column("ended_at_s", Double, nullable=False),
    Column("document", Text, nullable=False),
    Column("tenant", String, primary_key=True, server_default=""),
    Column("session", String, nullable=False, server_default=""),
    Index("ix_receipts_ended_at_s", "ended_at_s"),
    Index("ix_receipts_session", "session"),
)

pool_errors = Table(
    "pool_errors",
    metadata,
    Column("pool", String, primary_key=True),
    Column("predicted_queue_s", Double, nullable=False),
    Column("queue_s", Double, nullable=False),
    Column("predicted_service_s", Double, nullable=False),
    Column("service_s", Double, nullable=False),
    Column("samples", BigInteger, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String, primary_key=True),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("tokens_per_month", BigInteger),
    Column("weight", Double, nullable=False),
)

# `digest` is a hash: the table grants no access.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("name", String, nullable=False),
    Column("sla_class", String, nullable=False),
    Column("tasks", Text, nullable=False),
    Column("models", Text, nullable=False),
    Column("default_task", String, nullable=False),
    Column("created_at_s", Double, nullable=False),
    Column("expires_at_s", Double),
    Column("role", String, nullable=False, server_default="user"),
    Column("bounds", Text, nullable=False, server_default="[]"),
    Column("session_target_s", Double),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("name", String, primary_key=True),
    Column("document", Text, nullable=False),
)

reactions = Table(
    "reactions",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("reaction", String, primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("view_id", String, primary_key=True),
    Column("select_kind", String, nullable=False),
    Column("after_s", Double),
    Column("task", String, nullable=False),
    Column("model", String, nullable=False),
    Column("e2e_s", Double, nullable=False),
    Column("at_s", Double, nullable=False),
    Column("tenant", String, primary_key=True, server_default=""),
    Index("ix_reactions_at_s", "at_s"),
)

usage = Table(
    "usage",
    metadata,
    Column("day", String, primary_key=True),
    Column("tenant", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("task", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_prompt_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
)

# Sums of `usage` by month (as 2026-11), added to with it. Ingresses ask for them twice a second.
spent_tokens = Table(
    "spent_tokens",
    metadata,
    Column("month", String, primary_key=True),
    Column("tenant", String, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
)

# The highest parcel of each sender of usage that is counted, and its last day.
usage_senders = Table(
    "usage_senders",
    metadata,
    Column("sender", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("day", String, nullable=False),
)

# Rows are only added: triggers reject updates, and deletes of entries of the last 365 days.
audit = Table(
    "audit",
    metadata,
    Column("id", _ROW_NUMBER, primary_key=True),
    Column("at_s", Double, nullable=False),
    Column("who", String, nullable=False),
    Column("action", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("target", String, nullable=False),
    Column("before", Text),
    Column("after", Text),
    Index("ix_audit_tenant", "tenant"),
)

card_time = Table(
    "card_time",
    metadata,
    Column("day", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("card_s", Double, nullable=False),
)
