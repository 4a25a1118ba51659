"""Lease latency over each transport that links could use.

`python -m cato.lab.bench.transports` compares them.

Each echoes an offer from another process over a Unix socket, one call at a time and 64 at a
time. grpc.aio comes with Ray; pyzmq, and msgspec for the codec, with vLLM.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import uvloop
import zmq
import zmq.asyncio

from cato.core.ids import InvocationId, NodeId, RunId, TaskName
from cato.core.length import LengthBelief
from cato.core.snapshot import Invocation
from cato.wire.link.codec import Codec
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Address, connect, listen

CODEC = Codec((Invocation, LengthBelief))
SECRET = b"the secret of this benchmark"
ROUNDS, CALLS, TOGETHER = 5, 2000, 64
METHOD = "/bench/Offer"

Ask = Callable[[Invocation], Awaitable[Any]]


def _invocation(id: str) -> Invocation:
    return Invocation(
        id=InvocationId(id),
        run_id=RunId(f"run-{id}"),
        task=TaskName("t"),
        node=NodeId("n"),
        prompt_tokens=100,
        expected_tokens=50,
        arrived_at_s=0.0,
        deadline_s=10.0,
        downstream_s=0.0,
        until_first_token=False,
        draw=0.0,
    )


class _Echo(Passive):
    async def answer(self, peer: Connection, asked: object) -> object:
        return asked


async def _serve_link(folder: Path) -> None:
    found = await listen(
        CODEC, SECRET, _Echo(), name="bench", host="a", ip="127.0.0.1", folder=folder / "links"
    )
    (folder / "path").write_text(found.address.socket)


@asynccontextmanager
async def _link(folder: Path) -> AsyncIterator[Ask]:
    address = Address("a", (folder / "path").read_text(), "", 0)
    link = await connect(address, CODEC, SECRET, Passive(), name="bench", host="a")
    yield link.ask
    link.close("done")


async def _serve_grpc(folder: Path) -> None:
    async def echo(asked: Invocation, _: object) -> Invocation:
        return asked

    method = grpc.unary_unary_rpc_method_handler(echo, CODEC.unpack, CODEC.pack)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench", {"Offer": method}),)
    )
    server.add_insecure_port(f"unix:{folder}/grpc")
    await server.start()
    (folder / "path").write_text("grpc")
    await server.wait_for_termination()


@asynccontextmanager
async def _grpc(folder: Path) -> AsyncIterator[Ask]:
    async with grpc.aio.insecure_channel(f"unix:{folder}/grpc") as channel:
        yield channel.unary_unary(METHOD, CODEC.pack, CODEC.unpack)


async def _serve_zmq(folder: Path) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{folder}/zmq")
    (folder / "path").write_text("zmq")
    while True:
        who, number, asked = await socket.recv_multipart()
        await socket.send_multipart((who, number, CODEC.pack(CODEC.unpack(asked))))


@asynccontextmanager
async def _zmq(folder: Path) -> AsyncIterator[Ask]:
    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/zmq")
    waiting: dict[int, asyncio.Future[Any]] = {}
    count = 0

    async def read() -> None:
        while True:
            number, answer = await socket.recv_multipart()
            waiting.pop(int.from_bytes(number, "big")).set_result(CODEC.unpack(answer))

    async def ask(offer: Invocation) -> Any:
        nonlocal count
        count += 1
        answer = waiting[count] = asyncio.get_running_loop().create_future()
        await socket.send_multipart((count.to_bytes(8, "big"), CODEC.pack(offer)))
        return await answer

    reading = asyncio.ensure_future(read())
    yield ask
    reading.cancel()
    socket.close(0)


TRANSPORTS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "frames": (_serve_link, _link),
    "grpc.aio": (_serve_grpc, _grpc),
    "pyzmq": (_serve_zmq, _zmq),
}


def _serve(name: str, folder: str) -> None:
    async def forever() -> None:
        await TRANSPORTS[name][0](Path(folder))
        await asyncio.Event().wait()

    uvloop.run(forever())


async def _round(ask: Ask, together: int) -> list[float]:
    """Seconds of each of `CALLS` calls."""
    took: list[float] = []

    async def client(calls: int) -> None:
        for number in range(calls):
            began_s = time.perf_counter()
            await ask(_invocation(f"req-0123456789abcdef.{number}"))
            took.append(time.perf_counter() - began_s)

    await asyncio.gather(*(client(CALLS // together) for _ in range(together)))
    return took


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of this process and another one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / 100


async def _measure(folders: dict[str, Path], pids: dict[str, int | None]) -> None:
    rows: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(ROUNDS):  # in turns: the machine is shared
        for name, folder in folders.items():
            async with TRANSPORTS[name][1](folder) as ask:
                await _round(ask, 1)
                for together in (1, TOGETHER):
                    before_s, began_s = _cpu_s(pids[name]), time.perf_counter()
                    took = await _round(ask, together)
                    spent_s = time.perf_counter() - began_s
                    cpu_s = _cpu_s(pids[name]) - before_s
                    row = (statistics.median(took), cpu_s / len(took), len(took) / spent_s)
                    rows.setdefault((name, together), []).append(row)
    print(f"{'':10}{'at a time':>10}{'p50 µs':>9}{'CPU µs a call':>15}{'calls/s':>9}")
    for (name, together), found in rows.items():
        p50_s, cpu_s, rate = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:10}{together:>10}{p50_s * 1e6:>9.0f}{cpu_s * 1e6:>15.0f}{rate:>9.0f}")


def _codecs() -> None:
    """The same offer in msgpack with CATO's types, and in msgspec."""
    offer = _invocation("req-0123456789abcdef")
    decoder = msgspec.msgpack.Decoder(Invocation)
    for name, pack, unpack in (
        ("msgpack", CODEC.pack, CODEC.unpack),
        ("msgspec", msgspec.msgpack.encode, decoder.decode),
    ):
        data = pack(offer)
        took = []
        for work in (partial(pack, offer), partial(unpack, data)):
            began_s = time.perf_counter()
            for _ in range(20_000):
                work()
            took.append((time.perf_counter() - began_s) / 20_000 * 1e6)
        print(f"{name}: {len(data)} B, {took[0]:.1f} µs to pack, {took[1]:.1f} µs to unpack")


def main() -> None:
    """Print the table."""
    _codecs()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="cato-t-") as top:
        folders, servers = {}, {}
        for name in TRANSPORTS:
            folders[name] = folder = Path(top) / name
            folder.mkdir()
            servers[name] = context.Process(target=_serve, args=(name, str(folder)), daemon=True)
            servers[name].start()
        while not all((folder / "path").exists() for folder in folders.values()):
            time.sleep(0.1)
        try:
            uvloop.run(_measure(folders, {name: server.pid for name, server in servers.items()}))
        finally:
            for server in servers.values():
                server.kill()


if __name__ == "__main__":
    main()
