"""LLM calls of a class of tasks, by their means: their expected times, and their drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cato.core.budgets import longest_after
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.sim.tasks import SimNode
from cato.sim.workloads import belief, lengths

CATO_SPREAD = 0.3


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One LLM call of a class: its pool, mean tokens, and the probability that it happens.

    `needs` are indexes of earlier calls; when a call is skipped, its dependents inherit its needs.
    `before_s`: time between its needs and it that is not an LLM call. `spread`: deviation of the
    logarithms of both lengths.
    """

    pool: str
    prompt_tokens: float
    output_tokens: float
    needs: tuple[int, ...] = ()
    before_s: float = 0.0
    chance: float = 1.0
    spread: float = CATO_SPREAD

    def service_s(self, profile: Profile) -> float:
        """Mean time of the call, alone on a replica."""
        return profile.service_s(round(self.prompt_tokens), round(self.output_tokens))


def expected_s(
    calls: Sequence[CallSpec], profile_of: Callable[[CallSpec], Profile], metric: SloMetric
) -> tuple[list[float], list[float]]:
    """Expected time of each call, and of what follows it up to the event of `metric`: the first or
    the last token of the last call. Every call is alone on a replica."""
    services_s = [c.service_s(profile_of(c)) for c in calls]
    if metric is SloMetric.TTFT:
        last = calls[-1]
        services_s[-1] = profile_of(last).first_token_s(round(last.prompt_tokens))
    own = [(c.before_s + s) * c.chance for c, s in zip(calls, services_s, strict=True)]
    order = [str(i) for i in range(len(calls))]
    needs = {i: [str(n) for n in c.needs] for i, c in zip(order, calls, strict=True)}
    after = longest_after(order, needs, dict(zip(order, own, strict=True)))
    return own, [after[i] for i in order]


def drawn_nodes(
    calls: Sequence[CallSpec],
    happens: Iterable[bool],
    after_s: Sequence[float],
    rng: np.random.Generator,
) -> tuple[SimNode, ...]:
    """The calls of one task. Skipped ones are drawn too, so that others do not change with them."""
    nodes: list[SimNode] = []
    places: list[tuple[int, ...]] = []
    for call, is_made, downstream_s in zip(calls, happens, after_s, strict=True):
        prompt = int(lengths(rng, call.prompt_tokens, 1, call.spread)[0])
        output = int(lengths(rng, call.output_tokens, 1, call.spread)[0])
        needs = tuple(sorted({p for need in call.needs for p in places[need]}))
        if not is_made:
            places.append(needs)
            continue
        places.append((len(nodes),))
        known = belief(call.output_tokens, call.spread)
        nodes.append(
            SimNode(
                PoolName(call.pool),
                prompt,
                output,
                round(known.mean),
                known,
                needs,
                call.before_s,
                downstream_s,
            )
        )
    return tuple(nodes)
