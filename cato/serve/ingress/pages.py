"""Protection against requests that a foreign web page sends through a user's browser.

Local clients are served without an API key, and a browser on this machine is a local client for
every page it shows. Foreign pages are detected by the `Host` name (DNS rebinding), by `Origin` and
`Sec-Fetch-Site`, or by a body that is not declared as JSON: a browser sends only such bodies to
another site without a CORS preflight. Requests with a key are not checked: a page cannot guess one.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from cato.core.errors import AccessError

# Longer than any name with a port.
_MAX_HOST_CHARS = 300
_OTHER_SITES = frozenset({"cross-site", "same-site"})
_NOT_JSON = (
    "Requests without an API key must declare their body as JSON: send the header "
    "`Content-Type: application/json`."
)
# An upload cannot be JSON. A page cannot send this header unasked, so any key will do.
_OF_UPLOADS = "multipart/form-data"
_UPLOAD = (
    "Uploads need the header of an API key, though no key is checked here: send any, such as "
    "`Authorization: Bearer none`."
)


@dataclass(frozen=True, slots=True)
class Pages:
    """Allowed page origins, and the host names of this server.

    `origins` may read answers (CORS), such as `https://ide.example`; `*` allows any page that has a
    key. `hosts` are names in addition to `localhost`, this machine's host name, and IP addresses,
    which DNS rebinding cannot forge.
    """

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, headers: Headers, *, is_named: bool) -> None:
        """Raise `AccessError` for a request without a key that a foreign page may have sent.

        `is_named`: the `Host` header must hold a known name.
        """
        hosts = headers.getlist("host")
        if (is_named or self.hosts) and not all(map(self._knows, hosts)):
            raise AccessError(
                403, "unknown_host",
                "The name in the header `Host` is not known to this server. Send an API key, or "
                "add the name to `hosts` in the ingress args.",
            )  # fmt: skip
        origins = headers.getlist("origin")
        is_allowed = all(o in self.origins or urlsplit(o).netloc in hosts for o in origins)
        is_foreign = not origins and headers.get("sec-fetch-site") in _OTHER_SITES
        if is_foreign or not is_allowed:
            raise AccessError(
                403, "foreign_page",
                "Web pages of other sites need an API key. Send one, or add the site to `origins` "
                "in the ingress args.",
            )  # fmt: skip
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if _has_body(headers) and not _is_json(kind) and not _is_from_no_form(headers):
            raise AccessError(415, "not_json", _UPLOAD if kind == _OF_UPLOADS else _NOT_JSON)

    def _knows(self, host: str) -> bool:
        return len(host) <= _MAX_HOST_CHARS and _is_known(host, self.hosts)


@lru_cache(maxsize=256)  # every request of a client asks, twice
def _is_known(host: str, hosts: tuple[str, ...]) -> bool:
    """Whether `host` may be a name of this server."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in (*hosts, _own_name()):
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
    """Whether a header is present that a page cannot send to another site without a CORS preflight.
    SDKs that upload files send one: a placeholder key that is not checked."""
    bearer = headers.get("authorization", "").lower().startswith("bearer ")
    return bearer or any(name in headers for name in ("x-api-key", "api-key"))


def _is_json(kind: str) -> bool:
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
