"""Session memory of an ingress: counts and hashes only the new part of each turn's prompt.

For each session's latest prompt it keeps a hash per section, estimated tokens, block hashes, and
the ratio of the engine's count to the estimate. It keeps no text. All of it is a cache: an ingress
that has not seen a session reads the whole prompt.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cato.core.session import Prompt
from cato.wire.counting import SAMPLED_CHARS, SECTION_TOKENS, estimated_tokens
from cato.wire.prefix import chain

# Sessions of one ingress replica; one of 200,000 tokens takes about 40 kB.
MOST_SESSIONS = 1_000
# Plausible ratios of the engine's count to the estimate; others are ignored. A chat template that
# leaves out tools and system text gives about 0.01.
LEAST_RATIO, MOST_RATIO = 0.02, 10.0
# The same for the text that a turn adds: blanks and rules take fewer tokens than the estimate, and
# a chat template may leave out reasoning. Smaller additions are not learnt from.
LEAST_GROWTH, MOST_GROWTH = 0.2, 2.0
LEAST_NEW_TOKENS = 100.0
# A turn that adds this many tokens has weight 0.5 in the growth ratio.
GROWTH_TOKENS = 1000.0
# At least this many counts of earlier prompts' sections are kept beside the latest ones.
SPARE_SECTIONS = 64
# Weight of a new observation in the ratio of a kind of clients.
_KIND_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Hashing:
    """How blocks are hashed: characters per block, and the model and salt in the first hash."""

    block_chars: int
    model: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt as read, with the estimates that the engine's count will be compared to.

    `raw_tokens` is the estimate without correction. `counted_tokens` is the engine's earlier count
    of the sections that it has seen; `uncounted_raw_tokens` is the raw estimate of the others.
    """

    prompt: Prompt
    raw_tokens: float
    uncounted_raw_tokens: float
    counted_tokens: float = 0.0

    @property
    def is_corrected(self) -> bool:
        return self.counted_tokens > 0


@dataclass(slots=True)
class _Session:
    """The latest prompt: per section its hash in this process; characters and tokens up to its end.

    `counted` maps section hashes to their share of the engine's count. It includes sections of
    earlier prompts: files move within prompts, and side calls do not disturb the main loop's.
    `growth` is the ratio of the engine's count to the estimate for the text that turns add.
    """

    hashing: Hashing
    counted: dict[int, float] = field(default_factory=dict)
    growth: float | None = None
    hashes: list[int] = field(default_factory=list)
    chars: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    blocks: array[int] = field(default_factory=lambda: array("Q"))

    def raw(self) -> Iterator[tuple[int, float]]:
        """Each section's hash and token estimate."""
        ends = zip(self.tokens, (0.0, *self.tokens), strict=False)
        return zip(self.hashes, (end - begin for end, begin in ends), strict=True)


class SessionMemory:
    """The sessions of one ingress replica, in an LRU cache."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ratios: OrderedDict[str, float] = OrderedDict()
        self._growths: OrderedDict[str, float] = OrderedDict()  # by model

    def read(
        self,
        session: str,
        sections: Sequence[str],
        hashing: Hashing,
        *,
        kind: str,
        scale: float = 1.0,
    ) -> Reading:
        """Read the prompt with these sections as the next one of `session`.

        `kind` names clients with similar counts (a client and a model): what one session teaches
        serves the next. `scale` corrects the estimate until something was learnt. Turns add mostly
        tool output; its ratio is learnt per model over all clients.
        """
        known = self._sessions.get(session)
        if known is None or known.hashing != hashing:
            known = _Session(hashing)
            self._keep(session, known)
        self._sessions.move_to_end(session)
        hashes = [hash(section) for section in sections]
        same = _common(hashes, known.hashes)
        shared = _extend(known, hashes, sections, same)
        raw_tokens = known.tokens[-1] if known.tokens else 0.0
        whole = self._ratios.get(kind) or scale
        growth = (known.growth if known.counted else None) or whole
        counted_tokens = uncounted_raw_tokens = new_tokens = 0.0
        for i, (hash_, raw) in enumerate(known.raw()):
            counted = known.counted.get(hash_)
            if counted is None:
                uncounted_raw_tokens += raw
            else:
                counted_tokens += counted
            if i >= same:
                new_tokens += raw * growth if counted is None else counted
        tokens = max(1, round(counted_tokens + uncounted_raw_tokens * growth))
        prompt = Prompt(
            tokens=tokens,
            new_tokens=max(1, min(tokens, round(new_tokens))),
            prefix=tuple(known.blocks),
            session=session,
            shared_blocks=shared,
        )
        return Reading(prompt, raw_tokens, uncounted_raw_tokens, counted_tokens)

    def learn(self, session: str, kind: str, reading: Reading, prompt_tokens: int) -> None:
        """The engine counted `prompt_tokens` in the prompt of `reading`."""
        if prompt_tokens <= 0 or reading.raw_tokens <= 0:
            return
        ratio = prompt_tokens / reading.raw_tokens
        if not LEAST_RATIO <= ratio <= MOST_RATIO:
            return
        self._note(self._ratios, kind, ratio, _KIND_WEIGHT)
        known = self._sessions.get(session)
        if known is None or not known.tokens or known.tokens[-1] != reading.raw_tokens:
            return  # another call of the session was read meanwhile
        added, seen = reading.uncounted_raw_tokens, known.growth or _within(ratio)
        if not reading.is_corrected:
            # First prompt: start with the model's known growth, else with this ratio.
            known.growth = self._growths.get(known.hashing.model, _within(ratio))
        elif added >= LEAST_NEW_TOKENS:
            seen = _within((prompt_tokens - reading.counted_tokens) / added)
            weight = added / (added + GROWTH_TOKENS)
            old = seen if known.growth is None else known.growth
            known.growth = old + weight * (seen - old)
            self._note(self._growths, known.hashing.model, seen, weight)
        _share(known, seen, prompt_tokens)

    def _note(self, ratios: OrderedDict[str, float], name: str, seen: float, weight: float) -> None:
        before = ratios.pop(name, seen)
        ratios[name] = before + weight * (seen - before)
        while len(ratios) > self._most:
            ratios.popitem(last=False)

    def _keep(self, session: str, known: _Session) -> None:
        self._sessions[session] = known
        while len(self._sessions) > self._most:
            self._sessions.popitem(last=False)


def _within(growth: float) -> float:
    return min(max(growth, LEAST_GROWTH), MOST_GROWTH)


def _share(known: _Session, growth: float, prompt_tokens: int) -> None:
    """Split the engine's count over the sections, by their earlier counts or estimates."""
    shares = {d: known.counted.get(d, raw * growth) for d, raw in known.raw()}
    whole = sum(shares[hash_] for hash_ in known.hashes)
    known.counted |= {hash_: share * prompt_tokens / whole for hash_, share in shares.items()}
    if len(known.counted) > 2 * len(shares) + SPARE_SECTIONS:
        known.counted = {hash_: known.counted[hash_] for hash_ in shares}


def _common(hashes: Sequence[int], known: Sequence[int]) -> int:
    """How many leading sections are unchanged."""
    same = 0
    while same < min(len(hashes), len(known)) and hashes[same] == known[same]:
        same += 1
    return same


def _extend(known: _Session, hashes: list[int], sections: Sequence[str], same: int) -> int:
    """Make `known` the prompt of `sections`, whose first `same` are unchanged; return the number
    of unchanged blocks."""
    fresh = sections[same:]
    chars = known.chars[same - 1] if same else 0
    tokens = known.tokens[same - 1] if same else 0.0
    size = known.hashing.block_chars
    kept = min(len(known.blocks), chars // size)
    # The text after the last kept block may begin inside an unchanged section.
    first = same
    while first and known.chars[first - 1] > kept * size:
        first -= 1
    begin = known.chars[first - 1] if first else 0
    text = "\n".join(sections[first:])
    fresh_chars = sum(map(len, fresh))
    density = 0.0
    if fresh_chars > SAMPLED_CHARS:  # one estimate for all: long texts are sampled
        density = estimated_tokens(text[chars - begin :]) / fresh_chars
    del known.chars[same:], known.tokens[same:], known.blocks[kept:]
    for section in fresh:
        chars += len(section) + 1  # the line break that follows
        estimate = len(section) * density if density else estimated_tokens(section)
        tokens += estimate + SECTION_TOKENS
        known.chars.append(chars)
        known.tokens.append(tokens)
    known.hashes = hashes
    rest = text[kept * size - begin :]
    model, salt = known.hashing.model, known.hashing.salt
    known.blocks.extend(chain(rest, size, model, salt, known.blocks[-1:]))
    return kept
