"""For whom a proxy asks: the addresses in `X-Forwarded-For`, `Forwarded` and `X-Real-IP`.

Anybody can write these headers, so the client's address is read from the connection backwards, as
long as what it comes from is a proxy that is believed: this machine's own (HAProxy, which Serve
starts on it) and those that the deployment names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers

from cato.serve.access.control import is_own

_FOR = re.compile(r'(?i)(?:^|[;,])\s*for\s*=\s*("[^"]*"|[^;,\s]*)')
# More proxies than stand in a row; the rest of a header was made up.
MAX_HOPS = 20


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies that are believed besides this machine's own."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str]) -> Proxies:
        """Of addresses and networks; raise `ValueError` for what is neither."""
        return cls(tuple(ip_network(name, strict=False) for name in names))

    def client(self, peer: str, headers: Headers) -> str:
        """The address of the client behind the connection from `peer`."""
        found, before = peer, list(named(headers))
        while before and self._believes(found):
            found = before.pop()
        return found

    def _believes(self, address: str) -> bool:
        if is_own(address):
            return True
        try:
            ip = ip_address(address)
        except ValueError:
            return False
        return any(ip in network for network in self.networks)


def named(headers: Headers) -> tuple[str, ...]:
    """All addresses that the headers name, the nearest last; what is no address as it stands.

    A proxy adds to one of the first two, so that the chain of `X-Forwarded-For` is the nearer one:
    HAProxy writes it.
    """
    forwarded = _FOR.findall(",".join(headers.getlist("forwarded")))
    real = headers.getlist("x-real-ip")
    listed = ",".join(headers.getlist("x-forwarded-for")).split(",")
    hops = (_bare(hop) for hop in (*(forwarded or real), *listed))
    return tuple(hop for hop in hops if hop)[-MAX_HOPS:]


def _bare(hop: str) -> str:
    """An address without quotation marks, brackets and port."""
    hop = hop.strip().strip('"').strip()
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    host, _, port = hop.rpartition(":")
    return host if host and ":" not in host and port.isdecimal() else hop
