"""Cost of usage: per token, or by the hours for which a model held accelerators.

A model with a price per token is charged by it. For any other model, the accelerator-hours of a day
are divided among that day's users, by the tokens computed for them: uncached prompt tokens and
output tokens. So idle hours on a day with use are charged, and a day without use is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cato.core.tenancy import CardTime, Usage


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Price per million tokens; `cached_prompt` is for tokens found in an engine's KV cache."""

    prompt: float
    output: float
    cached_prompt: float

    def cost(self, used: Usage) -> float:
        uncached = _uncached(used)
        return (
            uncached * self.prompt
            + (used.prompt_tokens - uncached) * self.cached_prompt
            + used.output_tokens * self.output
        ) / 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of models by name, and of an accelerator-hour; None: not charged."""

    currency: str = ""
    models: Mapping[str, TokenPrice] = field(default_factory=dict)
    card_hour: float | None = None

    def costs(
        self,
        used: Sequence[Usage],
        of_all: Iterable[Usage],
        held: Iterable[CardTime],
        bases: Mapping[str, str],
    ) -> list[float | None]:
        """The cost of each row of `used`; None without a price.

        `of_all` is the usage of all tenants on those days, `held` the accelerator time. Adapters
        cost the same as their `bases`, unless they have prices of their own.
        """
        computed: Counter[tuple[str, str]] = Counter()
        for u in of_all:
            computed[u.day, bases.get(u.model, u.model)] += _computed(u)
        hours = {(h.day, h.model): h.card_s / 3600 for h in held}

        def cost(u: Usage) -> float | None:
            base = bases.get(u.model, u.model)
            price = self.models.get(u.model) or self.models.get(base)
            if price is not None:
                return price.cost(u)
            if self.card_hour is None or not computed[u.day, base]:
                return None
            share = _computed(u) / computed[u.day, base]
            return hours.get((u.day, base), 0.0) * self.card_hour * share

        return [cost(u) for u in used]


NO_PRICES = Prices()


def _computed(used: Usage) -> int:
    return _uncached(used) + used.output_tokens


def _uncached(used: Usage) -> int:
    """Never negative: no count of an engine makes a tenant's bill smaller than nothing."""
    return max(0, used.prompt_tokens - used.cached_prompt_tokens)
