"""Termination notices of clouds, read from the machine's metadata service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

ANSWER_WITHIN_S = 5.0
# Amazon announces maintenance days ahead: a host works until this long before it.
AWS_AHEAD_S = 1800.0
# Where a notice gives no time: Google reclaims a spot machine after 30 s, and warns 60 s before
# maintenance that ends one.
GOOGLE_SPOT_S = 30.0
GOOGLE_MAINTENANCE_S = 60.0
# Azure's other events keep a machine's memory.
_AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
_AZURE_NAME = "/metadata/instance/compute/name"


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine goes within `within_s`."""

    why: str
    within_s: float


def _until(moment: datetime) -> float:
    return max(0.0, moment.timestamp() - time.time())


def aws(http: httpx.Client) -> Notice | None:
    """A spot interruption, two minutes before, or scheduled maintenance."""
    token = http.put("/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    http.headers["X-aws-ec2-metadata-token"] = token.raise_for_status().text
    spot = http.get("/latest/meta-data/spot/instance-action")
    if spot.status_code == 200:
        found: dict[str, Any] = spot.json()
        return Notice(f"spot: {found['action']}", _until(datetime.fromisoformat(found["time"])))
    events = http.get("/latest/meta-data/events/maintenance/scheduled")
    for event in events.json() if events.status_code == 200 else ():
        if event.get("State") == "active":
            starts = datetime.strptime(event["NotBefore"], "%d %b %Y %H:%M:%S %Z")
            within_s = _until(starts.replace(tzinfo=UTC))
            if within_s <= AWS_AHEAD_S:
                return Notice(f"maintenance: {event['Code']}", within_s)
    return None


def gcp(http: httpx.Client) -> Notice | None:
    http.headers["Metadata-Flavor"] = "Google"
    base = "/computeMetadata/v1/instance"
    if http.get(f"{base}/preempted").raise_for_status().text.strip() == "TRUE":
        return Notice("spot: preempted", GOOGLE_SPOT_S)
    event = http.get(f"{base}/maintenance-event").raise_for_status().text.strip()
    if event == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice(f"maintenance: {event}", GOOGLE_MAINTENANCE_S)
    return None  # NONE, or live migration


def azure(http: httpx.Client) -> Notice | None:
    """An event of this machine: the service lists those of its whole scale set."""
    http.headers["Metadata"] = "true"
    answer = http.get("/metadata/scheduledevents", params={"api-version": "2020-07-01"})
    events = answer.raise_for_status().json()["Events"]
    ends = [event for event in events if event["EventType"] in _AZURE_ENDS]
    name = _azure_name(http) if any(event.get("Resources") for event in ends) else ""
    for event in ends:
        named = event.get("Resources")
        if named and name not in (resource.lower() for resource in named):
            continue
        starts = event.get("NotBefore")  # empty once the event has begun
        within_s = _until(parsedate_to_datetime(starts)) if starts else 0.0
        return Notice(f"{event['EventType'].lower()}: {event.get('Description', '')}", within_s)
    return None


def _azure_name(http: httpx.Client) -> str:
    answer = http.get(_AZURE_NAME, params={"api-version": "2021-02-01", "format": "text"})
    return answer.raise_for_status().text.strip().lower()


CLOUDS: Mapping[str, tuple[str, Callable[[httpx.Client], Notice | None]]] = {
    "aws": ("http://169.254.169.254", aws),
    "gcp": ("http://metadata.google.internal", gcp),
    "azure": ("http://169.254.169.254", azure),
}


def look(cloud: str, base_url: str = "") -> Notice | None:
    """The current notice; raise an `httpx.HTTPError` when the service does not answer."""
    usual, ask = CLOUDS[cloud]
    url = base_url or usual
    # No proxy: the service is local to this machine.
    with httpx.Client(base_url=url, timeout=ANSWER_WITHIN_S, trust_env=False) as http:
        return ask(http)
