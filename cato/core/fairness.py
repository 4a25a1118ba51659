"""Fair shares of a pool by tenant: Virtual Token Counters (Sheng et al., 2024).

From "Fairness in Serving Large Language Models" (OSDI 2024). A tenant's counter grows by the tokens
that it is served, prompt tokens once and output tokens twice, divided by its weight. The counter of
a returning tenant is lifted to those of the waiting tenants, so that idle time earns no credit. If
none waits, it is lifted to the highest of all. (The paper takes that of the tenant that was served
last. With a credit, tenants that come one after the other would each take it down.) In the paper
the smallest counter always goes first. Here it goes first only if another tenant is ahead of it by
more than half of `CREDIT_TOKENS`; within that, the pool's own order decides, because it knows
deadlines. Only waiting tenants are compared, so unused capacity is free to all.
"""

from __future__ import annotations

from math import inf

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
# How far a returning tenant may be behind the others. About ten long calls: enough to protect its
# burst, too little to block others for long.
CREDIT_TOKENS = 40_000.0


class TokenShares:
    """The counters. Deterministic; the pool reports queued and served calls."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._leader = ""  # the tenant with the highest counter

    @property
    def tenants_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self, tenant: str) -> int:
        return self._waiting.get(tenant, 0)

    def served(self, tenant: str) -> float:
        """Weighted tokens that `tenant` was served or lifted to."""
        return self._served.get(tenant, 0.0)

    @property
    def _highest(self) -> float:
        return self.served(self._leader)

    def joined(self, tenant: str) -> None:
        """One more call of `tenant` is queued."""
        if tenant not in self._waiting:
            others = min((self.served(t) for t in self._waiting), default=self._highest)
            self._served[tenant] = max(self.served(tenant), others - CREDIT_TOKENS)
        self._waiting[tenant] = self.waiting(tenant) + 1

    def passed(self, tenant: str) -> None:
        """Like `joined` and `left`, for a call that is served at once while no other is queued."""
        self._served[tenant] = max(self.served(tenant), self._highest - CREDIT_TOKENS)

    def left(self, tenant: str) -> None:
        """One call of `tenant` is no longer queued."""
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]

    def charge(self, tenant: str, weight: float, prompt_tokens: int, output_tokens: float) -> None:
        """Charge `tenant` for tokens; negative values correct an earlier expectation."""
        tokens = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self.served(tenant) + tokens / weight
        if self.served(tenant) > self._highest:
            self._leader = tenant
        elif tokens < 0 and tenant == self._leader:
            self._leader = max(self._served, key=self.served)

    def bound(self) -> float:
        """A tenant above this counter yields to others; inf while fewer than two are waiting."""
        if len(self._waiting) < 2:
            return inf
        return min(map(self.served, self._waiting)) + CREDIT_TOKENS / 2
