"""Addresses of clients: which belong to this machine."""

from __future__ import annotations

import ipaddress
import socket
from functools import lru_cache
from socket import AddressFamily


def plain(address: str) -> str:
    """An IPv4 address as such, also where a socket for both kinds calls it `::ffff:10.0.0.1`."""
    if not address.startswith("::"):
        return address
    try:
        mapped = ipaddress.IPv6Address(address).ipv4_mapped
    except ValueError:
        return address
    return address if mapped is None else str(mapped)


def is_loopback(address: str) -> bool:
    """Whether `address` can be reached only from this machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain(address.strip().strip("[]"))).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=256)
def is_own(address: str) -> bool:
    """Whether `address` belongs to this machine, tested by binding a socket to it."""
    if is_loopback(address):
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    with socket.socket(AddressFamily.AF_INET6 if ip.version == 6 else AddressFamily.AF_INET) as s:
        try:
            s.bind((address, 0))
        except OSError:
            return False
    return not ip.is_unspecified
