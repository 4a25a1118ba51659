"""One session that a user plays: its turns, the blocks of their prompts, and their SLOs.

Prompts become chains of blocks of 64 tokens; sessions with equal tools and system prompts share
these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.core.snapshot import PREFIX_BLOCK_TOKENS
from cato.sim.session_traces import MAX_GAP_S, RecordedSession
from cato.sim.tasks import SimNode, SimTask

AGENT = TaskName("agent")

# A turn is in time when its first token comes within the larger of these and its answer keeps pace.
LEAST_TTFT_S, TTFT_FACTOR, TPOT_S = 2.0, 2.0, 0.04
# Claude Code disconnects when it has no first token by then.
PATIENCE_S = 300.0
# Then, or when it is refused, it asks again, so many times before it fails.
RETRIES = 10


@dataclass(frozen=True, slots=True)
class TurnRules:
    """A turn's SLO, and its client's patience; `scale` multiplies all times."""

    pool: PoolName
    profile: Profile
    length: LengthBelief
    scale: float = 1.0

    @property
    def expected_tokens(self) -> int:
        return max(1, round(self.length.left_mean(0)))

    def task(
        self, playing: Playing, index: int, now_s: float, draw: float
    ) -> tuple[SimTask, float, int]:
        """The task of a turn that begins now, its unloaded answer time with the session's blocks
        cached, and the number of those tokens."""
        turn, profile = playing.recorded.turns[index], self.profile
        blocks = playing.blocks(index)
        reused = min(turn.hit_tokens // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS, len(blocks) * 64)
        reused = min(reused, turn.prompt_tokens - 1)
        warm_s = profile.first_token_s(turn.prompt_tokens, 1, reused)
        context_tokens = turn.prompt_tokens + turn.output_tokens / 2
        answer_s = (turn.output_tokens - 1) * profile.decode_step_s(1, context_tokens)
        node = SimNode(
            self.pool,
            turn.prompt_tokens,
            turn.output_tokens,
            self.expected_tokens,
            self.length,
            blocks=blocks,
            calls_tool=playing.calls_tool(index),
        )
        task = SimTask(
            playing.turn_id(index),
            AGENT,
            now_s,
            SloMetric.TTFT,
            max(self.scale * LEAST_TTFT_S, TTFT_FACTOR * warm_s),
            (node,),
            (draw,),
            tpot_target_s=self.scale * TPOT_S,
            patience_s=self.scale * PATIENCE_S,
            session=f"s{playing.number}/{turn.agent}",
        )
        return task, warm_s + answer_s, reused


class Playing:
    """One session that a user plays: which turns have ended, and the blocks of their prompts.

    `then` is called at its end. Turns before the `first` count as ended.
    """

    def __init__(
        self,
        recorded: RecordedSession,
        number: int,
        began_at_s: float,
        target_s: float,
        then: Callable[[], None],
        first: int = 0,
    ) -> None:
        self.recorded = recorded
        self.number = number
        self.began_at_s = began_at_s
        self.target_s = target_s
        self.then = then
        self._first = first
        self.ended: set[int] = set(range(first))
        self.left = len(recorded.turns) - first
        self._blocks: dict[int, tuple[int, ...]] = {}
        self.followers: dict[int, list[int]] = {}
        for i, turn in enumerate(recorded.turns):
            for j in turn.after:
                self.followers.setdefault(j, []).append(i)

    def first_turns(self) -> list[int]:
        """Turns that wait for no other."""
        return [
            i
            for i, turn in enumerate(self.recorded.turns)
            if i not in self.ended and self.ended.issuperset(turn.after)
        ]

    def gap_s(self, index: int, scale: float) -> float:
        """Gap before the turn, after the turns that it waits for; 0 at the start of a session."""
        turn = self.recorded.turns[index]
        if index == 0 or (turn.after and max(turn.after) < self._first):
            return 0.0
        return min(scale * MAX_GAP_S, turn.gap_s)

    def turn_id(self, index: int) -> str:
        return f"s{self.number}-{index}"

    def end(self, index: int) -> list[int]:
        """A turn has its answer: returns the turns that now wait only for their gaps."""
        self.ended.add(index)
        self.left -= 1
        turns = self.recorded.turns
        followers = self.followers.get(index, ())
        return [i for i in followers if self.ended.issuperset(turns[i].after)]

    def calls_tool(self, index: int) -> bool:
        turns = self.recorded.turns
        return any(turns[i].follows_tool for i in self.followers.get(index, ()))

    def blocks(self, index: int) -> tuple[int, ...]:
        """Names of the whole blocks of a prompt; the turns before it must all have been asked."""
        turn = self.recorded.turns[index]
        kept: tuple[int, ...] = ()
        if turn.base is not None:
            kept = self._of(turn.base)[: -(-turn.hit_tokens // PREFIX_BLOCK_TOKENS)]
        own = []
        for block in range(len(kept), turn.prompt_tokens // PREFIX_BLOCK_TOKENS):
            end = (block + 1) * PREFIX_BLOCK_TOKENS
            if end <= turn.tools_tokens:
                own.append(-(turn.tools_tokens << 16 | block))
            elif end <= turn.tools_tokens + turn.system_tokens:
                own.append(-(turn.tools_tokens << 40 | turn.system_tokens << 16 | block))
            else:
                own.append(self.number << 32 | index << 16 | block)
        self._blocks[index] = (*kept, *own)
        return self._blocks[index]

    def _of(self, index: int) -> tuple[int, ...]:
        known = self._blocks.get(index)
        return self.blocks(index) if known is None else known
