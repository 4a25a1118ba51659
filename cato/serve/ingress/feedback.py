"""What people did with a completion: the way out of the ingress for acceptance telemetry."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

log = logging.getLogger("cato.ingress")


class Reaction(StrEnum):
    """Tabby's types of events."""

    VIEW = "view"
    SELECT = "select"
    DISMISS = "dismiss"


@dataclass(frozen=True, slots=True)
class Feedback:
    """One reaction to the completion of `request_id`.

    `view_id` tells the showings of one completion apart; `select_kind` is `line` when only a part
    was taken; `after_s` is the time since it was shown, None when the client does not say. `tenant`
    is whose API key told it: it counts for nobody else's requests.
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
        """Keep `feedback`. Never blocks; its request may be unknown, as clients make ids up."""
        ...


class LoggedFeedback:
    """Writes every reaction to the log, for a deployment without a store for them."""

    def note(self, feedback: Feedback) -> None:
        log.info("completion %s: %s", feedback.request_id, feedback.reaction)
