"""Notices of clouds, as their metadata services write them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from cato.control.notices import CLOUDS, look

# Stand for the instant two minutes after the test begins, as each cloud writes it.
ISO, AMAZONS, RFC_2822 = "<iso>", "<amazon's>", "<rfc 2822>"
AMAZONS_IN_DAYS = "<amazon's, in days>"
# What each cloud asks for in every question.
ASKED_WITH = {
    "aws": ("X-aws-ec2-metadata-token", "a-token"),
    "gcp": ("Metadata-Flavor", "Google"),
    "azure": ("Metadata", "true"),
}
SPOT, SCHEDULED = (
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/maintenance/scheduled",
)
PREEMPTED, EVENT = (f"/computeMetadata/v1/instance/{n}" for n in ("preempted", "maintenance-event"))
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"


class Cloud(ThreadingHTTPServer):
    def __init__(self, name: str, says: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.says = name, says


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def do_PUT(self) -> None:
        self._answer(200 if self.path == "/latest/api/token" else 404, "a-token")

    def do_GET(self) -> None:
        header, value = ASKED_WITH[self.server.name]
        said = self.server.says.get(self.path.partition("?")[0])
        if self.headers[header] != value:
            self._answer(403, "")
        else:
            self._answer(404 if said is None else 200, said or "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def in_two_minutes(text: str) -> str:
    instant = datetime.now(UTC) + timedelta(minutes=2)
    amazons = "%d %b %Y %H:%M:%S GMT"
    return (
        text.replace(ISO, instant.strftime("%Y-%m-%dT%H:%M:%SZ"))
        .replace(AMAZONS, instant.strftime(amazons))
        .replace(AMAZONS_IN_DAYS, (instant + timedelta(days=9)).strftime(amazons))
        .replace(RFC_2822, format_datetime(instant, usegmt=True))
    )


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    name, says = request.param
    says = {path: in_two_minutes(text) for path, text in says.items()}
    with Cloud(name, says) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield name, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def an_azure_event(kind: str, starts: str, resources: str = "") -> dict[str, str]:
    named = f'"ResourceType": "VirtualMachine", "Resources": {resources}, ' if resources else ""
    event = f'{{"EventType": "{kind}", {named}"NotBefore": "{starts}", "Description": "x"}}'
    says = {NAME: "vmss_3\n"} if resources else {}
    return {EVENTS: f'{{"DocumentIncarnation": 1, "Events": [{event}]}}', **says}


A_RETIREMENT = (
    f'{{"Code": "instance-retirement", "State": "active", "NotBefore": "{AMAZONS_IN_DAYS}"}}'
)
GOING = [
    ("aws", {SPOT: f'{{"action": "terminate", "time": "{ISO}"}}'}),
    (
        "aws",
        {
            SCHEDULED: '[{"Code": "instance-stop", "State": "completed", "NotBefore": ""},'
            f'{{"Code": "system-reboot", "State": "active", "NotBefore": "{AMAZONS}"}}]'
        },
    ),
    ("aws", {SCHEDULED: f"[{A_RETIREMENT}, {A_RETIREMENT.replace(AMAZONS_IN_DAYS, AMAZONS)}]"}),
    ("gcp", {PREEMPTED: "TRUE\n", EVENT: "NONE"}),
    ("gcp", {PREEMPTED: "FALSE", EVENT: "TERMINATE_ON_HOST_MAINTENANCE"}),
    ("azure", an_azure_event("Preempt", RFC_2822)),
    ("azure", an_azure_event("Reboot", "")),
    ("azure", an_azure_event("Preempt", RFC_2822, '["vmss_1", "VMSS_3"]')),
]
STAYING = [
    ("aws", {}),
    ("aws", {SCHEDULED: "[]"}),
    ("aws", {SCHEDULED: f"[{A_RETIREMENT}]"}),
    ("gcp", {PREEMPTED: "FALSE", EVENT: "MIGRATE_ON_HOST_MAINTENANCE"}),
    ("azure", {EVENTS: '{"DocumentIncarnation": 0, "Events": []}'}),
    ("azure", an_azure_event("Freeze", "")),
    ("azure", an_azure_event("Preempt", RFC_2822, '["vmss_1", "vmss_30"]')),
]


@pytest.mark.parametrize("cloud", GOING, indirect=True)
def test_a_machine_that_goes_is_told_why_and_when(cloud: tuple[str, str]) -> None:
    notice = look(*cloud)
    assert notice is not None
    assert notice.why.split(": ")[0] in {"spot", "maintenance", "preempt", "reboot"}
    assert 0 <= notice.within_s <= 121
    if str(cloud[0]) == "aws":
        assert notice.within_s > 60


@pytest.mark.parametrize("cloud", STAYING, indirect=True)
def test_a_machine_that_stays_has_no_notice(cloud: tuple[str, str]) -> None:
    assert look(*cloud) is None


@pytest.mark.parametrize("name", [name for name in CLOUDS if name != "aws"])
def test_a_service_that_says_nothing_is_an_error_and_no_notice(name: str) -> None:
    with Cloud(name, {}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(httpx.HTTPError):
            look(name, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
