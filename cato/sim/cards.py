"""Shared pool experiment: 16 models on four accelerators, their arrivals, load times and results.

`run` serves given arrivals on a fleet with one shared pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cato.core.eviction import (
    Card,
    CardId,
    CardPolicies,
    HostMemory,
    ModelFacts,
    Wanted,
)
from cato.core.ids import (
    DeploymentName,
    HostId,
    InvocationId,
    ModelName,
    NodeId,
    PoolName,
    RunId,
    TaskName,
)
from cato.core.policies import Policies
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import CardAdded, ClockTold, HostMemorySized, Load, Served
from cato.core.profile import UNMEASURED, Profile
from cato.core.shared import Looked, ModelAdded, SharedEvent, SharedOrchestrator
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.least_wait import LeastWait
from cato.sim.fleet import Fleet
from cato.sim.shared_pool import SharedSetup
from cato.sim.tasks import OfferedTask, Outcome, SimNode, task_metrics

LANGUAGES = ("Java", "Python", "C++", "JavaScript", "TypeScript", "Go", "C#", "Rust")
FAVOURITES = LANGUAGES[:4]
# 5 January 1970.
MONDAY_S = 4 * 86_400.0
LOOK_S = 60.0
COMPLETION, REASONING = "completion", "reasoning"
CARDS = 4
POOL = PoolName("cards")
# vLLM's token budget of a step on small GPUs: prompts are chunked beside decoding.
CHUNK_TOKENS = 2048
# Calls of one model are served by arrival, on its replica with the least work.
BY_ARRIVAL = Policies(LeastWait(), FirstComeFirstServed())

# Weights of Qwen2.5-Coder at two bytes a parameter. A load is 2 s to start an engine plus the
# weights at 1.25 GB/s (assumed: a local SSD behind vLLM's default loader; published cold starts
# of 7-8B models with a warm image are 15-40 s with, and 10-20 s without, graph capture).
WEIGHTS_BYTES = {COMPLETION: 1_000_000_000, REASONING: 15_200_000_000}
ENGINE_START_S = 2.0
STORAGE_BYTES_PER_S = 1.25e9
# The host-memory tier (ALGORITHMS.md, section 7).
RELOAD_SPEEDUP = 4.0
# Half the memory of a host with 256 GB: all but one of the 16 models (130 GB) fit.
HOST_WEIGHTS_BYTES = 128_000_000_000

# TTFT that a developer accepts: a completion is useless once the developer types on; an answer
# that reasons may take longer.
SLO_S = {COMPLETION: 1.0, REASONING: 10.0}
# E2E: last token by then.
E2E_SLO_S = {COMPLETION: 2.0, REASONING: 30.0}

PROFILES: Mapping[str, Profile] = {
    # 7B on a 32 GB GPU: step 20 ms + 0.45 ms·b, prefill 25 ms + 0.12 ms/token (ALGORITHMS.md).
    REASONING: replace(
        UNMEASURED,
        model="7b",
        decode_base_s=20e-3,
        decode_per_context_token_s=0.0,
        prefill_per_batch_token_s=0.12e-3,
    ),
    # 0.5B (assumed): bound by kernel launches: a third of the step, a tenth of the prefill.
    COMPLETION: replace(
        UNMEASURED,
        model="0.5b",
        decode_base_s=7e-3,
        decode_per_request_s=0.1e-3,
        decode_per_context_token_s=0.0,
        prefill_base_s=8e-3,
        prefill_per_batch_token_s=0.012e-3,
    ),
}
# Median tokens and sigma of their logarithm (assumed). Completion: the head of a file, one or two
# lines of answer. Reasoning: a question with context, a page of answer.
PROMPT_TOKENS = {COMPLETION: (600.0, 0.6), REASONING: (900.0, 0.6)}
OUTPUT_TOKENS = {COMPLETION: (25.0, 0.5), REASONING: (250.0, 0.5)}


@dataclass(frozen=True, slots=True)
class Pattern:
    """The traffic mix: share of completions, and shares of the four favourite languages."""

    name: str
    completions: float
    favourites: float

    def share(self, language: str, kind: str) -> float:
        """Fraction of all arrivals that want this model."""
        spread = self.favourites if language in FAVOURITES else 1.0 - self.favourites
        return (self.completions if kind == COMPLETION else 1.0 - self.completions) * spread / 4


# CACE, section "workload": uniform, IDE-heavy, and IDE-heavy with 20 % for each favourite.
PATTERNS = (
    Pattern("uniform", 0.5, 0.5),
    Pattern("ide-heavy", 0.7, 0.5),
    Pattern("skewed", 0.7, 0.8),
)


@dataclass(frozen=True, slots=True)
class CardShape:
    """`count` accelerators of one kind, with their times relative to those of the profiles.

    `slowdown` of calls, `load_slowdown` of loads. A model with more than `memory_bytes` of weights
    does not fit (0: all fit).
    """

    name: DeploymentName
    count: int
    slowdown: float = 1.0
    load_slowdown: float = 1.0
    memory_bytes: int = 0


ALIKE = (CardShape(DeploymentName("cards"), CARDS),)


@dataclass(frozen=True, slots=True)
class CardArrival:
    """One invocation to come; `output_tokens` is its true length."""

    wanted: Wanted
    kind: str
    prompt_tokens: int
    output_tokens: int

    def task(self) -> CardTask:
        """It has two targets; the task's is that of the whole answer (E2E)."""
        wanted, expected_tokens = self.wanted, round(self.wanted.expected_tokens)
        offered = Invocation(
            id=wanted.id,
            run_id=RunId(wanted.id),
            task=TaskName(self.kind),
            node=NodeId("call"),
            prompt_tokens=self.prompt_tokens,
            expected_tokens=expected_tokens,
            arrived_at_s=wanted.arrived_at_s,
            deadline_s=wanted.deadline_s,
            until_first_token=True,
            weight=wanted.value,
            user=wanted.user,
        )
        line = PoolName(wanted.model)
        return CardTask(
            wanted.id,
            TaskName(self.kind),
            wanted.arrived_at_s,
            SloMetric.E2E,
            E2E_SLO_S[self.kind],
            (SimNode(line, self.prompt_tokens, self.output_tokens, expected_tokens),),
            (0.0,),
            offered=offered,
            arrival=self,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTask(OfferedTask):
    """The call of `arrival`."""

    arrival: CardArrival


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of an arrival; all times are on the same virtual clock."""

    arrival: CardArrival
    is_hit: bool
    served_at_s: float
    first_token_at_s: float
    finished_at_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_at_s - self.arrival.wanted.arrived_at_s

    @property
    def e2e_s(self) -> float:
        return self.finished_at_s - self.arrival.wanted.arrived_at_s

    def outcome(self) -> Outcome:
        """As a task, with both of its targets."""
        queue_s = self.served_at_s - self.arrival.wanted.arrived_at_s
        task = self.arrival.task()
        return _CardOutcome(task, self.first_token_at_s, self.finished_at_s, queue_s)


class _CardOutcome(Outcome):
    """Met when both the first token and the whole answer were in time."""

    __slots__ = ()

    @property
    def is_met(self) -> bool:
        return self.ttft_s <= SLO_S[self.task.name] and self.e2e_s <= self.task.target_s


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A whole run: the calls served, the loads, and the events that replay it.

    `utilization`: fraction of accelerator time, up to the last answer, spent serving.
    """

    served: tuple[Answered, ...]
    loads: tuple[Load, ...]
    load_s: float
    utilization: float
    events: tuple[SharedEvent, ...]

    def metrics(self) -> dict[str, float]:
        """`task_metrics`, plus the accelerators' seconds, counts and fractions.

        Attainment and goodput require both SLOs; gain and `cv_completion_over_sla` use E2E.
        `loads` and `load_s` include prefetches, aborted ones too. The first load of a model onto an
        empty accelerator evicts nothing.
        """
        return task_metrics([s.outcome() for s in self.served]) | {
            "utilization": self.utilization,
            "hit_rate": float(np.mean([s.is_hit for s in self.served])),
            "evictions": float(sum(len(x.evicted) for x in self.loads)),
            "loads": float(len(self.loads)),
            "prefetches": float(sum(x.is_prefetch for x in self.loads)),
            "load_s": self.load_s,
        }


def model_name(language: str, kind: str) -> ModelName:
    return ModelName(f"{language}-{kind}")


def models() -> tuple[ModelFacts, ...]:
    """The 16 models: 8 languages x {0.5B completion, 7B reasoning}."""
    facts = []
    for language in LANGUAGES:
        for kind in (COMPLETION, REASONING):
            load_s = ENGINE_START_S + WEIGHTS_BYTES[kind] / STORAGE_BYTES_PER_S
            facts.append(
                ModelFacts(
                    name=model_name(language, kind),
                    load_s=load_s,
                    reload_s=load_s / RELOAD_SPEEDUP,
                    weights_bytes=WEIGHTS_BYTES[kind],
                    slo_s=SLO_S[kind],
                )
            )
    return tuple(facts)


def arrivals(
    pattern: Pattern, rate_per_s: float, count: int, rng: np.random.Generator
) -> tuple[CardArrival, ...]:
    """Poisson arrivals of `pattern`, independent of one another.

    Policies are given the median output length of a kind, never the true length.
    """
    pairs = [(language, kind) for language in LANGUAGES for kind in (COMPLETION, REASONING)]
    shares = np.array([pattern.share(*p) for p in pairs])
    moments_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    picks = rng.choice(len(pairs), size=count, p=shares / shares.sum())
    spreads = rng.standard_normal((count, 2))
    found = []
    for i, (at_s, pick, (prompt, output)) in enumerate(zip(moments_s, picks, spreads, strict=True)):
        language, kind = pairs[pick]
        wanted = Wanted(
            id=InvocationId(f"{i:06d}"),
            model=model_name(language, kind),
            arrived_at_s=float(at_s),
            deadline_s=float(at_s) + SLO_S[kind],
            expected_tokens=OUTPUT_TOKENS[kind][0],
        )
        found.append(
            CardArrival(
                wanted,
                kind,
                _tokens(PROMPT_TOKENS[kind], float(prompt)),
                _tokens(OUTPUT_TOKENS[kind], float(output)),
            )
        )
    return tuple(found)


def _tokens(median_and_sigma: tuple[float, float], spread: float) -> int:
    median, sigma = median_and_sigma
    return max(1, round(median * float(np.exp(sigma * spread))))


def arrivals_s(arrivals: Iterable[CardArrival]) -> dict[ModelName, tuple[float, ...]]:
    """Arrival times per model, as `Belady` needs them."""
    moments: dict[ModelName, list[float]] = {}
    for a in arrivals:
        moments.setdefault(a.wanted.model, []).append(a.wanted.arrived_at_s)
    return {m: tuple(sorted(x)) for m, x in moments.items()}


def opened_pool(
    policies: CardPolicies,
    host_weights_bytes: int = 0,
    shapes: Sequence[CardShape] = ALIKE,
    scale_s: float = 1.0,
    unit_s: float = 1.0,
) -> tuple[SharedOrchestrator, tuple[SharedEvent, ...]]:
    """A shared pool of one host with empty accelerators, and the events it was told so far.
    Loads and SLOs are scaled by `scale_s`; for `unit_s` see `Placement`."""
    orchestrator = SharedOrchestrator(lambda tell: Placement(policies, tell, unit_s))
    host = HostId("host-1")
    kinds = [shape.name for shape in shapes for _ in range(shape.count)]
    cards = [Card(CardId(f"card-{i}"), host, kind) for i, kind in enumerate(kinds, start=1)]
    events: list[SharedEvent] = [
        HostMemorySized(0.0, HostMemory(host, host_weights_bytes)),
        *(CardAdded(0.0, card) for card in cards),
    ]
    for m in models():
        fitting = [x for x in shapes if not x.memory_bytes or m.weights_bytes <= x.memory_bytes]
        served = tuple(_served(m, shape, scale_s) for shape in fitting)
        events.append(ModelAdded(0.0, PoolName(m.name), served, BY_ARRIVAL))
    for event in events:
        assert not any(isinstance(s, Load) for s in orchestrator.handle(event))
    return orchestrator, tuple(events)


def _served(model: ModelFacts, shape: CardShape, scale_s: float) -> Served:
    profile = PROFILES[model.name.rsplit("-", 1)[1]].slowed(shape.slowdown)
    load_scale = scale_s * shape.load_slowdown
    facts = replace(
        model,
        load_s=model.load_s * load_scale,
        reload_s=model.reload_s * load_scale,
        slo_s=model.slo_s * scale_s,
        call_s=profile.typical_call_s,
    )
    return Served(facts, profile, shape.name)


def run(
    arrivals: Sequence[CardArrival],
    policies: CardPolicies,
    host_weights_bytes: int = 0,
    shapes: Sequence[CardShape] = ALIKE,
    midnight_s: float | None = None,
) -> FleetRun:
    """Serve `arrivals` on one host with accelerators of `shapes`, all empty at first.

    With `midnight_s` the fleet is told that a Monday begins at that time, and looks every minute.

    The run continues until the last invocation has finished, so that no policy gains by starving
    some.
    """
    orchestrator, opened = opened_pool(policies, host_weights_bytes, shapes)
    left = len(arrivals)

    def ended(_: Outcome) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            fleet.kernel.stop()

    fleet = Fleet([SharedSetup(POOL, orchestrator, opened, CHUNK_TOKENS)], on_end=ended)
    pool = fleet.shared[POOL]
    if midnight_s is not None:
        end_s = max(a.wanted.arrived_at_s for a in arrivals)
        for at_s in np.arange(midnight_s, end_s, LOOK_S).tolist():
            clock = ClockTold(at_s, at_s - midnight_s + MONDAY_S)
            fleet.kernel.at(at_s, pool.handle, clock)
            fleet.kernel.at(at_s, pool.handle, Looked(at_s))
    outcomes = fleet.run([a.task() for a in arrivals])
    assert left == 0, "an invocation was lost"
    busy_s = sum(line.cost_s(fleet.kernel.now_s)[0] for line in pool.lines.values())
    end_s = max((o.ended_at_s for o in outcomes), default=0.0)
    return FleetRun(
        tuple(_answered(o, pool.hits) for o in outcomes),
        tuple(pool.loads),
        pool.load_s,
        busy_s / (sum(s.count for s in shapes) * end_s) if end_s > 0 else 0.0,
        tuple(pool.events),
    )


def _answered(outcome: Outcome, hits: Collection[InvocationId]) -> Answered:
    task = outcome.task
    assert isinstance(task, CardTask), f"{task.id} is not of this workload"
    served_at_s = task.arrived_at_s + outcome.queue_s
    is_hit = task.offered.id in hits
    return Answered(task.arrival, is_hit, served_at_s, outcome.first_token_at_s, outcome.ended_at_s)
