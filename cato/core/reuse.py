"""Answer reuse: detects identical calls, and keeps answers for a while.

Off unless a deployment enables it: the memory holds text of answers (never on disk).
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# Identify the caller. Unless answers repeat these fields, no answer depends on them.
OF_THE_CALLER = frozenset(
    {"user", "metadata", "client_metadata", "safety_identifier", "prompt_cache_key", "request_id"}
)


@dataclass(frozen=True, slots=True)
class ReuseLimits:
    """Limits of reuse; identical calls in flight share one answer.

    Completions are kept for `age_s`, up to `tenant_bytes` per tenant and `total_bytes` in all; 0
    keeps none.
    """

    tenant_bytes: int = 0
    total_bytes: int = 0
    age_s: float = 600.0


def is_deterministic(body: Mapping[str, object]) -> bool:
    """Whether a repeated call gets the same answer: greedy or seeded, and only one answer."""
    temperature, seed = body.get("temperature"), body.get("seed")
    is_greedy = _is_number(temperature) and temperature == 0
    is_seeded = isinstance(seed, int) and not isinstance(seed, bool)
    is_one = all(body.get(name) in (None, 1) for name in ("n", "best_of"))
    return (is_greedy or is_seeded) and is_one


def reuse_key(
    parts: Sequence[object], body: Mapping[str, object], but: Collection[str] = OF_THE_CALLER
) -> bytes:
    """A key for everything that a call's answer depends on.

    `parts` (owner, model, dialect, form) and its body without the fields of `but`.
    """
    asked = {name: value for name, value in body.items() if name not in but}
    text = json.dumps([*parts, asked], sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    value: T
    size: int
    at_s: float


@dataclass(slots=True, eq=False)
class AnswerMemory(Generic[T]):
    """Answers by tenant and key.

    The least recently used answer goes first: of a tenant over its limit, or, when the total is
    over the limit, of the tenant with the most bytes.
    """

    limits: ReuseLimits
    _kept: dict[str, OrderedDict[bytes, _Kept[T]]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _total: int = 0

    def size(self, tenant: str | None = None) -> int:
        """Bytes stored, for one tenant or in total."""
        return self._total if tenant is None else self._sizes.get(tenant, 0)

    def get(self, tenant: str, key: bytes, now_s: float) -> tuple[T, float] | None:
        """An answer and its age; None if there is none that is young enough."""
        mine = self._kept.get(tenant)
        kept = None if mine is None else mine.get(key)
        if mine is None or kept is None:
            return None
        age_s = now_s - kept.at_s
        if age_s > self.limits.age_s:
            self._forget(tenant, key)
            return None
        mine.move_to_end(key)
        return kept.value, age_s

    def put(self, tenant: str, key: bytes, value: T, size: int, now_s: float) -> None:
        """Store an answer, unless it is too large for its tenant's limit."""
        self._forget(tenant, key)
        if size > min(self.limits.tenant_bytes, self.limits.total_bytes):
            return
        self._kept.setdefault(tenant, OrderedDict())[key] = _Kept(value, size, now_s)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self._total += size
        while self._sizes[tenant] > self.limits.tenant_bytes:
            self._forget_oldest(tenant)
        while self._total > self.limits.total_bytes:
            self._forget_oldest(max(self._sizes, key=lambda t: (self._sizes[t], t)))

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._kept[tenant])))

    def _forget(self, tenant: str, key: bytes) -> None:
        mine = self._kept.get(tenant)
        kept = None if mine is None else mine.pop(key, None)
        if mine is None or kept is None:
            return
        self._total -= kept.size
        self._sizes[tenant] -= kept.size
        if not mine:
            del self._kept[tenant], self._sizes[tenant]
