"""The client's address behind proxies: `X-Forwarded-For`, `Forwarded` and `X-Real-IP`.

These headers can be forged, so they are read from the connection backwards, as long as each hop is
a trusted proxy: this machine's own (HAProxy, which Serve starts on it) or one that the deployment
names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers

from cato.serve.access.addresses import is_own, plain

_FOR = re.compile(r'(?i)(?:^|[;,])\s*for\s*=\s*("[^"]*"|[^;,\s]*)')
# More hops than any real chain of proxies; the rest of a header is forged.
MAX_HOPS = 20


@dataclass(frozen=True, slots=True)
class Proxies:
    """The trusted proxies besides this machine's own."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str]) -> Proxies:
        """From addresses and networks; raise `ValueError` for anything else."""
        return cls(tuple(ip_network(name, strict=False) for name in names))

    def client(self, peer: str, headers: Headers) -> str:
        """The address of the client behind the connection from `peer`."""
        found, before = plain(peer), list(named(headers))
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
    """All addresses that the headers name, nearest last; values that are not addresses unchanged.

    A proxy appends to one of the first two headers. The chain of `X-Forwarded-For` is the nearer
    one, since HAProxy writes it.
    """
    forwarded = _FOR.findall(",".join(headers.getlist("forwarded")))
    real = headers.getlist("x-real-ip")
    listed = ",".join(headers.getlist("x-forwarded-for")).split(",")
    hops = (plain(_bare(hop)) for hop in (*(forwarded or real), *listed))
    return tuple(hop for hop in hops if hop)[-MAX_HOPS:]


def _bare(hop: str) -> str:
    """An address without quotation marks, brackets and port."""
    hop = hop.strip().strip('"').strip()
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    host, _, port = hop.rpartition(":")
    return host if host and ":" not in host and port.isdecimal() else hop
