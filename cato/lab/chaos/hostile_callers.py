"""Hostile callers, whose texts take a grammar minutes, and their effect on other users."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from cato.lab.chaos.clients import HANG_S, Clients, Outcome
from cato.lab.chaos.hostile import hostile_texts
from cato.lab.chaos.plan import Dialect, Hostile

# Points of on-time completions that may be lost in spells with hostile callers.
MOST_LOST = 2.0
WORKFLOW = """
name: inspect
description: What a grammar says of a text.
sla: {metric: e2e, target: 60s, deadline: 10m}
inputs: {source: {type: str}, language: {type: str}}
nodes:
  parts: {type: analyze, source: "{{ source }}", language: "{{ language }}"}
  check: {type: validate, source: "{{ source }}", language: "{{ language }}"}
  told: {type: transform, needs: [parts, check], text: "{{ parts.ok }} {{ check.checked }}"}
stream: told
output: told
"""


class HostileCallers:
    """`hostile.callers` concurrent requests, in every second spell of `hostile.spell_s`."""

    def __init__(self, hostile: Hostile, url: str) -> None:
        self._hostile = hostile
        self._url = f"{url}/v1/tasks/inspect"
        self._texts = hostile_texts()
        self._began_s = 0.0
        self._stopped = asyncio.Event()
        self.statuses: Counter[str] = Counter()
        self.longest_s = 0.0

    def stop(self) -> None:
        """Begin no more requests; `run` returns when those in progress have ended."""
        self._stopped.set()

    async def run(self) -> None:
        self._began_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=HANG_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._hostile.callers):
                group.create_task(self._ask_forever(session))

    async def _ask_forever(self, session: aiohttp.ClientSession) -> None:
        while not self._stopped.is_set():
            spell, passed_s = divmod(time.monotonic() - self._began_s, self._hostile.spell_s)
            if spell % 2 == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), self._hostile.spell_s - passed_s)
            else:
                await self._ask(session)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        language, source = next(self._texts)
        asked = {"inputs": {"source": source, "language": language}}
        began_s = time.monotonic()
        try:
            async with session.post(self._url, json=asked) as answer:
                await answer.read()
                self.statuses[str(answer.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.statuses[type(error).__name__] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def report(self, clients: Clients) -> dict[str, Any]:
        found = judged(clients.outcomes, self._hostile, self._began_s)
        if bad := {s: n for s, n in self.statuses.items() if s not in ("200", "429")}:
            found["broken"].append(f"hostile requests ended with {bad}")
        return {**found, "hostile": dict(self.statuses), "longest_s": round(self.longest_s, 2)}


def judged(outcomes: Sequence[Outcome], hostile: Hostile, began_s: float) -> dict[str, Any]:
    """On-time completions, with and without hostile callers beside them."""
    met: dict[bool, list[bool]] = {False: [], True: []}
    for outcome in outcomes:
        if outcome.dialect is Dialect.WHOLE:  # it has no first token
            continue
        spell = int((outcome.began_s - began_s) // hostile.spell_s)
        in_time = outcome.kind == "ok" and outcome.first_token_s <= hostile.slo_s
        met[spell % 2 == 1].append(in_time)
    alone, beside = (100 * sum(met[k]) / max(1, len(met[k])) for k in (False, True))
    broken = []
    if not all(met.values()):
        broken.append("no completions to compare")
    elif alone - beside > MOST_LOST:
        broken.append(f"{alone - beside:.1f} points of completions were lost to hostile requests")
    return {
        "completions": {"alone": len(met[False]), "beside": len(met[True])},
        "attainment": {"alone": round(alone / 100, 4), "beside": round(beside / 100, 4)},
        "broken": broken,
    }
