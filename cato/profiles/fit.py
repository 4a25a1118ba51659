"""Fit the cost model of an engine step (`cato.core.profile.Profile.step_s`) to measured samples.

A sample is a time measured at the caller and the engine steps within it. Two forms are fitted, the
linear one and one in which a step reads the weights; the better one wins. Coefficients are never
negative: a free fit bends lines to attention's square term with a negative base, which predicts
negative times for short prompts. A residual is log(predicted / measured), because a scheduler that
plans 20 ms completions needs them as accurate as 4 s prompts. Outliers (a pause, another process)
count less, by scipy's soft L1 loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cato.core.errors import InputError
from cato.core.profile import Profile

MIN_SAMPLES = 4
"""Minimum number of prompt samples, and of decode steps."""

FIRST_SCALE, LEAST_SCALE = 0.05, 0.003
"""Residuals beyond this count less: at first, and as a minimum once their spread is known."""

NO_WORSE = 1.01
"""A term whose removal raises the cost by less is noise, and is set to 0."""

BETTER = 0.97
"""Share of the linear form's cost that weight reads must explain, to be more than noise."""

_NEGLIGIBLE = 0.003  # of a sample's time
_EXACT = 1e-9  # a cost per sample that counts as zero


@dataclass(frozen=True, slots=True)
class Step:
    """`count` engine steps (or a fraction of one), in the terms of `Profile.step_s`."""

    batch: int
    held_tokens: float
    prompt_tokens: int = 0
    prompts_ended: int = 0
    attended: float = 0.0
    count: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """These steps took `duration_s`, with or without the request's latency."""

    steps: tuple[Step, ...]
    duration_s: float
    has_latency: bool

    def predicted_s(self, profile: Profile) -> float:
        latency_s = profile.latency_s if self.has_latency else 0.0
        return latency_s + sum(
            s.count
            * profile.step_s(s.batch, s.held_tokens, s.prompt_tokens, s.prompts_ended, s.attended)
            for s in self.steps
        )

    @property
    def is_decode(self) -> bool:
        return not any(s.prompt_tokens for s in self.steps)


class _Term(IntEnum):
    """Columns of the fit."""

    BASE = 0
    TOKEN = 1
    ATTENDED = 2
    REQUEST = 3
    CONTEXT = 4
    PROMPT = 5
    LATENCY = 6
    WEIGHTS = 7
    KV = 8


_Array = NDArray[np.float64]
_LINEAR = frozenset(_Term) - {_Term.WEIGHTS, _Term.KV}
_ROOFLINE = frozenset(_Term) - {_Term.CONTEXT}
_NEEDED = frozenset({_Term.BASE, _Term.TOKEN, _Term.WEIGHTS})


def fit(samples: Sequence[Sample], of: Profile, *, knows_latency: bool = True) -> Profile:
    """`of` with the terms fitted to the samples.

    Without `knows_latency`, samples cannot separate a request's latency from its prompt's fixed
    cost: all of it is assigned to the prompt. Raise `InputError` when the samples cannot separate
    the terms.
    """
    _check(samples)
    free = {_Term.LATENCY} if not knows_latency else set[_Term]()
    problem = _Problem.of(samples)
    linear, roofline = (_Form(problem, form - free) for form in (_LINEAR, _ROOFLINE))
    scale = max(LEAST_SCALE, min(linear.spread, roofline.spread))
    linear, roofline = linear.settled(scale), roofline.settled(scale)
    is_linear = linear.cost <= roofline.cost / BETTER + len(samples) * _EXACT
    x = [float(v) for v in (linear if is_linear else roofline).x]
    return replace(
        of,
        prefill_base_s=x[_Term.BASE],
        decode_base_s=x[_Term.BASE],
        prefill_per_batch_token_s=x[_Term.TOKEN],
        prefill_per_token_s=0.0,
        prefill_per_attended_token_s=x[_Term.ATTENDED],
        prefill_per_request_s=x[_Term.PROMPT],
        decode_per_request_s=x[_Term.REQUEST],
        decode_per_context_token_s=x[_Term.CONTEXT],
        weights_read_s=x[_Term.WEIGHTS],
        kv_read_token_s=x[_Term.KV],
        latency_s=x[_Term.LATENCY],
    )


def r2(samples: Sequence[Sample], profile: Profile) -> float:
    """Share of these samples' variance that the profile explains, outliers included."""
    seconds = np.array([s.duration_s for s in samples])
    predicted = np.array([s.predicted_s(profile) for s in samples])
    total = float(np.sum((seconds - seconds.mean()) ** 2))
    error = float(np.sum((predicted - seconds) ** 2))
    return 1.0 - error / total if total > 0 else 1.0 if error < 1e-18 else 0.0


def _check(samples: Sequence[Sample]) -> None:
    decode = [s for s in samples if s.is_decode]
    prompts = [s for s in samples if not s.is_decode]
    for what, some in (("prompts", prompts), ("decode steps", decode)):
        if len(some) < MIN_SAMPLES:
            raise InputError(
                f"a fit needs at least {MIN_SAMPLES} samples of {what}, there are {len(some)}: "
                "measure more batch sizes and lengths"
            )
    if not all(np.isfinite(s.duration_s) and s.duration_s > 0 for s in samples):
        raise InputError("every sample needs a positive time")
    if len({sum(x.prompt_tokens for x in s.steps) for s in prompts}) < 2:
        raise InputError("a fit needs prompts of at least two lengths")
    if len({x.batch for s in decode for x in s.steps}) < 2:
        raise InputError("a fit needs decode steps of at least two batch sizes")


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """The samples as arrays: one row per step, grouped by sample."""

    batch: _Array
    held: _Array
    tokens: _Array
    ended: _Array
    attended: _Array
    count: _Array
    starts: NDArray[np.intp]
    latencies: _Array
    seconds: _Array

    @staticmethod
    def of(samples: Sequence[Sample]) -> _Problem:
        steps = [s for sample in samples for s in sample.steps]
        lengths = [len(sample.steps) for sample in samples]
        return _Problem(
            np.array([s.batch for s in steps], dtype=np.float64),
            np.array([s.held_tokens for s in steps], dtype=np.float64),
            np.array([s.prompt_tokens for s in steps], dtype=np.float64),
            np.array([s.prompts_ended for s in steps], dtype=np.float64),
            np.array([s.attended for s in steps], dtype=np.float64),
            np.array([s.count for s in steps], dtype=np.float64),
            np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp),
            np.array([s.has_latency for s in samples], dtype=np.float64),
            np.array([s.duration_s for s in samples], dtype=np.float64),
        )

    def columns(self, x: _Array) -> _Array:
        """The amount of each term in each sample; `columns(x) @ x` are the predicted times.

        Given which of reading or computing takes longer in each step, the law is linear.
        """
        decodes = self.batch > 0
        tokens, attended = self.tokens, self.attended
        if x[_Term.WEIGHTS] > 0:
            tokens, attended = tokens + self.batch, attended + self.held * decodes
        computed = x[_Term.TOKEN] * tokens + x[_Term.ATTENDED] * attended
        is_computing = computed > x[_Term.WEIGHTS] + x[_Term.KV] * self.held
        rows = np.zeros((len(tokens), len(_Term)))
        rows[:, _Term.BASE] = 1.0
        rows[:, _Term.TOKEN] = tokens * is_computing
        rows[:, _Term.ATTENDED] = attended * is_computing
        rows[:, _Term.REQUEST] = self.batch
        rows[:, _Term.CONTEXT] = self.held * decodes
        rows[:, _Term.PROMPT] = self.ended
        rows[:, _Term.WEIGHTS] = ~is_computing
        rows[:, _Term.KV] = self.held * ~is_computing
        found: _Array = np.add.reduceat(rows * self.count[:, None], self.starts, axis=0)
        found[:, _Term.LATENCY] = self.latencies
        return found

    def guess(self, read_share: float) -> _Array:
        """Terms of the right magnitude; `read_share` of the shortest step reads weights."""
        step_s = float(self.seconds.min())
        longest = int(np.argmax(np.add.reduceat(self.tokens * self.count, self.starts)))
        prompt = float(np.add.reduceat(self.tokens * self.count, self.starts)[longest])
        token_s = float(self.seconds[longest]) / max(1.0, prompt)
        context_s = step_s / 10 / max(1.0, float(np.median(self.held)))
        x = np.zeros(len(_Term))
        x[_Term.BASE], x[_Term.WEIGHTS] = (1 - read_share) * step_s, read_share * step_s
        x[_Term.TOKEN], x[_Term.ATTENDED] = token_s, 0.1 * token_s / max(1.0, prompt)
        x[_Term.REQUEST], x[_Term.PROMPT] = step_s / 20, step_s / 10
        x[_Term.LATENCY], x[_Term.CONTEXT], x[_Term.KV] = step_s / 4, context_s, context_s
        return x


class _Form:
    """One form of the law, with the terms that are not fixed at 0."""

    def __init__(self, problem: _Problem, terms: frozenset[_Term]) -> None:
        self._problem, self._terms = problem, sorted(terms)
        shares = (0.1, 0.5, 0.9) if _Term.WEIGHTS in terms else (0.0,)
        starts = [problem.guess(share) for share in shares]
        found = [self._solved(start, FIRST_SCALE) for start in starts]
        self.cost, self.x = min(found, key=lambda f: f[0])

    @property
    def spread(self) -> float:
        """Spread of the residuals: deviation of a normal distribution with the same median."""
        return 1.4826 * float(np.median(np.abs(self._residuals(self.x))))

    def settled(self, scale: float) -> _Form:
        """Refitted, with residuals beyond `scale` counting less, and without noise terms."""
        self.cost, self.x = self._solved(np.maximum(self.x, 1e-3 * self._problem.guess(0.5)), scale)
        shares = self._shares()
        for term in sorted(self._terms, key=lambda t: shares[t]):
            if term in _NEEDED:
                continue
            kept = self._terms
            self._terms = [t for t in kept if t != term]
            cost, x = self._solved(self.x, scale)
            most = NO_WORSE * self.cost + len(self._problem.seconds) * _EXACT
            if cost <= most or shares[term] < _NEGLIGIBLE:
                self.cost, self.x = cost, x
            else:
                self._terms = kept
        return self

    def _shares(self) -> _Array:
        """The largest share of each term in any sample."""
        parts = self._problem.columns(self.x) * self.x
        found: _Array = (parts / parts.sum(axis=1, keepdims=True)).max(axis=0)
        return found

    def _residuals(self, x: _Array) -> _Array:
        problem = self._problem
        found: _Array = np.log(problem.columns(x) @ x / problem.seconds)
        return found

    def _solved(self, start: _Array, scale: float) -> tuple[float, _Array]:
        # Imported here: every engine replica imports this module, and few fit a profile.
        from scipy.optimize import least_squares

        terms = self._terms
        unit = np.maximum(start, 1e-6 * self._problem.guess(0.5))[terms]

        def whole(u: _Array) -> _Array:
            x = np.zeros(len(_Term))
            x[terms] = u * unit
            return x

        def residuals(u: _Array) -> _Array:
            return self._residuals(whole(u))

        def jacobian(u: _Array) -> _Array:
            x = whole(u)
            columns = self._problem.columns(x)
            found: _Array = columns[:, terms] * unit / (columns @ x)[:, None]
            return found

        solved = least_squares(
            residuals,
            np.ones(len(terms)),
            jacobian,
            bounds=(0.0, np.inf),
            loss="soft_l1",
            f_scale=scale,
            x_scale="jac",
            max_nfev=200,
        )
        return float(solved.cost), whole(solved.x)
