"""Authentication of links: both ends prove that they know the pool's secret without revealing it.

The server sends a random challenge; the client replies with its own challenge and an HMAC of both;
the server replies with another HMAC of both. The HMACs also cover the version of the messages, so
that processes of different releases do not connect.
"""

from __future__ import annotations

import hmac
import os

NONCE_BYTES = 32


class Refused(Exception):
    """The other end has a different secret or version."""


class Handshake:
    """One end of the handshake. Feed it each message of the other end. Pure except for the random
    challenge."""

    def __init__(self, secret: bytes, version: bytes, *, is_server: bool) -> None:
        self.is_done = False
        self._secret, self._version, self._is_server = secret, version, is_server
        self._mine = os.urandom(NONCE_BYTES)
        self._both = b""

    def opening(self) -> bytes | None:
        """The first message to send; None: wait for the other end."""
        return self._mine if self._is_server else None

    def step(self, message: bytes) -> bytes | None:
        """Take a message and return the reply, if there is one. Raise `Refused`."""
        if self._is_server:
            theirs = message[:NONCE_BYTES]
            self._both = self._mine + theirs
            self._check(b"client", message[NONCE_BYTES:])
            self.is_done = True
            return self._mac(b"server")
        if not self._both:
            if len(message) != NONCE_BYTES:
                raise Refused
            self._both = message + self._mine
            return self._mine + self._mac(b"client")
        self._check(b"server", message)
        self.is_done = True
        return None

    def _mac(self, whose: bytes) -> bytes:
        return hmac.digest(self._secret, whose + self._both + self._version, "sha256")

    def _check(self, whose: bytes, mac: bytes) -> None:
        if not hmac.compare_digest(self._mac(whose), mac):
            raise Refused
