"""Workload of the shared-pool experiment: 16 models, their load times, and their arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cato.core.eviction import ModelFacts, Wanted
from cato.core.ids import InvocationId, ModelName, NodeId, PoolName, RunId, TaskName
from cato.core.profile import UNMEASURED, Profile
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.sim.tasks import OfferedTask, SimNode

LANGUAGES = ("Java", "Python", "C++", "JavaScript", "C", "Go", "C#", "Rust")
FAVOURITES = LANGUAGES[:4]
COMPLETION, REASONING = "completion", "reasoning"

# Weights of Qwen2.5-Coder at two bytes a parameter. A load is 2 s to start an engine plus the
# weights at 1.25 GB/s (assumed: a local SSD behind vLLM's default loader; published cold starts
# of 7-8B models with a warm image are 15-40 s with, and 10-20 s without, graph capture).
WEIGHTS_BYTES = {COMPLETION: 1_000_000_000, REASONING: 15_200_000_000}
ENGINE_START_S = 2.0
STORAGE_BYTES_PER_S = 1.25e9
# The host-memory tier (ALGORITHMS.md, section 7).
RELOAD_SPEEDUP = 4.0

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
