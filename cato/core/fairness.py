"""Shares of a pool by tenant: a counter of the tokens that each was served (Sheng et al., 2024).

The Virtual Token Counter of "Fairness in Serving Large Language Models" (OSDI 2024): a tenant's
counter grows by what it is served, prompt tokens once and output tokens twice, over its weight; one
that comes back is lifted to those that wait, so that nobody saves up a claim by asking for nothing.
There the smallest counter always goes first. Here it does so only when another is ahead of it by
more than half of `CREDIT_TOKENS`: within that, the pool's own order decides, which knows deadlines.
Only who waits is compared, so what nobody else wants is anybody's.
"""

from __future__ import annotations

from math import inf

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
# How far a tenant that comes back may be behind the others. Some ten long calls: enough to protect
# a burst of it, too little to keep others out for long.
CREDIT_TOKENS = 40_000.0


class TokenShares:
    """The counters. Deterministic; the pool tells what waits and what is served."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._last_left = 0.0  # the counter of the tenant that stopped waiting last

    @property
    def tenants_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self, tenant: str) -> int:
        return self._waiting.get(tenant, 0)

    def served(self, tenant: str) -> float:
        """Weighted tokens that `tenant` was served, or was lifted to."""
        return self._served.get(tenant, 0.0)

    def joined(self, tenant: str) -> None:
        """One more call of `tenant` waits."""
        if tenant not in self._waiting:
            others = min((self.served(t) for t in self._waiting), default=self._last_left)
            self._served[tenant] = max(self.served(tenant), others - CREDIT_TOKENS)
        self._waiting[tenant] = self.waiting(tenant) + 1

    def passed(self, tenant: str) -> None:
        """As `joined` and `left`, for a call that is served at once while nobody waits."""
        served = max(self.served(tenant), self._last_left - CREDIT_TOKENS)
        self._served[tenant] = self._last_left = served

    def left(self, tenant: str) -> None:
        """One call of `tenant` does not wait any more."""
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]
            self._last_left = self.served(tenant)

    def charge(self, tenant: str, weight: float, prompt_tokens: int, output_tokens: float) -> None:
        """`tenant` is served so many tokens; negative ones correct what was expected."""
        tokens = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self.served(tenant) + tokens / weight

    def bound(self) -> float:
        """The counter above which a tenant lets others go first; inf while fewer than two wait."""
        if len(self._waiting) < 2:
            return inf
        return min(map(self.served, self._waiting)) + CREDIT_TOKENS / 2
