"""Feedback on completions (shown, accepted, dismissed), and the interface that records it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

log = logging.getLogger("cato.ingress")


class Reaction(StrEnum):
    """Tabby's event types."""

    VIEW = "view"
    SELECT = "select"
    DISMISS = "dismiss"


@dataclass(frozen=True, slots=True)
class Feedback:
    """One reaction to the completion of `request_id`.

    `view_id` identifies one display of a completion; `select_kind` is `line` if only a part was
    accepted; `after_s` is the time since it was shown, None if the client does not say. `tenant`
    owns the API key that sent it; it only counts for that tenant's requests.
    """

    request_id: str
    reaction: Reaction
    choice: int = 0
    view_id: str = ""
    select_kind: str = ""
    after_s: float | None = None
    tenant: str = ""


class FeedbackSink(Protocol):
    """Where feedback goes."""

    def note(self, feedback: Feedback) -> None:
        """Record `feedback`. Never blocks. Its request may be unknown: clients can invent ids."""
        ...


class LoggedFeedback:
    """Writes every reaction to the log, for a deployment without a store."""

    def note(self, feedback: Feedback) -> None:
        log.info("completion %s: %s", feedback.request_id, feedback.reaction)
