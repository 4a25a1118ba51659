"""Refuses grammars whose compilation would keep an engine's cores busy for minutes.

Size limits are not enough: ten strings of `maxLength` 501 to 510 take XGrammar minutes. vLLM limits
the wait for regular expressions only, and lets the thread run on. So each new grammar is compiled
here first, in a process that the kernel ends after `grammar_ms` of CPU time (decision 0036).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from hashlib import blake2b
from math import inf

from cato.core.errors import InputError, QuotaError
from cato.serve.ingress.bounds import grammar_fields, parsed_json
from cato.serve.lanes import Lane

log = logging.getLogger("cato.ingress")

WORKER = "cato.serve.grammar_worker"
# Lower priority than the processes that stream tokens on the same cores.
NICE = 10
# On a busy machine it runs after everything else.
ANSWER_WITHIN_S = 120.0
# A call that waits longer than this for other grammars is refused.
WAIT_S = 10.0
MAX_KNOWN = 4096

_SCHEMAS = ("schema", "json", "guided_json", "parameters", "input_schema", "json_schema")
_REGEXES = ("regex", "guided_regex", "pattern")
_TEXTS = ("grammar", "guided_grammar")


def grammars_of(body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Kind (`json`, `regex`, `grammar`) and text of every grammar in `body`."""
    waiting = [(field, value) for field, value in grammar_fields(body)]
    while waiting:
        key, value = waiting.pop()
        if key == "structural_tag" and isinstance(value, str):
            value = parsed_json(value, key)
        is_wrapped = key == "json_schema" and isinstance(value, Mapping) and "schema" in value
        if key in _SCHEMAS and not is_wrapped and isinstance(value, Mapping | str):
            yield "json", value if isinstance(value, str) else json.dumps(value)
        elif key in _REGEXES and isinstance(value, str):
            yield "regex", value
        elif key in _TEXTS and isinstance(value, str):
            yield "grammar", value
        elif isinstance(value, Mapping):
            waiting += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            waiting += [("", v) for v in value]


class Grammars:
    """Remembers the compile time of each grammar. Each tenant compiles one at a time, so that a
    tenant that sends many delays itself, not others."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._lane = Lane(WORKER, inf, nice=NICE, wait_s=inf, answer_within_s=ANSWER_WITHIN_S)
        self._turn = asyncio.Lock()
        self._tenants: dict[str, asyncio.Lock] = {}
        # Requests of each tenant that have or await its lock.
        self._asking: Counter[str] = Counter()
        # Digest -> CPU seconds used, and whether compilation finished within them.
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._is_possible = True

    async def check(self, body: Mapping[str, object], tenant: str, cpu_s: float) -> None:
        """Raise `InputError` if the grammars of `body` take longer than `cpu_s` to compile, and
        `QuotaError` if too many others are queued."""
        if not self._is_possible or not (grammars := list(grammars_of(body))):
            return
        digest = blake2b(repr(grammars).encode("utf-8", "replace"), digest_size=16).digest()
        if not self._is_known(digest, cpu_s):
            async with contextlib.AsyncExitStack() as turn:
                await turn.enter_async_context(self._turns(tenant))
                if not self._is_known(digest, cpu_s):
                    compiling = self._compile(turn.pop_all(), digest, grammars, cpu_s)
                    # The lane finishes a job whose client has left or is superseded.
                    await asyncio.shield(compiling)
        took_s, is_all = self._known.get(digest, (0.0, True))
        if took_s > cpu_s or not is_all:
            field = next(field for field, _ in grammar_fields(body))
            raise InputError(
                f"{field} takes too long to compile; reduce or remove maxLength, patterns and "
                "repetitions",
                field,
            )

    def close(self) -> None:
        self._lane.close()

    def _is_known(self, digest: bytes, cpu_s: float) -> bool:
        """Whether its compile time is known well enough to decide about `cpu_s`."""
        if digest not in self._known:
            return False
        self._known.move_to_end(digest)
        took_s, is_all = self._known[digest]
        return is_all or took_s >= cpu_s

    @contextlib.asynccontextmanager
    async def _turns(self, tenant: str) -> AsyncIterator[None]:
        """Hold the lock of `tenant`, then the lane's."""
        own = self._tenants.setdefault(tenant, asyncio.Lock())
        self._asking[tenant] += 1
        held: list[asyncio.Lock] = []
        try:
            try:
                async with asyncio.timeout(self._wait_s):
                    for lock in (own, self._turn):
                        await lock.acquire()
                        held.append(lock)
            except TimeoutError:
                raise QuotaError("grammars at a time", self._wait_s) from None
            yield
        finally:
            for lock in held:
                lock.release()
            self._asking[tenant] -= 1
            # A lock that was just released is not locked, although others wait for it.
            if not self._asking[tenant]:
                del self._asking[tenant], self._tenants[tenant]

    async def _compile(
        self,
        turn: contextlib.AsyncExitStack,
        digest: bytes,
        grammars: list[tuple[str, str]],
        cpu_s: float,
    ) -> None:
        """Compile with this `turn`, which ends with it."""
        async with turn:
            found = await self._lane.run({"grammars": grammars, "cpu_s": cpu_s})
            if found is None:
                self._known[digest] = cpu_s, False
            elif isinstance(took_s := found.get("cpu_s"), float):
                self._known[digest] = took_s, True
            else:
                log.warning(
                    "XGrammar is not installed: grammars are limited by size only, not by compile "
                    "time"
                )
                self._is_possible = False
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
