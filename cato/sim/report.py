"""Experiment reports: means, paired differences, and targets.

All comparisons use paired seeds: the same seed gives every policy the same arrivals and lengths, so
the difference of two policies has a far smaller error than either mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Setting = Mapping[str, str | float]
"""The settings of a run: `{"rate_per_s": 5.0, "workload": "W1"}`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: metrics of one policy in one setting with one seed.

    `further`: what targets or plots need besides; it is not averaged.
    """

    setting: Setting
    policy: str
    seed: int
    metrics: Mapping[str, float]
    further: Any = None


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric over the seeds; `stderr` is the standard error of the mean."""

    setting: Setting
    policy: str
    metric: str
    mean: float
    stderr: float
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """`policy` minus `baseline`, paired by seed."""

    setting: Setting
    policy: str
    baseline: str
    metric: str
    mean: float
    stderr: float
    n: int


@dataclass(frozen=True, slots=True)
class Target:
    """An expected result and the measured value; `at_least` False: an upper bound."""

    group: int
    text: str
    goal: float
    measured: float
    stderr: float
    at_least: bool = True

    @property
    def is_met(self) -> bool:
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal

    def row(self) -> dict[str, object]:
        """As in JSON: the fields, and whether it is `met`."""
        return asdict(self) | {"met": self.is_met}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an experiment. `simulated` is always true: no engine ran."""

    experiment: str
    seeds: tuple[int, ...]
    means: tuple[Mean, ...]
    differences: tuple[Difference, ...] = ()
    targets: tuple[Target, ...] = ()
    # Further data for plots: curves, histograms. JSON values only.
    extra: Mapping[str, object] = field(default_factory=dict)
    simulated: bool = True

    def to_json(self) -> str:
        """Byte-equal for the same seeds: no clock, no machine. Non-finite numbers become null."""
        body = asdict(self) | {"targets": [t.row() for t in self.targets]}
        return json.dumps(finite(body), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def mean(self, metric: str, policy: str, **setting: str | float) -> Mean:
        """The only matching mean; raise `KeyError` when there is none."""
        for m in self.means:
            if m.metric == metric and m.policy == policy and _matches(m.setting, setting):
                return m
        raise KeyError((metric, policy, setting))

    def difference(
        self, metric: str, policy: str, baseline: str, **setting: str | float
    ) -> Difference:
        """The only matching difference; raise `KeyError` when there is none."""
        for d in self.differences:
            names = (d.metric, d.policy, d.baseline)
            if names == (metric, policy, baseline) and _matches(d.setting, setting):
                return d
        raise KeyError((metric, policy, baseline, setting))


def finite(value: object) -> object:
    """`value` with null in place of nan and infinity, which JSON lacks."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: finite(v) for k, v in value.items()}
        case list() | tuple():
            return [finite(v) for v in value]
        case _:
            return value


def _matches(setting: Setting, wanted: Mapping[str, str | float]) -> bool:
    return all(setting.get(k) == v for k, v in wanted.items())


def setting_words(setting: Setting) -> str:
    """ "workload W1, rate_per_s 5"."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in setting.items()
    )


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; a single value has no standard error (nan)."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def summarize(samples: Iterable[Sample]) -> tuple[Mean, ...]:
    """Means over the seeds, in order of first appearance of settings, policies and metrics."""
    groups: dict[tuple[tuple[tuple[str, str | float], ...], str, str], list[float]] = {}
    for sample in samples:
        for metric, value in sample.metrics.items():
            key = (tuple(sample.setting.items()), sample.policy, metric)
            groups.setdefault(key, []).append(value)
    return tuple(
        Mean(dict(setting), policy, metric, *mean_and_stderr(values), len(values))
        for (setting, policy, metric), values in groups.items()
    )


def compare(
    samples: Iterable[Sample], policy: str, metrics: Sequence[str]
) -> tuple[Difference, ...]:
    """`policy` against every other policy that ran with the same settings and seeds."""
    by_key: dict[tuple[tuple[tuple[str, str | float], ...], int], dict[str, Sample]] = {}
    for sample in samples:
        key = (tuple(sample.setting.items()), sample.seed)
        by_key.setdefault(key, {})[sample.policy] = sample
    gaps: dict[tuple[tuple[tuple[str, str | float], ...], str, str], list[float]] = {}
    for (setting, _), runs in by_key.items():
        if policy not in runs:
            continue
        for baseline, run in runs.items():
            if baseline == policy:
                continue
            for metric in metrics:
                if metric not in run.metrics:  # bounds have attainment only
                    continue
                gap = runs[policy].metrics[metric] - run.metrics[metric]
                gaps.setdefault((setting, baseline, metric), []).append(gap)
    return tuple(
        Difference(dict(setting), policy, baseline, metric, *mean_and_stderr(values), len(values))
        for (setting, baseline, metric), values in gaps.items()
    )
