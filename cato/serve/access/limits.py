"""What a tenant may still ask for: requests and tokens a minute, tokens a month.

Every ingress replica keeps its own buckets, with its share of a tenant's rates. A run takes the
tokens that it is expected to use when it begins, and the difference when it has ended: a bucket may
sink below zero, and nothing new begins until it has filled up to zero again. That moment is what
`Retry-After` says. Of a month's budget a run reserves the most that it may use.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cato.core.tenancy import Tenant

BURST_S = 10.0
"""A bucket holds what flows in within this time: a burst of that much passes at once."""


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate_per_s` up to `capacity`; full at first. Moments are of one clock."""

    rate_per_s: float
    capacity: float
    level: float
    at_s: float

    @classmethod
    def of(cls, per_minute: float, now_s: float) -> TokenBucket:
        rate_per_s = per_minute / 60
        capacity = max(1.0, rate_per_s * BURST_S)
        return cls(rate_per_s, capacity, capacity, now_s)

    def wait_s(self, now_s: float, needed: float) -> float:
        """How long until the bucket holds `needed`, if nobody takes any; 0 when it does now."""
        self._fill(now_s)
        return max(0.0, (needed - self.level) / self.rate_per_s)

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`, below zero if it must be."""
        self._fill(now_s)
        self.level -= amount

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self.at_s) * self.rate_per_s
        self.level, self.at_s = min(self.capacity, self.level + gained), now_s


@dataclass(frozen=True, slots=True)
class Left:
    """A tenant's rates a minute, what of them may be used at once, and how long until all of that
    can be again; None where there is no limit."""

    requests: tuple[int, int, float] | None
    tokens: tuple[int, int, float] | None


class TenantLimits:
    """The buckets of one tenant in one ingress replica that has `share` of its requests."""

    def __init__(self, tenant: Tenant, share: float, now_s: float) -> None:
        self.tenant = tenant
        self._share = share
        self._requests = _bucket(tenant.requests_per_minute, share, now_s)
        self._tokens = _bucket(tenant.tokens_per_minute, share, now_s)

    def wait_s(self, now_s: float) -> tuple[float, str]:
        """How long until one more request may begin, and what it waits for; 0 when it may now."""
        waits = [(0.0, "")]
        if self._requests is not None:
            waits.append((self._requests.wait_s(now_s, 1.0), "requests per minute"))
        if self._tokens is not None:
            waits.append((self._tokens.wait_s(now_s, 0.0), "tokens per minute"))
        return max(waits)

    def left(self, now_s: float) -> Left:
        """Of all replicas together, as far as this one can tell."""

        def of(bucket: TokenBucket | None, rate: int | None) -> tuple[int, int, float] | None:
            if bucket is None or rate is None:
                return None
            full_in_s = bucket.wait_s(now_s, bucket.capacity)
            return rate, max(0, math.floor(bucket.level / self._share)), full_in_s

        return Left(
            of(self._requests, self.tenant.requests_per_minute),
            of(self._tokens, self.tenant.tokens_per_minute),
        )

    def begin(self, now_s: float, requests: int) -> None:
        """So many begin at once; the bucket may sink below zero for all but the first."""
        if self._requests is not None:
            self._requests.take(now_s, float(requests))

    def spend(self, now_s: float, tokens: int) -> None:
        """A run uses `tokens`; fewer than none were not used after all."""
        if self._tokens is not None:
            self._tokens.take(now_s, float(tokens))


class Reserved:
    """What runs under way may use of their tenants' budgets in one ingress replica.

    What a run has used stays reserved for as long as the store may not have told of it.
    """

    TOLD_WITHIN_S = 5.0

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._ended: deque[tuple[float, str, int]] = deque()

    def of(self, tenant: str, now_s: float) -> int:
        while self._ended and self._ended[0][0] <= now_s:
            _, whose, used = self._ended.popleft()
            self.add(whose, -used)
        return self._tokens.get(tenant, 0)

    def add(self, tenant: str, tokens: int) -> None:
        left = self._tokens.pop(tenant, 0) + tokens
        if left:
            self._tokens[tenant] = left

    def settle(self, tenant: str, reserved: int, used: int, now_s: float) -> None:
        """A run that had `reserved` tokens has ended and used others."""
        self.add(tenant, used - reserved)
        if used:
            self._ended.append((now_s + self.TOLD_WITHIN_S, tenant, used))
        self.of(tenant, now_s)


class EventLimits:
    """How many events each API key may tell in one ingress replica, that of no key included.

    A team of 100 that accepts a completion every second each stays below it.
    """

    PER_MINUTE = 12_000

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, key: str, now_s: float) -> float:
        """Count one event of `key`; how long it must wait, 0 when it was counted. Keys are known
        ones, so that there are not more of them than the store has."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket.of(self.PER_MINUTE, now_s)
        wait_s = bucket.wait_s(now_s, 1.0)
        if wait_s == 0:
            bucket.take(now_s, 1.0)
        return wait_s


def _bucket(per_minute: int | None, share: float, now_s: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket.of(per_minute * share, now_s)


def until_next_month_s(now_s: float) -> float:
    """From `now_s`, in seconds since the epoch, to the end of its month in UTC."""
    now = datetime.fromtimestamp(now_s, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return (following - now).total_seconds()
