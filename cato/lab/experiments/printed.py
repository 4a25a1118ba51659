"""Numbers printed in the papers: mixes, rates, objectives, baselines and results.

Kept in one place, so that experiments can be checked against it (`tests/sim/test_printed.py`).
Results are listed where a text or a table gives the number, not where only a figure shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cato.core.slo import SloMetric
from cato.sim.report import Mean, Setting

Shares = Mapping[str, float]
PAPER = "{}, paper"
"""Suffix of rows with printed results, next to the same method's simulated rows."""


@dataclass(frozen=True, slots=True)
class Result:
    """One number of a paper: a metric of one method in one setting."""

    setting: Setting
    policy: str
    metric: str
    value: float

    @property
    def mean(self) -> Mean:
        """As a report row, with no seeds."""
        return Mean(
            self.setting, PAPER.format(self.policy), self.metric, self.value, float("nan"), 0
        )


# CATO, section 5


@dataclass(frozen=True, slots=True)
class Coding:
    """One research question of CATO: the mixes by name, the load, the baselines."""

    mixes: Mapping[str, Shares]
    rates_per_s: tuple[float, ...]
    baselines: tuple[str, ...]
    results: tuple[Result, ...]


JUDGED: Mapping[str, SloMetric] = MappingProxyType(
    {
        "completion": SloMetric.TTFT,
        "generation": SloMetric.TTFT,
        "translation": SloMetric.E2E,
        "summarization": SloMetric.E2E,
    }
)
"""Section 5.2: TTFT to the first token of the last call, E2E to its last one."""

CODING_REPLICAS = 6
"""Replicas of each of the two models."""
CODING_REQUESTS = 200
"""Section 6: 100 to 200 requests per run."""

_TWO_RATES = (0.67, 1.33, 2.00, 2.67, 3.33)
_FOUR_RATES = (0.83, 1.67, 2.50, 3.33)
_PATTERNS: Mapping[str, Shares] = {
    "pattern-1": {
        "completion": 0.4,
        "generation": 0.4,
        "translation": 0.1,
        "summarization": 0.1,
    },
    "pattern-2": dict.fromkeys(JUDGED, 0.25),
}
CATO, RAY, ROUND_ROBIN = "cato", "ray-serve", "round-robin"


def _utilizations(
    workload: str,
    rates_per_s: tuple[float, ...],
    rows: tuple[tuple[float, float, float], ...],
    names: tuple[str, str, str] = (CATO, RAY, ROUND_ROBIN),
) -> tuple[Result, ...]:
    """A table of mean utilizations: CATO, Ray Serve, round robin."""
    return tuple(
        Result({"workload": workload, "rate_per_s": rate}, name, "utilization", value)
        for rate, row in zip(rates_per_s, rows, strict=True)
        for name, value in zip(names, row, strict=True)
    )


def _of_tasks(
    workload: str, rate_per_s: float, metric: str, values: Mapping[str, float]
) -> tuple[Result, ...]:
    setting: Setting = {"workload": workload, "rate_per_s": rate_per_s}
    return tuple(Result(setting, name, metric, value) for name, value in values.items())


# In RQ4 a method is a router with its scaling.
SCALED_CATO = "cato + cato"
SCALED_RAY, SCALED_ROUND_ROBIN = "ray-serve + queue-length", "round-robin + queue-length"
SCALED = (SCALED_CATO, SCALED_RAY, SCALED_ROUND_ROBIN)
SCALED_REPLICAS = (1, 6)
"""Replicas of each model: at the start, and at most."""
VIOLATIONS = 1
"""Number of violations that triggers CATO's scaling."""

CODING: Mapping[str, Coding] = MappingProxyType(
    {
        "cato-rq1": Coding(
            {"rq1": {"generation": 0.9, "translation": 0.1}},
            _TWO_RATES,
            (RAY, ROUND_ROBIN),
            (
                *_utilizations(  # Table 1
                    "rq1",
                    _TWO_RATES,
                    (
                        (0.2571, 0.2360, 0.2092),
                        (0.3023, 0.2653, 0.2378),
                        (0.3250, 0.2637, 0.2789),
                        (0.3817, 0.3187, 0.3455),
                        (0.4157, 0.3266, 0.3293),
                    ),
                ),
                *_of_tasks(
                    "rq1",
                    3.33,
                    "slo_attainment.translation",
                    {CATO: 0.9, RAY: 0.8, ROUND_ROBIN: 0.85},
                ),
            ),
        ),
        "cato-rq2": Coding(
            {"rq2": {"completion": 0.9, "summarization": 0.1}},
            _TWO_RATES,
            (RAY, ROUND_ROBIN),
            _utilizations(  # Table 2
                "rq2",
                _TWO_RATES,
                (
                    (0.1599, 0.1312, 0.1478),
                    (0.2375, 0.2717, 0.2667),
                    (0.3714, 0.2202, 0.3056),
                    (0.3776, 0.3222, 0.3664),
                    (0.4230, 0.3322, 0.3261),
                ),
            ),
        ),
        "cato-rq3": Coding(
            _PATTERNS,
            _FOUR_RATES,
            (RAY, ROUND_ROBIN),
            (
                *_utilizations(  # Table 3
                    "pattern-1",
                    _FOUR_RATES,
                    (
                        (0.3120, 0.2534, 0.2261),
                        (0.3586, 0.2988, 0.2944),
                        (0.3702, 0.3199, 0.3091),
                        (0.4748, 0.3360, 0.3596),
                    ),
                ),
                *_of_tasks(
                    "pattern-1",
                    3.33,
                    "slo_attainment.generation",
                    {CATO: 0.86, RAY: 0.78, ROUND_ROBIN: 0.7},
                ),
                *_of_tasks("pattern-1", 1.67, "judged_s_p95.generation", {CATO: 18.5, RAY: 21.0}),
            ),
        ),
        "cato-rq4": Coding(
            _PATTERNS,
            _FOUR_RATES,
            (SCALED_RAY, SCALED_ROUND_ROBIN),
            (
                *_utilizations(  # Table 4
                    "pattern-1",
                    _FOUR_RATES,
                    (
                        (0.2768, 0.3185, 0.3287),
                        (0.4308, 0.4676, 0.5182),
                        (0.4351, 0.5209, 0.4611),
                        (0.4276, 0.4580, 0.5007),
                    ),
                    SCALED,
                ),
                *_of_tasks(
                    "pattern-1",
                    3.33,
                    "slo_attainment.generation",
                    {SCALED_CATO: 0.73, SCALED_RAY: 0.65, SCALED_ROUND_ROBIN: 0.1},
                ),
                *_of_tasks(
                    "pattern-1",
                    1.67,
                    "judged_s_p95.summarization",
                    {SCALED_CATO: 36.0, SCALED_RAY: 44.0},
                ),
                *_of_tasks(
                    "pattern-1",
                    0.83,
                    "judged_s_p95.generation",
                    {SCALED_CATO: 19.0, SCALED_RAY: 22.0},
                ),
            ),
        ),
    }
)


# SABER, Table I and sections III and V


@dataclass(frozen=True, slots=True)
class Batching:
    """SABER's workloads: tokens of prompt and output and SLA of each class, mixes, loads, caps."""

    classes: Mapping[str, tuple[int, int, float]]
    mixes: Mapping[str, Shares]
    rates_per_s: tuple[float, ...]
    requests: int
    caps: tuple[int, ...]
    metric: SloMetric


SABER = Batching(
    {
        "qna": (186, 43, 1.0),
        "generation": (463, 387, 8.0),
        "summary": (31, 30, 1.0),
        "translation": (670, 617, 12.0),
    },
    {
        "W1": {"qna": 0.1, "generation": 0.4, "summary": 0.1, "translation": 0.4},
        "W2": {"qna": 0.4, "generation": 0.1, "summary": 0.4, "translation": 0.1},
        "W3": {"qna": 0.25, "generation": 0.25, "summary": 0.25, "translation": 0.25},
    },
    (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0),
    100,
    (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    SloMetric.E2E,
)

# SLO-SA, section 5: the default hyperparameters of its annealing
ANNEALING = {"start": 500.0, "end": 20.0, "iterations": 100, "decay": 0.95}

# Its workload: half chat, judged by TTFT and TPOT, half code, judged by E2E; objectives in seconds.
SLO_SA_OBJECTIVES: Mapping[str, Mapping[SloMetric, float]] = MappingProxyType(
    {
        "chat": {SloMetric.TTFT: 10.0, SloMetric.TPOT: 0.05},
        "code": {SloMetric.E2E: 30.0},
    }
)
SLO_SA_LARGEST_BATCHES = (1, 2, 4)
SLO_SA_INSTANCES = (1, 2, 3, 4)
SLO_SA_LENGTH_ERRORS = (0.025, 0.05, 0.1)
SLO_SA_BASELINES = ("annealing", "exhaustive", "fcfs")
"""Its scheduler, exhaustive search, and vLLM and LMDeploy, which serve in order of arrival."""

# Tempo, section 6: requests 3 : 1 : 1, and their objectives in seconds
TEMPO_SHARES: Shares = MappingProxyType({"latency": 0.6, "throughput": 0.2, "collective": 0.2})
TEMPO_TTFT_S, TEMPO_TBT_S, TEMPO_TTLT_S = 2.0, 0.1, 20.0

TEMPO_CHATBOT: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = MappingProxyType(
    {"single": ((93, 244), (318, 313)), "collective": ((1300, 912), (4458, 1176))}
)
"""Table 2, the chatbot workload: mean and deviation of a request's input and output tokens."""

TEMPO_BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "vLLM": "fcfs, prompts whole",
        "Sarathi-Serve": "fcfs",
        "Autellix": "plas",
        "Tempo (SJF)": "sjf",
        "Tempo": "tempo",
    }
)
"""The paper's baselines, by our names."""

# CACE, section V: models and accelerators, the share of completions, and of the four popular
# languages in each pattern
CACE_MODELS, CACE_CARDS = 16, 4
CACE_PATTERNS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"uniform": (0.5, 0.5), "ide-heavy": (0.7, 0.5), "skewed": (0.7, 0.8)}
)
CACE_BASELINES = ("lru", "lfu", "cace")
CACE_ARMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cace-rq1": ("lru", "cace without output"),
        "cace-rq2": ("lru", "cace without output", "cace"),
        "cace-ablation": (
            "cace",
            "cace without recency",
            "cace without reload cost",
            "cace without demand",
            "cace without output",
        ),
    }
)
"""What each question compares, by our names; "cace without output" is its CACE^-P4."""

OPPONENTS = (RAY, "edf-bounded", "sjf-bounded", "plas-waiting")
"""Strong simple rules included in every table of arriving requests, printed or not."""
