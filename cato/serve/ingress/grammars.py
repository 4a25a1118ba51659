"""Grammars that would keep an engine's cores busy for minutes are refused before it sees them.

Bounds of size do not suffice: ten strings of `maxLength` 501 to 510 take XGrammar minutes. vLLM
limits the wait for regular expressions alone, and lets the thread go on. So what is new is compiled
here first, in a process that the kernel ends after `grammar_ms` of CPU time (decision 0036).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from hashlib import blake2b
from math import inf

from cato.core.errors import InputError, QuotaError
from cato.serve.ingress.bounds import grammar_fields, parsed_json
from cato.serve.lanes import Lane

log = logging.getLogger("cato.ingress")

WORKER = "cato.serve.grammar_worker"
# It gives way to what streams tokens on the same cores.
NICE = 10
# It may stand behind everything else on a busy machine.
ANSWER_WITHIN_S = 120.0
# A call that would wait for longer behind other grammars is refused for now.
WAIT_S = 10.0
MAX_KNOWN = 4096

_SCHEMAS = ("schema", "json", "guided_json", "parameters", "input_schema", "json_schema")
_REGEXES = ("regex", "guided_regex", "pattern")
_TEXTS = ("grammar", "guided_grammar")


def grammars_of(body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Kind (`json`, `regex`, `grammar`) and text of every grammar that `body` asks for."""
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
    """Remembers what a grammar took. A tenant has one at a time compiled: the others of a tenant
    that sends many wait behind each other, not before everybody else's."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._lane = Lane(WORKER, inf, nice=NICE, wait_s=inf, answer_within_s=ANSWER_WITHIN_S)
        self._turn = asyncio.Lock()
        self._tenants: dict[str, asyncio.Lock] = {}
        # Digest -> seconds of CPU time that it took, or took at least, and whether that is all.
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._is_possible = True

    async def check(self, body: Mapping[str, object], tenant: str, cpu_s: float) -> None:
        """Raise `InputError` when the grammars of `body` take longer than `cpu_s` to compile, and
        `QuotaError` when too many are before it."""
        if not self._is_possible or not (grammars := list(grammars_of(body))):
            return
        digest = blake2b(repr(grammars).encode("utf-8", "replace"), digest_size=16).digest()
        if not self._is_known(digest, cpu_s):
            async with self._turns(tenant):
                if not self._is_known(digest, cpu_s):
                    await self._compile(digest, grammars, cpu_s)
        took_s, is_all = self._known.get(digest, (0.0, True))
        if took_s > cpu_s or not is_all:
            field = next(field for field, _ in grammar_fields(body))
            raise InputError(
                f"{field} takes too long to compile: shorten or leave out maxLength, patterns and "
                "what repeats",
                field,
            )

    def close(self) -> None:
        self._lane.close()

    def _is_known(self, digest: bytes, cpu_s: float) -> bool:
        """Whether it took less, or is known to take more."""
        if digest not in self._known:
            return False
        self._known.move_to_end(digest)
        took_s, is_all = self._known[digest]
        return is_all or took_s >= cpu_s

    @contextlib.asynccontextmanager
    async def _turns(self, tenant: str) -> AsyncIterator[None]:
        """The turn of `tenant`, and then that of the lane."""
        own = self._tenants.setdefault(tenant, asyncio.Lock())
        held: list[asyncio.Lock] = []
        try:
            async with asyncio.timeout(self._wait_s):
                for lock in (own, self._turn):
                    await lock.acquire()
                    held.append(lock)
        except TimeoutError:
            for lock in held:
                lock.release()
            raise QuotaError("grammars at a time", self._wait_s) from None
        except asyncio.CancelledError:
            for lock in held:
                lock.release()
            raise
        try:
            yield
        finally:
            for lock in held:
                lock.release()
            if not own.locked():
                self._tenants.pop(tenant, None)

    async def _compile(self, digest: bytes, grammars: list[tuple[str, str]], cpu_s: float) -> None:
        # Shielded: who left, or was superseded, has had the work begun, and the lane does one thing
        # at a time.
        found = await asyncio.shield(self._lane.run({"grammars": grammars, "cpu_s": cpu_s}))
        if found is None:
            self._known[digest] = cpu_s, False
        elif isinstance(took_s := found.get("cpu_s"), float):
            self._known[digest] = took_s, True
        else:
            log.warning("no XGrammar here: grammars are bounded by their size alone")
            self._is_possible = False
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
