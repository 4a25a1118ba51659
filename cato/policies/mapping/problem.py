"""Batch mapping: the problem and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Protocol

from cato.core.errors import InputError
from cato.core.ids import InvocationId
from cato.core.slo import Slo, SloMetric
from cato.policies.mapping.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class MappingRequest:
    """One queued request; `expected_tokens` of output may be a fraction, such as a class mean.

    `waited_s` has passed since its arrival: it counts towards TTFT and E2E targets.
    """

    id: InvocationId
    prompt_tokens: int
    expected_tokens: float
    slos: tuple[Slo, ...] = ()
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise InputError(f"{self.id}: a prompt has at least one token", "prompt_tokens")
        if not (isfinite(self.expected_tokens) and self.expected_tokens >= 1):
            raise InputError(f"{self.id}: expect at least one token", "expected_tokens")
        if not (isfinite(self.waited_s) and self.waited_s >= 0):
            raise InputError(f"{self.id}: a wait is finite and not negative", "waited_s")

    def target_s(self, metric: SloMetric) -> float:
        """The tightest target for `metric`; infinity without one."""
        return min((s.target_s for s in self.slos if s.metric is metric), default=inf)


@dataclass(frozen=True, slots=True)
class Mapping:
    """Batches in execution order; the order inside a batch has no meaning.

    `objective_per_s` is G as the mapper predicts it: requests that meet all their targets per
    second of summed latency (SLO-SA, section "objective").
    """

    batches: tuple[tuple[InvocationId, ...], ...]
    objective_per_s: float
    reason: str


class Mapper(Protocol):
    """Decides in which order and batches one engine should run these requests, from now.

    The engine runs a batch of at most `max_batch` until the last of its requests is done, then
    takes the next. `requests` come in order of arrival. Must be pure: a randomized mapper takes all
    its draws from `seed`.
    """

    def map(
        self, requests: Sequence[MappingRequest], latency: LatencyModel, max_batch: int, seed: int
    ) -> Mapping: ...


def checked(requests: Sequence[MappingRequest], max_batch: int) -> None:
    """Raise `InputError` for problems that no mapper can solve."""
    if max_batch < 1:
        raise InputError(f"a batch holds at least one request, not {max_batch}", "max_batch")
    if len({r.id for r in requests}) < len(requests):
        raise InputError("two requests have the same id; give each its own", "requests")
