"""Beliefs about the length of a node's next output, learnt from its finished invocations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import Excuse, NodeReceipt, NodeStatus, SlaReceipt
from cato.core.record import record
from cato.estimators.censoring import completed
from cato.estimators.length_bound import LengthFeatures, LengthRecord, MarginalLengths, beats
from cato.estimators.length_forest import CompiledForest, ForestLengths, ForestSettings
from cato.estimators.prompt_features import NAMES, Asked, features_of
from cato.estimators.survival import Floats, Ints

Key = tuple[TaskName, NodeId, str]
"""Task, node and model: lengths are learnt for each such key."""

ENDED = frozenset({"stop", "tool_calls"})
"""Finish reasons of an output that ended by itself."""
CUT = "length"
"""Finish reason of an output that reached its limit: its length is only known to be longer."""
STOPPED = "stopped"
"""In place of a finish reason, of an output that CATO stopped at a deadline, or that was lost."""

MIN_SAMPLES = 9
"""Fewest answers to learn from: the longest of nine is a 0.9 quantile of the tenth."""

MIN_FOREST_SAMPLES = 400
"""Fewest answers to grow a forest from. On the Azure 2023 coding trace, whose prompts say almost
nothing about the length, its 0.9 bound is 35 % worse than plain quantiles when grown from 100, 5 %
from 400 and 1 % from 1,600; the newest fifth of 400 is enough to see whether it gains."""

KEPT_SAMPLES = 2_500
"""Newest answers of a key to learn from. More did not improve the forest on that trace."""

NEWEST = 5
"""One answer in this many, the newest ones, is held out to judge whether the forest is used."""
LEVEL = 0.9
"""Level of that comparison."""
_TREES = 30
"""Trees of a forest: as good as 100 on that trace, in a quarter of the time and memory."""
_LEAVES = 20
_GROWTH = 0.1
"""A key is refitted once its answers have grown by this share."""


@record
class LengthSample:
    """An output that ended by itself, or was cut or stopped; `finish_reason` tells which.

    `features`: see `features_of`; empty for samples of versions before features.
    """

    task: TaskName
    node: NodeId
    model: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    features: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        return (self.task, self.node, self.model)


def samples_of(receipt: SlaReceipt) -> tuple[LengthSample, ...]:
    """The outputs of a run that tell lengths.

    An output that was stopped at a deadline counts like one that reached its limit: such outputs
    are the long ones, and without them all others look short. Those of a run that its client gave
    up do not count: their calls end as early in future. Of several answers to one request only the
    sum of their lengths is known.
    """
    return tuple(
        LengthSample(
            receipt.task,
            node.node,
            node.llm.model,
            node.llm.prompt_tokens,
            max(1, node.llm.output_tokens),
            reason,
            node.llm.features,
        )
        for node in receipt.nodes
        if node.llm is not None
        and not node.llm.reused
        and node.llm.calls == 1
        and (reason := _end_of(node, receipt.excuse))
    )


def _end_of(node: NodeReceipt, excuse: Excuse) -> str:
    """How its output ended; empty if that says nothing of its length."""
    facts = node.llm
    assert facts is not None, "only calls have outputs"
    if node.status == NodeStatus.DONE.value:
        return facts.finish_reason if facts.finish_reason in ENDED | {CUT} else ""
    return STOPPED if facts.output_tokens > 0 and excuse is Excuse.NONE else ""


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """The fit of one key. `forest` is None where it is no better than `belief`."""

    belief: LengthBelief
    forest: CompiledForest | None
    seen: int


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """Beliefs by task, node and model. Picklable and pure; a higher `version` is newer."""

    version: int = 0
    keys: Mapping[Key, KeyLengths] = field(default_factory=dict)

    def belief(
        self,
        task: TaskName,
        node: NodeId,
        model: str,
        features: tuple[float, ...],
        max_tokens: int,
    ) -> LengthBelief | None:
        """Equally likely lengths of an output cut at `max_tokens`; None when unknown.

        `features` are those of `features_of`.
        """
        known = self.keys.get((task, node, model))
        if known is None:
            return None
        if known.forest is not None:
            points = known.forest.grid(LengthFeatures(task, features))
        else:
            points = known.belief.points
            if points[-1] <= max_tokens:
                return known.belief
        limit = float(max(1, max_tokens))
        return LengthBelief(tuple(min(point, limit) for point in points))

    def warm_up(self) -> None:
        """Compile or load the code that `belief` runs: seconds in a fresh process, not on demand.

        Arrays from Ray's object store are read-only, which needs another compiled signature.
        """
        for known in self.keys.values():
            if known.forest is not None:
                known.forest.warmed_up()


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Outputs of a key, oldest first, as arrays: one object each would take five times the memory.

    tokens[i]: length. is_whole[i]: it ended by itself, not at its limit. features[i]: those of
    `features_of`.
    """

    tokens: Ints
    is_whole: NDArray[np.bool_]
    features: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> Outputs:
        return Outputs(self.tokens[start:end], self.is_whole[start:end], self.features[start:end])


Due = Mapping[Key, int]
"""Keys to refit, and how many outputs of each were ever seen."""

Taken = Mapping[Key, tuple[Outputs, int]]
"""What to refit: the newest outputs of each key, and how many were ever seen."""


class _Newest:
    """The newest outputs of a key. All memory is taken at the first output and never grows."""

    def __init__(self) -> None:
        # Not `empty` or `zeros`: the system would hand out the memory row by row.
        self._tokens = np.full(KEPT_SAMPLES, -1, dtype=np.int64)
        self._is_whole = np.full(KEPT_SAMPLES, fill_value=True)
        self._features = np.full((KEPT_SAMPLES, len(NAMES)), np.nan)
        self.seen = 0
        self.told = 0  # outputs that were not stopped

    def add(self, tokens: int, features: tuple[float, ...], *, is_whole: bool) -> None:
        row = self.seen % KEPT_SAMPLES
        self._tokens[row] = tokens
        self._is_whole[row] = is_whole
        self._features[row] = features
        self.seen += 1

    def outputs(self) -> Outputs:
        """A copy."""
        if self.seen <= KEPT_SAMPLES:
            rows = np.arange(self.seen)
        else:
            rows = (self.seen + np.arange(KEPT_SAMPLES)) % KEPT_SAMPLES
        return Outputs(self._tokens[rows], self._is_whole[rows], self._features[rows])


class LengthHistory:
    """The newest samples of each key, and how many were ever seen. Mutable; one owner."""

    def __init__(self) -> None:
        self._newest: dict[Key, _Newest] = {}

    def add(self, samples: Iterable[LengthSample]) -> None:
        for sample in samples:
            newest = self._of(sample.key)
            is_whole = sample.finish_reason in ENDED
            newest.add(sample.output_tokens, _features(sample), is_whole=is_whole)
            newest.told += sample.finish_reason != STOPPED

    def restore(self, earlier: Iterable[LengthSample]) -> None:
        """Put samples learnt earlier, oldest first, before those that came since."""
        since = {key: (newest.outputs(), newest.told) for key, newest in self._newest.items()}
        self._newest.clear()
        self.add(earlier)
        for key, (outputs, told) in since.items():
            newest = self._of(key)
            newest.told += told
            for i, tokens in enumerate(outputs.tokens.tolist()):
                newest.add(tokens, tuple(outputs.features[i]), is_whole=bool(outputs.is_whole[i]))

    def due(self, lengths: OutputLengths) -> Due:
        """The keys with enough new samples since `lengths`."""
        return {
            key: newest.seen
            for key, newest in self._newest.items()
            if newest.told >= MIN_SAMPLES and _has_outgrown(newest.seen, lengths.keys.get(key))
        }

    def taken(self, due: Due) -> Taken:
        """Copies of the outputs of the keys of `due`: some 200 kB each."""
        known = {key: self._newest[key] for key in due}
        return {key: (newest.outputs(), newest.seen) for key, newest in known.items()}

    def _of(self, key: Key) -> _Newest:
        newest = self._newest.get(key)
        if newest is None:
            newest = self._newest[key] = _Newest()
        return newest


def refitted(
    lengths: OutputLengths, taken: Taken, version: int, seed: int, *, grows: bool = True
) -> OutputLengths:
    """`lengths` with the keys of `taken` refitted; a tenth of a second for a key with a forest.

    Unless it `grows` forests, all keys get plain quantiles.
    """
    fresh = {
        key: _fitted(key, outputs, seen, seed, grows=grows)
        for key, (outputs, seen) in taken.items()
    }
    return OutputLengths(version, {**lengths.keys, **fresh})


def _has_outgrown(seen: int, known: KeyLengths | None) -> bool:
    return known is None or seen >= known.seen + max(1.0, _GROWTH * min(known.seen, KEPT_SAMPLES))


def _fitted(key: Key, outputs: Outputs, seen: int, seed: int, *, grows: bool) -> KeyLengths:
    records = _records(key, outputs)
    plain = MarginalLengths.fit(records)
    forest = None
    if grows and len(records) >= MIN_FOREST_SAMPLES and _forest_gains(key, outputs, seed):
        forest = _forest(records, seed)
    return KeyLengths(LengthBelief(plain.grid(records[0].features)), forest, seen)


def _forest_gains(key: Key, outputs: Outputs, seed: int) -> bool:
    """Whether a forest of the older outputs bounds the newest ones better than quantiles."""
    end = len(outputs)
    split = end - end // NEWEST
    older, newest = (_records(key, outputs.part(*part)) for part in ((0, split), (split, end)))
    return beats(_forest(older, seed), MarginalLengths.fit(older), newest, LEVEL)


def _forest(records: Sequence[LengthRecord], seed: int) -> CompiledForest:
    settings = ForestSettings(trees=_TREES, min_leaf=len(records) // _LEAVES)
    return ForestLengths.fit(records, seed, settings).compiled()


def _records(key: Key, outputs: Outputs) -> tuple[LengthRecord, ...]:
    task = key[0]
    lengths = completed(outputs.tokens, outputs.is_whole).tolist()
    return tuple(
        LengthRecord(LengthFeatures(task, tuple(values)), length)
        for values, length in zip(outputs.features.tolist(), lengths, strict=True)
    )


def _features(sample: LengthSample) -> tuple[float, ...]:
    """Samples of another version may have other features: then only the prompt is known."""
    if len(sample.features) == len(NAMES):
        return sample.features
    return features_of(Asked(sample.prompt_tokens))
