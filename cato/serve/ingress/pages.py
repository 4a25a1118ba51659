"""Requests that a web page made a person's browser send.

A client is served without an API key because of where it asks from, and a browser on this machine
asks from there for any page that it shows. Such a page gives itself away: by the name that
it calls this server by (DNS rebinding), by `Origin` and `Sec-Fetch-Site`, or by a body that is not
declared as JSON, the only kind of body that a browser sends to another site without asking first.
A request with a key needs none of this: a page must have been given the key.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from cato.core.errors import AccessError

ANY_PAGE = "*"
_OTHER_SITES = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True, slots=True)
class Pages:
    """Which pages may ask, and the names by which they and others call this server.

    `origins` are those of pages that may read answers (CORS), such as `https://ide.example`; `*`
    is any page, with a key. `hosts` are names beside `localhost`, this machine's own, and plain
    addresses, which no stranger's name can become.
    """

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, headers: Headers, *, is_named: bool) -> None:
        """Raise `AccessError` for a request without a key that a foreign page sent, or may have.

        `is_named`: the server must be called by a name that it knows.
        """
        hosts = headers.getlist("host")
        if (is_named or self.hosts) and not all(map(self._knows, hosts)):
            raise AccessError(
                403, "unknown_host",
                "This server is not known by the name in the header `Host`, and serves no "
                "requests without an API key under it; `hosts` in the ingress args adds names.",
            )  # fmt: skip
        origins = headers.getlist("origin")
        is_allowed = all(o in self.origins or urlsplit(o).netloc in hosts for o in origins)
        is_foreign = not origins and headers.get("sec-fetch-site") in _OTHER_SITES
        if is_foreign or not is_allowed:
            raise AccessError(
                403, "foreign_page",
                "Web pages of other sites are not served without an API key; `origins` in the "
                "ingress args lets some.",
            )  # fmt: skip
        is_json = _is_json(headers.get("content-type", ""))
        if _has_body(headers) and not is_json and not _is_from_no_form(headers):
            raise AccessError(
                415, "not_json",
                "Without an API key a body must be declared as JSON: send the header "
                "`Content-Type: application/json`.",
            )  # fmt: skip

    def _knows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in (*self.hosts, _own_name()):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


@lru_cache(maxsize=1)
def _own_name() -> str:
    return socket.gethostname().lower()


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_from_no_form(headers: Headers) -> bool:
    """Whether it has a header that no page sends to another site without asking it beforehand:
    clients with a key that nobody checks, such as SDKs, which upload files."""
    bearer = headers.get("authorization", "").lower().startswith("bearer ")
    return bearer or any(name in headers for name in ("x-api-key", "api-key"))


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
