"""Tenant limits: requests and tokens per minute, tokens per month.

Every ingress replica has its own token buckets with its share of a tenant's rates. A run takes its
expected tokens when it begins and settles the difference when it ends. A bucket may go below zero;
then nothing new begins until it is back at zero, which is the moment in `Retry-After`. A run
reserves the maximum that it may use from the monthly budget.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cato.core.tenancy import Tenant

BURST_S = 10.0
"""Bucket capacity, as seconds of its fill rate: a burst of this size passes at once."""


@dataclass(slots=True)
class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`; starts full. All times are of one clock."""

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
        """How long until the bucket holds `needed` if nothing is taken; 0 if it does now."""
        self._fill(now_s)
        return max(0.0, (needed - self.level) / self.rate_per_s)

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`; the level may go below zero."""
        self._fill(now_s)
        self.level -= amount

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self.at_s) * self.rate_per_s  # clocks may be set back
        self.level, self.at_s = min(self.capacity, self.level + gained), now_s


@dataclass(frozen=True, slots=True)
class Left:
    """Per limit: rate per minute, how much may be used now, and seconds until the bucket is full.
    None: no limit."""

    requests: tuple[int, int, float] | None
    tokens: tuple[int, int, float] | None


class TenantLimits:
    """One tenant's buckets in an ingress replica that gets `share` of the requests."""

    def __init__(self, tenant: Tenant, share: float, now_s: float) -> None:
        self.tenant = tenant
        self._share = share
        self._requests = _bucket(tenant.requests_per_minute, share, now_s)
        self._tokens = _bucket(tenant.tokens_per_minute, share, now_s)

    def wait_s(self, now_s: float) -> tuple[float, str]:
        """How long until another request may begin, and the limit it waits for; 0 if now."""
        waits = [(0.0, "")]
        if self._requests is not None:
            waits.append((self._requests.wait_s(now_s, 1.0), "requests per minute"))
        if self._tokens is not None:
            waits.append((self._tokens.wait_s(now_s, 0.0), "tokens per minute"))
        return max(waits)

    def left(self, now_s: float) -> Left:
        """What is left over all ingress replicas, estimated from this one."""

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
        """Count `requests` that begin together; the bucket may go below zero."""
        if self._requests is not None:
            self._requests.take(now_s, float(requests))

    def spend(self, now_s: float, tokens: int) -> None:
        """Count `tokens` of a run; a negative number gives tokens back."""
        if self._tokens is not None:
            self._tokens.take(now_s, float(tokens))


class Reserved:
    """Tokens reserved from monthly budgets by running runs of one ingress replica.

    Tokens that a run has used stay reserved until the store's total is sure to include them.
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
        """A run that had `reserved` tokens has ended and `used` some."""
        self.add(tenant, used - reserved)
        if used:
            self._ended.append((now_s + self.TOLD_WITHIN_S, tenant, used))
        self.of(tenant, now_s)


class EventLimits:
    """Rate limit of feedback events per API key (and for no key) in one ingress replica.

    A team of 100 people who each accept a completion every second stays below it.
    """

    PER_MINUTE = 12_000

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, key: str, now_s: float) -> float:
        """Count one event of `key`; return 0, or the wait in seconds if it is over the limit. Only
        known keys get here, which bounds the number of buckets."""
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
