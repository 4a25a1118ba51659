"""What to measure of an engine: points that fit its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cato.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Target:
    """The engine to measure, and the limits that the sweep must keep.

    `kv_capacity_tokens` 0 means unknown. `step_tokens` is the engine's token budget of a step (0:
    none), `prompt_cap_tokens` the most that one prompt gets of it beside other requests (0: all),
    `block_tokens` the block size of its prefix cache (0: it has none).
    """

    model: str
    accelerator: str
    engine: str
    context_tokens: int
    max_running: int
    kv_capacity_tokens: int
    load_s: float
    step_tokens: int = 0
    prompt_cap_tokens: int = 0
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Lengths beyond the engine's limits are left out.

    After a point that took longer than `point_limit_s`, larger ones of its kind are skipped. No
    round starts that would end after `total_s` (estimated by the last one), but at least one round
    is always measured.
    """

    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]
    stalling_prompt_tokens: tuple[int, ...]
    rounds: int
    point_limit_s: float
    total_s: float


QUICK = Plan(
    prompt_tokens=(32, 128, 384, 896, 1792),
    cached_tokens=(256, 768, 3072),
    contexts=(64, 384, 1536),
    concurrencies=(1, 4, 8),
    stalling_prompt_tokens=(32, 192),
    rounds=3,
    point_limit_s=2.0,
    total_s=40.0,
)
FULL = Plan(
    prompt_tokens=(16, 32, 64, 128, 256, 448, 704, 960, 1536, 2048, 4096, 8192, 24576, 65536),
    cached_tokens=(128, 384, 768, 2048, 8192, 32768),
    contexts=(48, 192, 448, 832, 1536, 4096, 8192, 32768),
    concurrencies=(1, 2, 4, 8, 16, 32, 64),
    stalling_prompt_tokens=(16, 64, 256),
    rounds=7,
    point_limit_s=20.0,
    total_s=600.0,
)
MIN_PROMPT_TOKENS = 16
# Tokens that a request generates while its whole batch decodes.
WINDOW_TOKENS = 24
# vLLM mixes prompt chunks of at least this many tokens with decode steps: an early request of a
# batch generates about one token per chunk while the others' prompts are processed.
PROMPT_PIECE_TOKENS = 128
# Prompts, one after the other, beside running streams; the streams run alone before and after.
STALLING_PROMPTS = 6
STALLED_STREAMS = 4
STALLED_TOKENS = 512
# New tokens after the cached prefix.
NEW_TOKENS = 24


class Kind(Enum):
    FIRST_TOKEN = "first token, prompt"
    CACHED = "first token after cached"
    DECODE = "decode step, context"
    STALL = "stall by prompts of"


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure: a prompt, a batch that decodes, or prompts beside a stream."""

    kind: Kind
    batch: int
    tokens: int

    @property
    def work(self) -> int:
        return self.batch * self.tokens

    @property
    def output_tokens(self) -> int:
        """Enough that the first of a batch still decodes when the last gets its first token."""
        return WINDOW_TOKENS + self.batch + self.work // PROMPT_PIECE_TOKENS

    @property
    def what(self) -> str:
        return f"{self.kind.value} {self.tokens} x {self.batch}"


def points_of(target: Target, plan: Plan) -> list[Point]:
    """All points that fit the engine, the smallest work first."""
    capacity = target.kv_capacity_tokens or target.max_running * target.context_tokens
    points = [Point(Kind.FIRST_TOKEN, 1, n) for n in plan.prompt_tokens]
    if target.block_tokens:
        # Whole blocks, at least one: shorter prefixes are never found in the cache.
        blocks = {max(1, n // target.block_tokens) for n in plan.cached_tokens}
        points += [Point(Kind.CACHED, 1, b * target.block_tokens) for b in sorted(blocks)]
    points += [Point(Kind.DECODE, b, c) for b in plan.concurrencies for c in plan.contexts]

    def fits(point: Point) -> bool:
        more = {Kind.DECODE: point.output_tokens, Kind.CACHED: NEW_TOKENS + 1}
        tokens = point.tokens + more.get(point.kind, 1)
        return (
            point.batch <= target.max_running
            and tokens < target.context_tokens
            and point.batch * tokens <= capacity
        )

    fitting = sorted(
        (p for p in points if fits(p)), key=lambda p: (p.kind is Kind.DECODE, p.work, p.batch)
    )
    if not fitting:
        raise InputError(
            f"nothing to measure fits {target.context_tokens} tokens of context and "
            f"{target.max_running} running requests"
        )
    held = STALLED_STREAMS * (MIN_PROMPT_TOKENS + STALLED_TOKENS)
    if target.max_running >= 2:
        prompts = (
            n
            for n in plan.stalling_prompt_tokens
            if n + 1 < target.context_tokens and held + n <= capacity
        )
        fitting += [Point(Kind.STALL, STALLING_PROMPTS, n) for n in prompts]
    return fitting
