"""JSON log lines, one object per event, with the request's id; never prompt or answer text.

`CATO_LOG_LEVEL` (default `WARNING`) sets the level; `INFO` has a line for each run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime

from cato.core.receipt import SlaReceipt

LEVEL_VARIABLE = "CATO_LOG_LEVEL"

REQUEST_ID: ContextVar[str] = ContextVar("cato_request_id", default="")
"""Id of the current request; added to every line logged meanwhile."""

_runs = logging.getLogger("cato.run")


class JsonLines(logging.Formatter):
    """Time, level, logger, request and message, and the fields of a record's `cato` attribute."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
        }
        if id := REQUEST_ID.get():
            line["request_id"] = id
        line["message"] = record.getMessage()
        line.update(getattr(record, "cato", {}))
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up() -> None:
    """Make this process write CATO's log lines to its stderr. Idempotent.

    Raise `ValueError` for an unknown level.
    """
    root = logging.getLogger("cato")
    if any(isinstance(h.formatter, JsonLines) for h in root.handlers):
        return
    root.setLevel(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())
    # In a replica, `sys.stderr` is Serve's, which holds lines back until it has very many of them.
    handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
    handler.setFormatter(JsonLines())
    root.addHandler(handler)
    root.propagate = False  # Ray's own handler would repeat the line


def wants_runs() -> bool:
    """Whether `run_ended` would write anything."""
    return _runs.isEnabledFor(logging.INFO)


def run_ended(receipt: SlaReceipt) -> None:
    """Log a finished run, at `INFO`. Problems may quote a prompt, so they are left out."""
    if not wants_runs():
        return
    calls = [n.llm for n in receipt.nodes if n.llm is not None]
    _runs.info(
        "run ended",
        extra={
            "cato": {
                "request_id": receipt.request_id,
                "task": receipt.task,
                "tenant": receipt.tenant,
                "session": receipt.session,
                "turn": receipt.turn,
                "parent": receipt.parent,
                "status": receipt.status,
                "metric": receipt.metric,
                "target_s": receipt.target_s,
                "achieved_s": receipt.achieved_s,
                "met": receipt.met,
                "e2e_s": receipt.e2e_s,
                "ttft_s": receipt.ttft_s,
                "queue_s": receipt.queue_s,
                "output_tokens": receipt.output_tokens,
                "replicas": [c.replica for c in calls],
            }
        },
    )
