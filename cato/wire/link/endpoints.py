"""Opens links: Unix sockets within a host, TCP between hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cato.core.errors import LinkError
from cato.wire.link.codec import Codec
from cato.wire.link.connection import Connection, Frames, Handler

# Time limit to connect to a peer in the same cluster.
CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process on `host` accepts links: `socket` within the host, else `ip` and `port`."""

    host: str
    socket: str
    ip: str
    port: int


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of this process's certificate, key and CA; both ends present a certificate."""

    certificate: str
    key: str
    authority: str

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=self.authority)
        context.load_cert_chain(self.certificate, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        context.check_hostname = False  # Ray's certificates name no hosts; the CA is private
        return context


class Listener:
    """Accepts links until it is closed, and serves all of them with one handler.

    `frames` counts those of all its links.
    """

    def __init__(self, address: Address, servers: list[asyncio.Server], frames: Frames) -> None:
        self.address = address
        self.frames = frames
        self._servers = servers

    def close(self) -> None:
        for server in self._servers:
            server.close()
        Path(self.address.socket).unlink(missing_ok=True)


async def listen(
    codec: Codec,
    secret: bytes,
    handler: Handler,
    *,
    name: str,
    host: str,
    ip: str,
    folder: Path,
    tls: Tls | None = None,
) -> Listener:
    """Accept links at a socket in `folder`, which is created for this user only, and at `ip`.

    Raise OSError; nothing is then left open.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    _forget_sockets_of_the_dead(folder)
    frames = Frames()
    made = partial(Connection, codec, secret, handler, name, is_server=True, frames=frames)
    loop = asyncio.get_running_loop()
    path = str(folder / f"{os.getpid()}-{secrets.token_hex(4)}")
    context = None if tls is None else tls.context(is_server=True)
    local = await loop.create_unix_server(made, path)
    try:
        remote = await loop.create_server(made, ip, 0, ssl=context)
    except BaseException:
        local.close()
        Path(path).unlink(missing_ok=True)
        raise
    port: int = remote.sockets[0].getsockname()[1]
    return Listener(Address(host, path, ip, port), [local, remote], frames)


def _forget_sockets_of_the_dead(folder: Path) -> None:
    """Remove sockets left by killed processes; a socket's name begins with its process id."""
    for path in folder.iterdir():
        pid, _, _ = path.name.partition("-")
        if not pid.isdecimal():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:
            continue


async def connect(
    address: Address,
    codec: Codec,
    secret: bytes,
    handler: Handler,
    *,
    name: str,
    host: str,
    tls: Tls | None = None,
) -> Connection:
    """Open a link to `name` at `address` from a process on `host`; raise `LinkError`."""
    made = partial(Connection, codec, secret, handler, name, is_server=False)
    loop = asyncio.get_running_loop()
    connection: Connection | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            if address.host == host:
                _, connection = await loop.create_unix_connection(made, address.socket)
            else:
                context = None if tls is None else tls.context(is_server=False)
                _, connection = await loop.create_connection(
                    made, address.ip, address.port, ssl=context
                )
            await connection.opened()
    except (OSError, TimeoutError) as error:
        if connection is not None:
            connection.close("it did not answer")
        raise LinkError(name, f"no connection: {error!r}") from error
    except BaseException:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close("the caller stopped waiting")
        raise
    return connection
