"""Fits a profile to what a sweep measured, and says how well it predicts it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.profile import UNMEASURED, Profile
from cato.measure.calls import DecodeStep, FirstToken
from cato.measure.points import STALLED_STREAMS, Target
from cato.profiles.fit import Sample, Step, fit, r2


@dataclass(frozen=True, slots=True)
class Stall:
    """How a prompt of `prompt_tokens` slowed `streams` whose steps took `step_s` without it.

    `stall_s`: the added delay of their tokens; negative when the machine was faster than before and
    after. `first_token_s`: the prompt's own time to first token. `held_tokens`: the sum of the
    streams' contexts.
    """

    prompt_tokens: int
    step_s: float
    stall_s: float
    first_token_s: float
    streams: int = STALLED_STREAMS
    held_tokens: float = 0.0


@dataclass(slots=True)
class Measured:
    """Results of a sweep. `disturbed` counts measurements taken beside other work."""

    first_tokens: list[FirstToken] = field(default_factory=list)
    decode: list[DecodeStep] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    chars: int = 0
    text_tokens: int = 0
    rounds: int = 0
    points: int = 0
    disturbed: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point: its measured median and the fitted profile's prediction, in seconds."""

    what: str
    batch: int
    tokens: int
    samples: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative; positive when the profile predicts too much."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The fitted profile and how well it predicts the measurements."""

    profile: Profile
    prefill_r2: float
    decode_r2: float
    comparisons: tuple[Comparison, ...]
    samples: int


def evaluate(target: Target, measured: Measured) -> SweepResult:
    """Fit a profile to the measurements; raise `InputError` when there are too few."""
    prompts = [_first_sample(target, f) for f in measured.first_tokens]
    decode = [_decode_sample(d) for d in measured.decode]
    beside = [sample for s in measured.stalls for sample in _stall_samples(target, s)]
    blank = replace(
        UNMEASURED,
        model=target.model,
        accelerator=target.accelerator,
        engine=target.engine,
        kv_capacity_tokens=target.kv_capacity_tokens or target.max_running * target.context_tokens,
        max_running=target.max_running,
        context_tokens=target.context_tokens,
        load_s=target.load_s,
        step_tokens=target.step_tokens,
        block_tokens=target.block_tokens or BLOCK_TOKENS,
    )
    profile = fit([*prompts, *decode, *beside], blank, knows_latency=bool(beside))
    if measured.text_tokens > 0:
        profile = replace(profile, chars_per_token=measured.chars / measured.text_tokens)
    samples = len(measured.first_tokens) + len(measured.decode) + len(measured.stalls)
    comparisons = _comparisons(target, profile, measured)
    return SweepResult(profile, r2(prompts, profile), r2(decode, profile), comparisons, samples)


def with_host_memory(profile: Profile, used: Profile, host_tokens: int) -> Profile:
    """`profile` with what `used` says of KV blocks outside the accelerator's memory.

    No sweep measures that. `host_tokens`: what the engine says that the host's memory holds (0: it
    does not say).
    """
    return replace(
        profile,
        host_capacity_tokens=host_tokens or used.host_capacity_tokens,
        host_load_token_s=used.host_load_token_s,
        kv_token_bytes=used.kv_token_bytes,
        fetch_token_s=used.fetch_token_s,
    )


def prompt_steps(
    target: Target, prompt_tokens: int, cached_tokens: int, streams: int = 0, held: float = 0.0
) -> list[Step]:
    """The steps in which the engine computes one prompt, alone or beside `streams` that decode."""
    most = max(1, (target.step_tokens or prompt_tokens) - streams)
    if streams and target.prompt_cap_tokens:
        most = min(most, target.prompt_cap_tokens)
    steps, done = [], cached_tokens
    while done < prompt_tokens:
        piece = min(most, prompt_tokens - done)
        is_last = done + piece == prompt_tokens
        attended = piece * (done + piece / 2)
        steps.append(Step(streams, held + done, piece, int(is_last), attended))
        done += piece
    return steps


def _first_sample(target: Target, first: FirstToken) -> Sample:
    steps = prompt_steps(target, first.prompt_tokens, first.cached_tokens)
    return Sample(tuple(steps), first.duration_s, has_latency=True)


def _decode_sample(step: DecodeStep) -> Sample:
    one = Step(step.batch, step.batch * step.context_tokens)
    return Sample((one,), step.step_s, has_latency=False)


def _stall_samples(target: Target, stall: Stall) -> list[Sample]:
    """The steps shared by streams and prompt, and the prompt's way through them.

    A prompt beside streams waits for half a step on average, then shares the next ones.
    """
    streams, held = stall.streams, stall.held_tokens
    mixed = tuple(prompt_steps(target, stall.prompt_tokens, 0, streams, held))
    waits = Step(streams, held, count=0.5)
    mixed_s = stall.stall_s + len(mixed) * stall.step_s
    found = [Sample((waits, *mixed), stall.first_token_s, has_latency=True)]
    if mixed_s > 0:  # the machine may have been faster than before and after
        found.append(Sample(mixed, mixed_s, has_latency=False))
    return found


def _comparisons(target: Target, profile: Profile, measured: Measured) -> tuple[Comparison, ...]:
    """One for each point, sorted by kind and size."""
    found: dict[tuple[str, int, int], list[tuple[float, Sample]]] = {}
    for first in measured.first_tokens:
        what = "first token, cached" if first.cached_tokens else "first token"
        sample = _first_sample(target, first)
        key = (what, 1, first.prompt_tokens)
        found.setdefault(key, []).append((first.duration_s, sample))
    for step in measured.decode:
        # Contexts of one point differ by a token or two between rounds.
        key = ("decode step", step.batch, round(step.context_tokens / 16) * 16)
        found.setdefault(key, []).append((step.step_s, _decode_sample(step)))
    for stall in measured.stalls:
        sample = _stall_samples(target, stall)[0]
        key = ("first token beside streams", stall.streams, stall.prompt_tokens)
        found.setdefault(key, []).append((stall.first_token_s, sample))
    rows = []
    for (what, batch, tokens), pairs in found.items():
        measured_s = statistics.median(s for s, _ in pairs)
        predicted_s = statistics.median(sample.predicted_s(profile) for _, sample in pairs)
        rows.append(Comparison(what, batch, tokens, len(pairs), measured_s, predicted_s))
    kinds = list(dict.fromkeys(row.what for row in rows))
    return tuple(sorted(rows, key=lambda r: (kinds.index(r.what), r.batch, r.tokens)))
