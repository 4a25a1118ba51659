"""Status of an application, from Ray Serve's messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cato.core.fleet import resource_needs, why_infeasible
from cato.core.ids import PoolName
from cato.core.topology import DeploymentSpec

FAILED = "DEPLOY_FAILED"
"""Serve's status of an application or deployment that did not come up."""

UNPLACEABLE = "no host can hold a replica of"
"""Prefix of a reason that only more hosts can fix."""

_HEALTHY = "HEALTHY"
_REPLICA_LOST = "HEALTH_CHECK_FAILED"
# The line of a traceback with the exception; the lines after it belong to its message.
_RAISED = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt)\b[^:]*:|[\w.]+(Error|Exception)$")
_MAX_LINES = 20
_TO_DO = "correct the deployment file and deploy it again"


@dataclass(frozen=True, slots=True)
class ServedPart:
    """Status and message of an application or a deployment, in Serve's words; `trigger` is what
    caused a deployment's status."""

    status: str
    message: str = ""
    trigger: str = ""

    @property
    def has_failed(self) -> bool:
        """Serve has given it up. A replica that is lost while others start, or after a restart of
        Serve's controller, gives the same status, but is replaced."""
        return self.status == FAILED and self.trigger != _REPLICA_LOST


@dataclass(frozen=True, slots=True)
class ServedApplication:
    """`args` are from the deployment file; None if it was not deployed from one."""

    itself: ServedPart
    deployments: Mapping[str, ServedPart] = field(default_factory=dict)
    args: Mapping[str, object] | None = None

    @property
    def failed(self) -> dict[str, ServedPart]:
        """The deployments that Serve has given up."""
        return {name: part for name, part in self.deployments.items() if part.has_failed}

    @property
    def failure(self) -> str:
        """Why it failed for good; empty while it may start. The first line is public."""
        failed = self.failed
        if not failed and (self.itself.status != FAILED or self.deployments):
            return ""
        parts = failed or {"": self.itself}
        head = "the engines failed to deploy" + (f": {', '.join(failed)}" if failed else "")
        return "\n".join([head, *(_told(name, part) for name, part in parts.items())])

    @property
    def trouble(self) -> str:
        """What currently delays its deployments, in Serve's words; empty if nothing."""
        return "\n".join(
            _told(name, part)
            for name, part in self.deployments.items()
            if part.message and part.status != _HEALTHY
        )


def refusal(app: str, served: ServedApplication) -> str:
    """Why the last deployment of `app` failed and what to do; empty if it did not. The first line
    is public."""
    if not served.failure:
        return ""
    failed = served.failed
    what = f" ({', '.join(failed)})" if failed else ", so what ran before it stays in use"
    head = f"the last deployment of the application {app} failed{what}: {_TO_DO}"
    parts = failed or {"": served.itself}
    return "\n".join([head, *(_told(name, part) for name, part in parts.items())])


def why_unplaceable(
    pools: Mapping[PoolName, Sequence[DeploymentSpec]], hosts: Sequence[Mapping[str, float]]
) -> str:
    """Which of `pools` can never have a replica on `hosts` (their total resources), and why; empty
    if all can. Serve would wait for ever. The first line is public."""
    whys: dict[PoolName, list[str]] = {}
    for name, deployments in pools.items():
        found = {d.name: why_infeasible(resource_needs(d), hosts) for d in deployments}
        if all(found.values()):
            whys[name] = [f"{deployment}: {why}" for deployment, why in found.items()]
    if not whys:
        return ""
    return "\n".join(
        [f"{UNPLACEABLE}: {', '.join(whys)}", *(w for ws in whys.values() for w in ws)]
    )


def _told(name: str, part: ServedPart) -> str:
    return f"{name}: {last_words(part.message)}" if name else last_words(part.message)


def last_words(message: str) -> str:
    """The exception at the end of `message`, without the tracebacks before it."""
    lines = message.strip().splitlines()
    raised = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[raised[-1] if raised else 0 :][-_MAX_LINES:])
