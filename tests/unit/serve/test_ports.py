"""Ports are given once, also across processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cato.serve.ports import BLOCK, PORTS, Ports


def test_each_port_is_given_once() -> None:
    ports = Ports()
    runs = [ports.take(count) for count in (1, 100, 1, 19, 100)]
    counted = [
        port
        for first, count in zip(runs, (1, 100, 1, 19, 100), strict=True)
        for port in range(first, first + count)
    ]
    assert len(set(counted)) == len(counted)
    assert set(counted) <= set(PORTS)


def test_other_processes_get_other_ports() -> None:
    ports = Ports()
    mine = {ports.take(1) for _ in range(3 * BLOCK)}
    program = (
        f"from cato.serve.ports import free_port\nprint(*(free_port() for _ in range({3 * BLOCK})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert len(mine) == 3 * BLOCK
    assert not mine & {int(port) for port in ran.stdout.split()}


def test_a_port_in_use_is_not_given() -> None:
    ports = Ports()
    first = ports.take(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 1))
        assert ports.take(1) == first + 2


def test_without_names_to_claim_ports_are_given_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ports, "_claim", lambda ports, first: False)
    assert Ports().take(100) in PORTS


def test_more_ports_in_a_row_than_a_block_has_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 120 ports in a row, not 121"):
        Ports().take(BLOCK + 1)
