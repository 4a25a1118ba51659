"""What Serve says of the application `engines` while it comes up. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

FAILED = "DEPLOY_FAILED"
"""Serve's status of what it has given up on; applications and deployments have it."""

_QUIET = frozenset({"HEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING"})
_HAS_FAILED_ONCE = "failed to start"
# The line of a traceback that says what was raised; what follows belongs to it.
_RAISED = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b[^:]*:|[\w.]+(Error|Exception)$")
_MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class ServedPart:
    """Status and message of an application or a deployment, in Serve's words."""

    status: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ServedApplication:
    """`args` are those of its deployment file; None where it was not deployed from one."""

    itself: ServedPart
    deployments: Mapping[str, ServedPart] = field(default_factory=dict)
    args: Mapping[str, object] | None = None

    @property
    def failure(self) -> str:
        """Why it does not come up any more, the first line for everybody; empty while it may."""
        failed = {n: d for n, d in self.deployments.items() if d.status == FAILED}
        if self.itself.status != FAILED and not failed:
            return ""
        parts = failed or {"": self.itself}
        head = "the engines failed to deploy" + (f": {', '.join(failed)}" if failed else "")
        return "\n".join([head, *(_told(name, part) for name, part in parts.items())])

    @property
    def trouble(self) -> str:
        """What keeps its deployments from coming up, as far as Serve says; empty when nothing."""
        return "\n".join(
            _told(name, part)
            for name, part in self.deployments.items()
            if part.message and (part.status not in _QUIET or _HAS_FAILED_ONCE in part.message)
        )


def _told(name: str, part: ServedPart) -> str:
    return f"{name}: {last_words(part.message)}" if name else last_words(part.message)


def last_words(message: str) -> str:
    """What was raised at the end of `message`, without the tracebacks before it."""
    lines = message.strip().splitlines()
    raised = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[raised[-1] if raised else 0 :][-_MAX_LINES:])
