"""A fleet of cards in virtual time: invocations arrive, models are loaded and unloaded.

`run` drives `SharedOrchestrator` and knows nothing that decides: commands become future events.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cato.core.commands import Dispatch
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.eviction import (
    Card,
    CardId,
    CopyId,
    DispatchOrder,
    EvictionPolicy,
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
    ReplicaId,
    RunId,
    TaskName,
)
from cato.core.policies import Policies
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import (
    CardAdded,
    ClockTold,
    HostMemorySized,
    Load,
    LoadFinished,
    Served,
)
from cato.core.profile import UNMEASURED, Profile
from cato.core.shared import Looked, ModelAdded, OfLine, SharedEvent, SharedOrchestrator, Step, Told
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.least_wait import LeastWait
from cato.sim.tasks import Outcome, SimNode, SimTask, task_metrics

LANGUAGES = ("Java", "Python", "C++", "JavaScript", "TypeScript", "Go", "C#", "Rust")
FAVOURITES = LANGUAGES[:4]
# 5 January 1970.
MONDAY_S = 4 * 86_400.0
LOOK_S = 60.0
COMPLETION, REASONING = "completion", "reasoning"
CARDS = 4
POOL = PoolName("cards")
# Calls of one model are served by arrival, on its copy with the least to do.
BY_ARRIVAL = Policies(LeastWait(), FirstComeFirstServed())

# Weights of Qwen2.5-Coder at two bytes a parameter. A load is 2 s to start an engine plus the
# weights at 1.25 GB/s (assumed: a local SSD behind vLLM's default loader; published cold starts
# of 7-8B models with a warm image are 15-40 s with, and 10-20 s without, graph capture).
WEIGHTS_BYTES = {COMPLETION: 1_000_000_000, REASONING: 15_200_000_000}
ENGINE_START_S = 2.0
STORAGE_BYTES_PER_S = 1.25e9
# The host-memory tier of the specification (algorithms.md, section 7).
RELOAD_SPEEDUP = 4.0
# Half the memory of a host with 256 GB: all but one of the 16 models (130 GB) fit.
HOST_WEIGHTS_BYTES = 128_000_000_000

# Time to the first token that a developer expects: a completion is useless once more is typed;
# an answer that reasons is waited for.
SLO_S = {COMPLETION: 1.0, REASONING: 10.0}
# Whole answer: last token by then.
E2E_SLO_S = {COMPLETION: 2.0, REASONING: 30.0}

PROFILES: Mapping[str, Profile] = {
    # 7B on a 32 GB card: step 20 ms + 0.45 ms·b, prefill 25 ms + 0.12 ms/token (algorithms.md).
    REASONING: replace(
        UNMEASURED,
        model="7b",
        decode_base_s=20e-3,
        decode_per_context_token_s=0.0,
        prefill_per_batch_token_s=0.12e-3,
    ),
    # Assumed of 0.5B: bound by launches, not memory: a third of the step, a tenth of the prefill.
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
# Median tokens and the sigma of their logarithm (assumed): a file's head, one or two lines;
# a question with context, an answer of a page.
PROMPT_TOKENS = {COMPLETION: (600.0, 0.6), REASONING: (900.0, 0.6)}
OUTPUT_TOKENS = {COMPLETION: (25.0, 0.5), REASONING: (250.0, 0.5)}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who asks for what: the share of completions, and of the four favourite languages."""

    name: str
    completions: float
    favourites: float

    def share(self, language: str, kind: str) -> float:
        """Part of all arrivals that want this model."""
        spread = self.favourites if language in FAVOURITES else 1.0 - self.favourites
        return (self.completions if kind == COMPLETION else 1.0 - self.completions) * spread / 4


# CACE, section "workload": uniform, IDE-heavy, and the latter with 20 % for each favourite.
PATTERNS = (
    Pattern("uniform", 0.5, 0.5),
    Pattern("ide-heavy", 0.7, 0.5),
    Pattern("skewed", 0.7, 0.8),
)


@dataclass(frozen=True, slots=True)
class CardArrival:
    """One invocation to come; `output_tokens` is what it will really generate."""

    wanted: Wanted
    kind: str
    prompt_tokens: int
    output_tokens: int

    def invocation(self) -> Invocation:
        wanted = self.wanted
        return Invocation(
            id=wanted.id,
            run_id=RunId(wanted.id),
            task=TaskName(self.kind),
            node=NodeId("call"),
            prompt_tokens=self.prompt_tokens,
            expected_tokens=round(wanted.expected_tokens),
            arrived_at_s=wanted.arrived_at_s,
            deadline_s=wanted.deadline_s,
            until_first_token=True,
            weight=wanted.value,
            user=wanted.user,
        )


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of an arrival; all moments on the same virtual clock."""

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
        """As a task of one call, its target that of the whole answer."""
        arrival, kind = self.arrival, self.arrival.kind
        wanted = arrival.wanted
        expected_tokens = round(wanted.expected_tokens)
        node = SimNode(POOL, arrival.prompt_tokens, arrival.output_tokens, expected_tokens)
        task = SimTask(
            wanted.id,
            TaskName(kind),
            wanted.arrived_at_s,
            SloMetric.E2E,
            E2E_SLO_S[kind],
            (node,),
            (0.0,),
        )
        queue_s = self.served_at_s - wanted.arrived_at_s
        return _CardOutcome(task, self.first_token_at_s, self.finished_at_s, queue_s)


class _CardOutcome(Outcome):
    """Met when both the first token and the whole answer came in time."""

    __slots__ = ()

    @property
    def is_met(self) -> bool:
        return self.ttft_s <= SLO_S[self.task.name] and self.e2e_s <= self.task.target_s


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A whole run: what was served, which loads it took, and the events that replay it.

    `utilization`: the fraction of the cards' time, up to the last answer, in which they served.
    """

    served: tuple[Answered, ...]
    loads: tuple[Load, ...]
    load_s: float
    utilization: float
    events: tuple[SharedEvent, ...]

    def metrics(self) -> dict[str, float]:
        """`task_metrics`, and seconds, counts and fractions of the cards.

        Attainment and goodput are of both SLOs, gain and `cv_completion_over_sla` of that of the
        whole answer. `loads` and `load_s` count prefetches, aborted ones too. Models loaded for
        the first time on an empty card evict nothing.
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

    A policy is told the median output of a kind, never the length itself.
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
    """The moments of each model's arrivals, as `Belady` wants them."""
    moments: dict[ModelName, list[float]] = {}
    for a in arrivals:
        moments.setdefault(a.wanted.model, []).append(a.wanted.arrived_at_s)
    return {m: tuple(sorted(x)) for m, x in moments.items()}


@dataclass(slots=True)
class _Running:
    arrival: CardArrival
    is_hit: bool
    served_at_s: float
    prefilled_at_s: float
    steps_left: float
    first_token_at_s: float | None = None


@dataclass(slots=True)
class _Engine:
    """The batch of one copy: all that decode advance together, one step of the profile a token.

    A prompt is processed beside the batch and does not stall it (chunked prefill that costs
    nothing): with at most 8 short prompts a copy this is a small error, and the same for all
    policies.
    """

    profile: Profile
    at_s: float
    running: dict[InvocationId, _Running] = field(default_factory=dict)
    version: int = 0

    def advance(self, now_s: float) -> None:
        """Decode up to `now_s`; between two calls nobody joins, leaves or ends its prefill."""
        decoding = [r for r in self.running.values() if r.prefilled_at_s <= self.at_s]
        steps = (now_s - self.at_s) / self.profile.decode_step_s(max(1, len(decoding)))
        for r in decoding:
            r.steps_left -= steps
            if r.first_token_at_s is None:
                r.first_token_at_s = self.at_s + self.profile.decode_step_s(len(decoding))
        self.at_s = now_s

    def next_change_s(self) -> float | None:
        """When somebody ends its prefill or its output."""
        decoding = [r for r in self.running.values() if r.prefilled_at_s <= self.at_s]
        step_s = self.profile.decode_step_s(max(1, len(decoding)))
        moments_s = [self.at_s + max(0.0, r.steps_left) * step_s for r in decoding]
        moments_s += [
            r.prefilled_at_s for r in self.running.values() if r.prefilled_at_s > self.at_s
        ]
        return min(moments_s, default=None)


# Rounding of moments leaves a finished output this much of a step short.
_ALMOST_STEP = 1e-6


class _Fleet:
    """Engines and pending moments of a run."""

    def __init__(self, orchestrator: SharedOrchestrator, arrivals: Sequence[CardArrival]) -> None:
        self._orchestrator = orchestrator
        self._arrivals = {a.wanted.id: a for a in arrivals}
        self._engines: dict[CopyId, _Engine] = {}
        self._copy_on: dict[ReplicaId, CopyId] = {}
        # Moment, order of entry, and either an event or an engine's (copy, version) to look at.
        self._agenda: list[tuple[float, int, SharedEvent | tuple[CopyId, int]]] = []
        self._entries = 0
        self._loading: dict[CopyId, tuple[float, Load]] = {}
        self.served: list[Answered] = []
        self.loads: list[Load] = []
        self.load_s = 0.0
        self.busy_s = 0.0  # of all cards
        self.events: list[SharedEvent] = []
        for a in arrivals:
            at_s = a.wanted.arrived_at_s
            offered = InvocationOffered(at_s, a.invocation())
            self._enter(at_s, OfLine(a.wanted.model, offered))

    def run(self) -> None:
        while self._agenda and len(self.served) < len(self._arrivals):
            now_s, _, what = heapq.heappop(self._agenda)
            if isinstance(what, tuple):
                copy_id, version = what
                engine = self._engines.get(copy_id)
                if engine is not None and engine.version == version:
                    self._progress(copy_id, engine, now_s)
                continue
            if isinstance(what, LoadFinished) and what.copy_id in self._loading:
                began_at_s, load = self._loading.pop(what.copy_id)
                self.load_s += now_s - began_at_s
                kind = load.model.rsplit("-", 1)[1]
                self._engines[what.copy_id] = _Engine(PROFILES[kind], now_s)
            self.tell(what)

    def tell_clock(self, midnight_s: float) -> None:
        end_s = max(a.wanted.arrived_at_s for a in self._arrivals.values())
        for at_s in np.arange(midnight_s, end_s, LOOK_S):
            self._enter(float(at_s), ClockTold(float(at_s), float(at_s) - midnight_s + MONDAY_S))
            self._enter(float(at_s), Looked(float(at_s)))

    def _enter(self, at_s: float, what: SharedEvent | tuple[CopyId, int]) -> None:
        heapq.heappush(self._agenda, (at_s, self._entries, what))
        self._entries += 1

    def tell(self, event: SharedEvent) -> None:
        self.events.append(event)
        for step in self._orchestrator.handle(event):
            self._perform(step, event.now_s)

    def _perform(self, step: Step, now_s: float) -> None:
        if isinstance(step, Load):
            for victim in step.evicted:
                self._engines.pop(victim.copy_id, None)
                if victim.copy_id in self._loading:
                    began_at_s, _ = self._loading.pop(victim.copy_id)
                    self.load_s += now_s - began_at_s
            self.loads.append(step)
            self._loading[step.copy_id] = (now_s, step)
            self._copy_on[ReplicaId(step.cards[0])] = step.copy_id
            ready_at_s = now_s + step.expected_s
            self._enter(ready_at_s, LoadFinished(ready_at_s, step.copy_id))
            return
        assert isinstance(step, Told), "no simulated load fails"
        for command in step.commands:
            assert isinstance(command, Dispatch), "nothing is refused or taken back"
            self._start(command, command.invocation_id in step.hits, now_s)

    def _start(self, command: Dispatch, is_hit: bool, now_s: float) -> None:
        copy_id = self._copy_on[command.replica_id]
        engine = self._engines[copy_id]
        self._advance(engine, now_s)
        arrival = self._arrivals[command.invocation_id]
        engine.running[command.invocation_id] = _Running(
            arrival,
            is_hit,
            now_s,
            now_s + engine.profile.prefill_s(arrival.prompt_tokens),
            float(arrival.output_tokens),
        )
        self._look_again(copy_id, engine)

    def _advance(self, engine: _Engine, now_s: float) -> None:
        if engine.running:
            self.busy_s += now_s - engine.at_s
        engine.advance(now_s)

    def _progress(self, copy_id: CopyId, engine: _Engine, now_s: float) -> None:
        self._advance(engine, now_s)
        done = [id for id, r in engine.running.items() if r.steps_left <= _ALMOST_STEP]
        ended = {id: engine.running.pop(id) for id in done}
        for r in ended.values():
            first_s = now_s if r.first_token_at_s is None else min(r.first_token_at_s, now_s)
            self.served.append(Answered(r.arrival, r.is_hit, r.served_at_s, first_s, now_s))
        self._look_again(copy_id, engine)
        for id, r in ended.items():
            event = InvocationEnded(now_s, id, 1, r.arrival.output_tokens, "done")
            self.tell(OfLine(r.arrival.wanted.model, event))

    def _look_again(self, copy_id: CopyId, engine: _Engine) -> None:
        engine.version += 1
        at_s = engine.next_change_s()
        if at_s is not None:
            self._enter(at_s, (copy_id, engine.version))


def opened_books(
    eviction: EvictionPolicy,
    order: DispatchOrder,
    host_weights_bytes: int = 0,
    cards: int = CARDS,
    scale_s: float = 1.0,
    unit_s: float = 1.0,
) -> tuple[SharedOrchestrator, tuple[SharedEvent, ...]]:
    """Books of one host with empty cards, and the events that opened them. Loads and SLOs take
    `scale_s` of their time; for `unit_s` see `Placement`."""
    books = SharedOrchestrator(lambda tell: Placement(eviction, order, tell, unit_s))
    host = HostId("host-1")
    events: list[SharedEvent] = [
        HostMemorySized(0.0, HostMemory(host, host_weights_bytes)),
        *(CardAdded(0.0, Card(CardId(f"card-{i}"), host)) for i in range(1, cards + 1)),
    ]
    for m in models():
        facts = replace(
            m, load_s=m.load_s * scale_s, reload_s=m.reload_s * scale_s, slo_s=m.slo_s * scale_s
        )
        served = Served(facts, PROFILES[m.name.rsplit("-", 1)[1]], DeploymentName("cards"))
        events.append(ModelAdded(0.0, PoolName(m.name), served, BY_ARRIVAL))
    for event in events:
        assert not any(isinstance(s, Load) for s in books.handle(event))
    return books, tuple(events)


def run(
    arrivals: Sequence[CardArrival],
    eviction: EvictionPolicy,
    order: DispatchOrder,
    host_weights_bytes: int = 0,
    cards: int = CARDS,
    midnight_s: float | None = None,
) -> FleetRun:
    """Serve all of `arrivals` on one host of `cards` cards, which are empty at first.

    With `midnight_s` the fleet is told that a Monday begins then, and looks around every minute.

    The run goes on until the last invocation has finished, so that no policy gains by leaving
    the unlucky ones waiting.
    """
    orchestrator, opened = opened_books(eviction, order, host_weights_bytes, cards)
    fleet = _Fleet(orchestrator, arrivals)
    fleet.events += opened
    if midnight_s is not None:
        fleet.tell_clock(midnight_s)
    fleet.run()
    assert len(fleet.served) == len(arrivals), "an invocation was lost"
    end_s = max((s.finished_at_s for s in fleet.served), default=0.0)
    utilization = fleet.busy_s / (cards * end_s) if end_s > 0 else 0.0
    return FleetRun(
        tuple(fleet.served), tuple(fleet.loads), fleet.load_s, utilization, tuple(fleet.events)
    )
