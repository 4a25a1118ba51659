"""Users who play recorded sessions of coding agents on a few equal accelerators.

A trace's sessions are sorted by SHA-256 of their ids. Constants were chosen on the first half; the
studies play the second. Turns of the first 900 s are not counted.

Engines are stock vLLM, vLLM with the limits for prompts that CATO sets, or vLLM with CATO's
due-date scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import nan
from pathlib import Path

import numpy as np

from cato.config.paths import resolve
from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.pool.prefill import MOST_S
from cato.core.profile import Profile
from cato.core.topology import CARD_STEP_TOKENS, card_prompt_tokens
from cato.lab.study import NO_POLICIES, Cell
from cato.profiles.load import load_profile
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.report import Setting
from cato.sim.session_traces import RecordedSession, read_sessions
from cato.sim.sessions import PlayedTurn, Users

POOL = PoolName("agents")


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine computes prompts: tokens per step, the most of them for one prompt beside
    others (0: all; None: as many as CATO chooses by the profile), and the time for prompts per step
    by due date (0: by arrival).
    """

    chunk_tokens: int
    prompt_cap_tokens: int | None = 0
    prefill_step_s: float = 0.0


# vLLM's token budget of a step on a large GPU; what CATO starts vLLM with on a GPU; and
# `scheduler: due-date`.
STOCK = Engine(8192)
LIMITS = Engine(CARD_STEP_TOKENS, None)
BY_DUE_DATE = Engine(CARD_STEP_TOKENS, prefill_step_s=MOST_S)


@dataclass(frozen=True, slots=True)
class Card:
    """An assumed accelerator: the name of its file in `profiles/`, and whether KV blocks evicted
    from its cache go to host memory. `users`: the number that sticky routing serves, where the
    search begins. `fetches`: engines fetch blocks from each other's memories, as fast as from the
    host's. `goal`: users of the default over those of sticky routing with stock engines.
    """

    profile: str
    users: float
    has_host_memory: bool = False
    fetches: bool = False
    engine: Engine = STOCK
    goal: float = 1.0


_LARGE, _SMALL = "reference-large-32b@gpu-80gb", "reference-small-7b@gpu-24gb"
STOCK_CARDS = {
    "large": Card(_LARGE, 6.0),
    "large + host": Card(_LARGE, 11.0, has_host_memory=True),
    "small": Card(_SMALL, 3.0),
    "small + host": Card(_SMALL, 5.0, has_host_memory=True),
}


def _with(words: str, engine: Engine, *goals: float) -> dict[str, Card]:
    """The stock cards with another engine and these goals."""
    return {
        name + words: replace(card, users=card.users * goal, engine=engine, goal=goal)
        for (name, card), goal in zip(STOCK_CARDS.items(), goals, strict=True)
    }


_LIMITED, _DUE, FETCH = ", limits", ", due date", " + fetch"
LIMITED_CARDS = _with(_LIMITED, LIMITS, 1.12, 1.2, 1.25, 1.4)
DUE_CARDS = _with(_DUE, BY_DUE_DATE, 1.3, 1.5, 1.4, 1.6)
# Settings that no real engine is started with.
FETCHING_CARDS = {
    name.replace(_DUE, FETCH + _DUE): replace(card, users=1.2 * card.users, fetches=True, goal=1.75)
    for name, card in DUE_CARDS.items()
    if card.has_host_memory
}
CARDS = STOCK_CARDS | LIMITED_CARDS | DUE_CARDS | FETCHING_CARDS
REPLICAS = 4
# Engines' blocks have 16 tokens; traces record 64.
BLOCK_TOKENS = 64
WARM_UP_S, COUNTED_S = 900.0, 3300.0
# Time that the last turns get to end.
GRACE_S = 60.0
METRICS = (
    "turns",
    "in_time",
    "refused",
    "hit_rate",
    "ttft_s_p50",
    "ttft_s_p95",
    "ttft_s_max",
    "turn_rate",
)
"""What `metrics_of` measures."""
# Parts of a trace.
TUNED_ON, REPORTED, ALL = "tuned on", "reported", "all"
STICKY = "sticky"


@cache
def halves(trace: Path) -> tuple[tuple[RecordedSession, ...], tuple[RecordedSession, ...]]:
    """The sessions used for tuning, and those reported on."""
    sessions = read_sessions(trace)
    middle = len(sessions) // 2
    return tuple(sessions[:middle]), tuple(sessions[middle:])


def check_trace(options: Options) -> None:
    """Read the recorded sessions; raise `InputError` when that fails."""
    halves(options.needed("trace"))


@cache
def card_profile(card: str) -> Profile:
    """Profile of one of `CARDS`."""
    known = CARDS[card]
    profile = load_profile(resolve(f"profiles/{known.profile}.yaml"))
    fetch_token_s = profile.host_load_token_s if known.fetches else 0.0
    return replace(profile, fetch_token_s=fetch_token_s)


def cell_of(
    card: str,
    profile: Profile,
    users: float,
    trace: Path | None,
    has_host_memory: bool = False,
    part: str = REPORTED,
    engine: Engine = STOCK,
) -> Cell:
    """This many users per accelerator. Without a trace it cannot be measured."""
    prompt_cap_tokens = engine.prompt_cap_tokens
    if prompt_cap_tokens is None:
        prompt_cap_tokens = card_prompt_tokens(profile)
    fleet = PoolSetup(
        POOL,
        (profile,) * REPLICAS,
        NO_POLICIES,
        chunk_tokens=engine.chunk_tokens,
        cache_block_tokens=BLOCK_TOKENS,
        prompt_cap_tokens=prompt_cap_tokens,
        prefill_step_s=engine.prefill_step_s,
        host_memory=has_host_memory,
    )
    setting: Setting = {"profile": card, "users_per_card": users}
    arms = () if engine == STOCK else (STICKY,)
    return Cell(setting, fleet, partial(measure, trace, users, part), arms)


def measure(
    trace: Path | None, users_per_card: float, part: str, fleet: PoolSetup, seed: int
) -> dict[str, float]:
    """Play a part of the trace: the tuning half, the reported half, or all."""
    if trace is None:
        raise InputError("this experiment needs --trace FILE")
    tuned_on, reported = halves(trace)
    sessions = {TUNED_ON: tuned_on, REPORTED: reported, ALL: (*tuned_on, *reported)}[part]
    if not sessions:
        raise InputError(f"{trace}: needs at least two sessions, one to tune on and one to report")
    users = max(1, round(users_per_card * len(fleet.profiles)))
    player = Users(sessions, users, fleet, length_belief(tuned_on or reported), seed)
    end_s = WARM_UP_S + COUNTED_S
    return metrics_of(player.run(end_s + GRACE_S), WARM_UP_S, end_s)


def length_belief(sessions: Sequence[RecordedSession]) -> LengthBelief:
    """Belief of an answer's length: the distribution of the other half's lengths."""
    return LengthBelief.of([t.output_tokens for s in sessions for t in s.turns])


def metrics_of(played: Sequence[PlayedTurn], begin_s: float, end_s: float) -> dict[str, float]:
    """Metrics of the turns begun from `begin_s` to `end_s`, played for `GRACE_S` more. `hit_rate`
    is a fraction of prompt tokens.

    `turn_rate` counts the time so far of turns without an answer, so that it is not better where
    slow ones never end.
    """
    counted = [p for p in played if begin_s <= p.outcome.task.arrived_at_s < end_s]
    done = [p for p in counted if p.outcome.is_finished]
    ttft_s = [p.outcome.ttft_s for p in counted if p.outcome.ttft_s == p.outcome.ttft_s]
    prompt_tokens = sum(p.outcome.task.nodes[0].prompt_tokens for p in done)
    cached_tokens = sum(p.outcome.cached_tokens for p in done)
    alone_s = actual_s = 0.0
    for p in counted:
        so_far_s = end_s + GRACE_S - p.outcome.task.arrived_at_s
        took_s = p.took_s if p.took_s == p.took_s else so_far_s
        alone_s += p.gap_s + min(p.unloaded_s, took_s)
        actual_s += p.gap_s + took_s
    n = len(counted)
    return {
        "turns": float(n),
        "in_time": sum(p.outcome.is_met for p in counted) / n if n else nan,
        "refused": sum(p.outcome.refused for p in counted) / n if n else nan,
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else nan,
        "ttft_s_p50": float(np.quantile(ttft_s, 0.5)) if ttft_s else nan,
        "ttft_s_p95": float(np.quantile(ttft_s, 0.95)) if ttft_s else nan,
        "ttft_s_max": max(ttft_s, default=nan),
        "turn_rate": alone_s / actual_s if actual_s else nan,
    }
