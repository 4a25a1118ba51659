"""One router over its links: calls per second on one core, and its CPU time per call.

The router is the actor's object in a process of its own, without Ray. This process is its ingress
and its only replica: every call is an offer, a lease, and the notes of its first token and its end,
as frames over Unix sockets. The replica's tokens take no time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import uvloop

from cato.config.paths import resolve
from cato.control.messages import CODEC, Joined, Leased, Offer
from cato.control.router import ReplicaRouter
from cato.core.events import FirstTokenSent, InvocationEnded, ReplicaReported
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.profiles.load import load_profile
from cato.sim.workloads import belief
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Address, connect, listen

POOL, REPLICA = PoolName("bench"), ReplicaId("bench-0")
PROFILE = "profiles/zero@none.yaml"
SECRET = b"the secret of this benchmark...."
OUTSTANDING, CALLS, ROUNDS, WARM_UP = 64, 4_000, 5, 1_000
OUTPUT_TOKENS = 16
REPORT_S = 0.5
# 5,000 calls a second of one core.
CPU_GOAL_US = 200.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterAlone:
    """`cpu_ns` is the router's CPU time per call, by round. `calls_per_s` is by wall time, which
    other work on the machine and the process that makes the calls limit too."""

    cpu_ns: tuple[float, ...]
    calls_per_s: float


def measured() -> RouterAlone:
    """Start a router, and make `ROUNDS` times `CALLS` calls, `OUTSTANDING` at a time."""
    with tempfile.TemporaryDirectory(prefix="cato-r-") as folder, _router(Path(folder)) as pid:
        found = uvloop.run(_measured(Path(folder), pid))
    cpu_s, wall_s = zip(*found, strict=True)
    return RouterAlone(tuple(1e9 * s / CALLS for s in cpu_s), CALLS / median(wall_s))


@contextmanager
def _router(folder: Path) -> Iterator[int]:
    """A router in a process of its own; yields its process id."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(str(folder),), daemon=True)
    process.start()
    deadline_s = time.monotonic() + _START_S
    while not (folder / "path").exists():
        if not process.is_alive() or time.monotonic() > deadline_s:
            raise TimeoutError("the router of the benchmark did not start")
        time.sleep(0.05)
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def _serve(folder: str) -> None:
    async def forever() -> None:
        router = ReplicaRouter(POOL, PoolPolicies(), load_profile(resolve(PROFILE)))
        found = await listen(
            CODEC, SECRET, router.links, name="bench", host="a", ip="127.0.0.1",
            folder=Path(folder) / "links",
        )  # fmt: skip
        path = Path(folder) / "path"
        path.with_suffix(".new").write_text(found.address.socket)
        path.with_suffix(".new").rename(path)
        await asyncio.Event().wait()

    uvloop.run(forever())


class _Heard(Passive):
    """A peer that expects no calls; the router's notes do not matter here."""

    def note(self, peer: Connection, note: object) -> None:
        pass


async def _measured(folder: Path, pid: int) -> list[tuple[float, float]]:
    """CPU seconds of the router and wall seconds of each round."""
    address = Address("a", (folder / "path").read_text(), "", 0)

    async def link() -> Connection:
        return await connect(address, CODEC, SECRET, _Heard(), name="bench", host="a")

    ingress, replica = await link(), await link()
    reporting = asyncio.ensure_future(_report(replica))
    found = []
    try:
        await _round(ingress, replica, "warm-up", WARM_UP)
        for number in range(ROUNDS):
            began_s, cpu_s = time.perf_counter(), _cpu_s(pid)
            await _round(ingress, replica, f"round-{number}", CALLS)
            found.append((_cpu_s(pid) - cpu_s, time.perf_counter() - began_s))
    finally:
        reporting.cancel()
    return found


async def _report(replica: Connection) -> None:
    """Report the replica as live replicas do."""
    profile = load_profile(resolve(PROFILE))
    replica.note(Joined(REPLICA, Address("a", "", "", 0)))
    deployment = DeploymentName("bench")
    while True:
        replica.note(ReplicaReported(0.0, REPLICA, deployment, profile, OUTSTANDING, 0, True, ()))
        await asyncio.sleep(REPORT_S)


async def _round(ingress: Connection, replica: Connection, name: str, calls: int) -> None:
    numbers = iter(range(calls))

    async def client() -> None:
        for number in numbers:
            invocation = replace(_CALL, id=InvocationId(f"{name}-{number}.0"))
            leased: Leased = await ingress.ask(Offer(invocation))
            id, attempt = leased.dispatch.invocation_id, leased.dispatch.attempt
            replica.note(FirstTokenSent(0.0, id))
            replica.note(InvocationEnded(0.0, id, attempt, OUTPUT_TOKENS, "done", 0, 300))

    await asyncio.gather(*(client() for _ in range(OUTSTANDING)))


_CALL = Invocation(
    InvocationId(""),
    RunId("req-0123456789abcdef"),
    TaskName("code_completion"),
    NodeId("complete"),
    prompt_tokens=300,
    expected_tokens=OUTPUT_TOKENS,
    arrived_at_s=0.0,
    deadline_s=2.0,
    until_first_token=True,
    draw=0.5,
    length=belief(OUTPUT_TOKENS),
)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
